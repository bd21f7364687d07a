"""Several ranks send one version: each its share of the buckets, to all receivers at once."""

from __future__ import annotations

import json
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hwrl.comm import await_keys, connect_store, serve_store, store_address
from hwrl.errors import CommTimeoutError, ConfigError, TransferFailedError
from hwrl.testing.processes import Processes, run_processes
from hwrl.weights import WeightLayout, WeightReceiver, WeightSender, WeightSource, bucket_sizes
from hwrl.weights.buckets import TensorReader
from hwrl.weights.control import ControlChannel, Note
from hwrl.weights.membership import Membership
from hwrl.weights.messages import Limits, VoteKind
from hwrl.weights.ranks import Reports, ShareReport
from hwrl.weights.shares import Shares, divide_buckets
from hwrl.weights.source import Gatherers
from hwrl.weights.transport import SenderRound, aborted_when
from hwrl_cpu import INFO, CpuBackend
from tests.support.faulty import DyingBackend, FaultyBackend
from tests.support.fsdp_training import engine_on, join, mixture_directory
from tests.support.sharded_weights import BUCKET_NBYTES, TrainerSide, hard_weights, is_exact, receive_all, sharded
from tests.support.speed import slow
from tests.support.weight_link import channel_of, exchange, newest_proposal, receiver_of, sender_of, store

__all__ = ["mixture_directory", "store"]  # the fixtures

_VERSIONS = 3


# -- the division ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("senders", [1, 2, 3, 7])
def test_shares_are_equal_but_for_a_bucket_up_to_every_point(senders: int) -> None:
    layout = WeightLayout.plan(hard_weights(1), bucket_nbytes=BUCKET_NBYTES)
    nbytes, largest = [0] * senders, max(bucket.nbytes for bucket in layout.buckets)
    for bucket, share in zip(layout.buckets, divide_buckets(layout, senders), strict=True):
        nbytes[share] += bucket.nbytes
        assert max(nbytes) - min(nbytes) <= largest
    assert min(nbytes) > 0


@pytest.mark.parametrize("share", [0, 1])
def test_a_sender_drops_a_tensor_whose_last_bucket_another_sends(share: int) -> None:
    described = [(f"w.{number}", torch.empty(3 * BUCKET_NBYTES // 4, device="meta")) for number in range(8)]
    layout = WeightLayout.plan(described, bucket_nbytes=BUCKET_NBYTES)
    made: list[weakref.ref[torch.Tensor]] = []

    def read() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in described:
            made.append(weakref.ref(whole := torch.zeros(tensor.shape)))
            yield name, whole

    source = WeightSource(lambda: iter(described), read)
    reader, held = TensorReader(layout, source, shares=Shares(layout, (0, 1)), share=share), []
    for bucket, owner in zip(layout.buckets, divide_buckets(layout, 2), strict=True):
        if owner == share:
            assert len(reader.tensors_of(bucket)) == 1
            held.append(sum(one() is not None for one in made))
    assert len(made) == 8 and max(held) == 1


@pytest.mark.parametrize("senders", range(1, 9))
@pytest.mark.parametrize("streams", [False, True])
def test_any_number_of_senders_has_buckets_that_can_be_planned(senders: int, streams: bool) -> None:
    bucket_nbytes, own_nbytes = bucket_sizes(streams=streams, senders=senders)
    layout = WeightLayout.plan(hard_weights(1), bucket_nbytes=bucket_nbytes, own_nbytes=own_nbytes)
    assert layout.bucket_nbytes == bucket_nbytes


# -- every tensor arrives -------------------------------------------------------------------------------------------


def _send_or_receive(rank: int, address: str, ranks: int, senders: int) -> Any:
    if rank >= ranks:
        return receive_all(address, f"r{rank}", _VERSIONS)
    with TrainerSide(address, rank, ranks, senders) as side:
        side.sender.wait_for_receivers(2, timeout_s=600.0)
        reports = [side.send(version) for version in range(1, 1 + _VERSIONS)]
        return [(report.receivers, dict(report.excluded)) for report in reports]


@pytest.mark.parametrize(("ranks", "senders"), [(2, 2), (3, 3), (4, 2)])
def test_shards_reach_every_receiver_bit_for_bit_by_several_senders(ranks: int, senders: int) -> None:
    store = serve_store()
    *sent, first, second = run_processes(_send_or_receive, ranks + 2, store_address(store), ranks, senders)
    assert sent == [[(2, {})] * _VERSIONS] * ranks, "every rank has the report"
    assert first is second is True


def _send_or_receive_a_mixture(rank: int, directory: Path, address: str) -> Any:
    store, backend = connect_store(address), CpuBackend(INFO)
    if rank == 2:
        with WeightReceiver(store, replica="r0", backend=backend) as receiver:
            return dict(receiver.receive(timeout_s=600.0))
    group = join(rank, address, 2)
    engine = engine_on(directory, group)
    with WeightSender(store, group=group, backend=backend, senders=2, bucket_nbytes=BUCKET_NBYTES) as sender:
        sender.wait_for_receivers(1, timeout_s=600.0)
        return sender.publish(1, WeightSource(engine.weights_metadata, engine.named_weights)).nbytes


def test_two_ranks_send_the_experts_that_their_parameters_hold_together(mixture_directory: Path) -> None:
    store = serve_store()
    nbytes, _, received = run_processes(_send_or_receive_a_mixture, 3, mixture_directory, store_address(store))
    wanted = {name: tensor.cpu() for name, tensor in engine_on(mixture_directory, None).named_weights()}
    assert received.keys() == wanted.keys() and any(".experts.3." in name for name in wanted)
    assert all(torch.equal(received[name], tensor) for name, tensor in wanted.items())
    assert nbytes == sum(tensor.nbytes for tensor in wanted.values())


def test_a_parameter_is_gathered_to_the_ranks_that_send_a_part_of_it() -> None:
    def parts(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        asked.append(name)
        yield from ((f"{name}.{row}", tensor[row]) for row in range(len(tensor)))

    asked: list[str] = []
    gatherers = Gatherers((0, 3, 5), {"w": (3,), "experts.0": (0,), "experts.1": (5,), "gone": ()})
    assert gatherers.ranks_for("w", (2,), parts) == (3,)
    assert gatherers.ranks_for("gone", (2,), None) == ()
    assert [list(gatherers.ranks_for("experts", (2, 4), parts)) for _ in range(2)] == [[0, 5]] * 2
    assert asked == ["experts"], "it is asked once"
    assert list(gatherers.ranks_for("experts", (3, 4), None)) == [0, 3, 5], "an unknown name"


# -- when something breaks ------------------------------------------------------------------------------------------


LIMIT_S = 100.0
"""Of a transfer."""


class RaisingBackend(FaultyBackend):
    """Raises an error that is no communication error."""

    def fail(self, received: torch.Tensor) -> None:
        raise MemoryError("no room for a bucket")


class HangingBackend(FaultyBackend):
    """Hangs in the second group with a fault: that of the second sender."""

    def fail(self, received: torch.Tensor) -> None:
        if self.strikes == 0:
            time.sleep(60.0)


def _send_with_a_broken_rank(rank: int, address: str, broken: str) -> Any:
    if rank >= 2:
        return _receive_until_given_up(address, f"r{rank}")
    backends = {"raises": RaisingBackend(at=15), "dies": DyingBackend(at=15)}
    with TrainerSide(address, rank, 2, 2, backend=backends.get(broken) if rank else None, timeout_s=LIMIT_S) as side:
        side.sender.wait_for_receivers(2, timeout_s=600.0)
        side.send(1)
        begin = time.monotonic()
        source = raising(side.group) if broken == "reads" and rank else sharded(side.group, 2)
        try:
            side.send(2, source)
        except (TransferFailedError, MemoryError, KeyError) as exc:
            failure, took_s = f"{type(exc).__name__}: {exc}", time.monotonic() - begin
        if broken == "raises":
            assert not await_keys(side.store, ["told r2", "told r3"], timeout_s=200.0)
            side.send(3)
        return failure, took_s


def raising(group: Any) -> WeightSource:
    """Return a source that fails on its way."""
    whole = sharded(group, 2)

    def read() -> Iterator[tuple[str, torch.Tensor]]:
        for number, pair in enumerate(whole.read()):
            if number == 3:
                raise KeyError("layer.3")
            yield pair

    return WeightSource(whole.metadata, read)


def _receive_until_given_up(address: str, replica: str) -> Any:
    store = connect_store(address)
    with WeightReceiver(store, replica=replica, backend=CpuBackend(INFO)) as receiver:
        first = receiver.receive(timeout_s=800.0)
        try:
            receiver.receive(timeout_s=800.0)
        except TransferFailedError as exc:
            failure = str(exc)
        store.set(f"told {replica}", "")
        kept = receiver.version, is_exact(first, 1)
        try:
            return failure, kept, is_exact(receiver.receive(timeout_s=slow(2.0)), 3)
        except CommTimeoutError:
            return failure, kept, None


def test_an_error_of_a_sending_rank_ends_the_version_for_all_and_the_next_one_is_sent() -> None:
    store = serve_store()
    with Processes(_send_with_a_broken_rank, 4, store_address(store), "raises") as processes:
        (failure, took_s), (own, _), *received = [processes.wait(rank).value for rank in range(4)]
    assert "rank 1 of the senders could not send its share" in failure and "no room for a bucket" in failure
    assert own.startswith("MemoryError") and took_s < slow(45)
    for told, kept, last in received:
        assert "rank 1 of the senders could not send its share" in told
        assert kept == (1, True) and last is True


@pytest.mark.parametrize(("broken", "said"), [("dies", "rank 1 of the senders"), ("reads", "layer.3")])
def test_a_sending_rank_that_is_lost_is_named_in_time_and_receivers_keep_their_version(broken: str, said: str) -> None:
    store = serve_store()
    with Processes(_send_with_a_broken_rank, 4, store_address(store), broken) as processes:
        failure, took_s = processes.wait(0).value
        assert "rank 1 of the senders" in failure and said in failure
        # Gloo may hold an operation that begins while its peer leaves, until the transfer's limit.
        assert took_s < LIMIT_S + slow(35)
        for rank in (2, 3):
            told, kept, _ = processes.wait(rank).value
            assert "rank 1 of the senders" in told and kept == (1, True)
        lost = processes.wait(1)
        assert "exit code -9" in str(lost.error) if broken == "dies" else "KeyError" in str(lost.value)


def _send_past_a_lost_receiver(rank: int, address: str, lost: str) -> Any:
    if rank < 2:
        with TrainerSide(address, rank, 2, 2, timeout_s=600.0 if lost == "dies" else slow(3.0)) as side:
            side.sender.wait_for_receivers(2, timeout_s=600.0)
            begin = time.monotonic()
            reports = [side.send(version) for version in (1, 2)]
            took_s = time.monotonic() - begin
            return [(report.receivers, sorted(report.excluded)) for report in reports], took_s
    faulty = DyingBackend(at=4) if lost == "dies" else HangingBackend(at=4, strikes=2)
    return receive_all(address, f"r{rank}", 2, backend=faulty if rank == 3 else None)


@pytest.mark.parametrize("lost", ["dies", "hangs"])
def test_a_lost_receiver_is_excluded_and_the_other_gets_the_version_of_all_senders(lost: str) -> None:
    store = serve_store()
    with Processes(_send_past_a_lost_receiver, 4, store_address(store), lost) as processes:
        reports, took_s = processes.wait(0).value
        assert reports == [(1, ["r3"]), (1, [])] and took_s < slow(45)
        assert processes.wait(2).value is True


class _Announced:
    """A group whose first rank announces one read for a round, and nothing after it."""

    rank, size, backend = 1, 2, CpuBackend(INFO)
    announced = 0

    def broadcast(self, words: torch.Tensor, *, src: int, async_op: bool) -> Any:
        self.announced += 1
        assert self.announced == 1, "it follows a rank that waits for its shards"
        text = json.dumps({"read": 7}).encode()
        words.copy_(
            torch.frombuffer(bytearray((len(text).to_bytes(8, "big") + text).ljust(len(words))), dtype=torch.uint8)
        )
        return SimpleNamespace(complete=lambda: None)


def test_a_rank_that_reads_nothing_ends_at_once(store: Any) -> None:
    group: Any = _Announced()
    with (
        sender_of(store, group=group, senders=2) as sender,
        pytest.raises(TransferFailedError, match="proposal 7 is unknown"),
    ):
        sender.publish(1, WeightSource.of(hard_weights(1)))


def test_a_report_at_the_last_moment_blames_no_other_rank(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    read = ControlChannel.read

    def read_late(channel: ControlChannel, *what: Any, **options: Any) -> bytes | None:
        if options.get("name") == "share/1":
            time.sleep(0.1)
        return read(channel, *what, **options)

    monkeypatch.setattr(ControlChannel, "read", read_late)
    with sender_of(store) as sender, receiver_of(store) as receiver:
        exchange(sender, [receiver], 1)
        channel, proposal = channel_of(store), newest_proposal(store)
        for share in (1, 2):
            channel.write(proposal, Note.SHARE, ShareReport(VoteKind.WHOLE).to_json(), name=f"share/{share}")
        sending = SenderRound(proposal, channel, Membership(channel))
        Reports((0, 1, 2), Limits(0.1)).wait_until_sent(sending)


def test_an_operation_that_waits_is_aborted_when_its_round_is_over() -> None:
    ended = threading.Event()
    with aborted_when(lambda: True, ended.set):
        assert ended.wait(500.0), "nobody ended the operation that waits"


# -- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["ipc", "host"])
def test_transports_of_one_host_have_one_sender(store: Any, transport: str) -> None:
    with pytest.raises(ConfigError, match=rf"(?s)senders=2.*{transport} transport.*work with: device"):
        sender_of(store, transport=transport, senders=2)


def test_several_senders_need_a_group_of_as_many_ranks(store: Any) -> None:
    with pytest.raises(ConfigError, match=r"(?s)senders=2.*group has 1 rank\(s\)"):
        sender_of(store, senders=2)


def test_several_senders_take_no_iterator(store: Any) -> None:
    done = SimpleNamespace(wait=lambda: None)
    group: Any = SimpleNamespace(rank=0, size=2, backend=CpuBackend(INFO), broadcast=lambda words, **_: done)
    with (
        sender_of(store, group=group, senders=2) as sender,
        pytest.raises(ConfigError, match="cannot share an iterator"),
    ):
        sender.publish(1, iter(hard_weights(1)))
