"""The rules of the weight link, with sender and receivers as threads of one process; the groups are real."""

import contextlib
import gc
import time
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hwrl.comm import Store, connect_store, serve_store, store_address
from hwrl.errors import (
    CommError,
    CommTimeoutError,
    ConfigError,
    LayoutMismatchError,
    PeerLostError,
    ReceiverExcludedError,
    TransferFailedError,
)
from hwrl.weights import TRANSPORTS, WeightReceiver, WeightSource
from hwrl.weights.buckets import TensorReader
from hwrl.weights.control import ControlChannel
from hwrl.weights.report import StageClock
from hwrl.weights.transport import SenderRound
from hwrl.weights.transports.device import DeviceSender, Lanes
from hwrl_cpu import INFO, CpuBackend
from tests.support.faulty import CorruptingBackend
from tests.support.speed import slow
from tests.support.weight_link import beside, channel_of, exchange, model_of, receiver_of, sender_of, store

__all__ = ["store"]  # the fixture


def test_poll_offers_each_version_once_and_never_blocks(store: Store) -> None:
    with sender_of(store) as sender, receiver_of(store) as receiver:
        assert receiver.poll() is None
        publishing = beside(lambda: sender.publish(5, model_of(5)))
        while receiver.poll() is None:
            pass
        assert receiver.poll() == 5
        received = receiver.receive()
        assert publishing().receivers == 1
        assert (receiver.poll(), receiver.version, received["w"][0].item()) == (None, 5, 5.0)


def test_without_receivers_a_version_is_published_to_nobody_and_new_receivers_are_told(store: Store) -> None:
    with sender_of(store) as sender:
        assert sender.publish(1, model_of(1)).receivers == 0
        assert sender.new_receivers() == ()
        with receiver_of(store, "late") as receiver:
            assert sender.new_receivers() == ("late",)
            assert receiver.poll() is None
            assert exchange(sender, [receiver], 1).receivers == 1
            assert sender.new_receivers() == ()


def test_a_restarted_replica_takes_its_namesakes_place(store: Store) -> None:
    with sender_of(store) as sender:
        dead = receiver_of(store, "r0")
        exchange(sender, [dead], 1)
        with receiver_of(store, "r0") as restarted:
            report = exchange(sender, [restarted], 2)
            assert (report.receivers, dict(report.excluded)) == (1, {})
            with pytest.raises(ReceiverExcludedError, match="another receiver joined under the name 'r0'"):
                dead.poll()


@pytest.mark.parametrize("when", ["between two looks", "during a look"])
def test_a_receiver_that_joins_again_leaves_its_old_number_quietly(
    store: Store, when: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with sender_of(store) as sender, receiver_of(store) as receiver:
        exchange(sender, [receiver], 1)
        if when == "between two looks":
            receiver.join()
        else:
            look = ControlChannel.join_counts

            def look_as_it_joins(channel: ControlChannel) -> tuple[int, int]:
                receiver.join()
                return look(channel)

            monkeypatch.setattr(ControlChannel, "join_counts", look_as_it_joins)
        assert sender.new_receivers() == ("r0",)
        monkeypatch.undo()
        assert exchange(sender, [receiver], 1).receivers == 1
    assert not caplog.records


def test_a_receiver_that_restarts_while_the_sender_waits_is_served(store: Store) -> None:
    with sender_of(store) as sender:
        dead = receiver_of(store, "r0")
        publishing = beside(lambda: sender.publish(1, model_of(1)))
        while dead.poll() is None:
            pass
        with receiver_of(store, "r0") as restarted:
            assert restarted.receive(timeout_s=100.0).version == 1
            assert publishing().receivers == 1


def test_a_receiver_that_does_not_come_is_named_and_may_join_again(store: Store) -> None:
    with (
        sender_of(store, timeout_s=2.0) as sender,
        receiver_of(store, "here") as here,
        receiver_of(store, "absent") as absent,
    ):
        report = exchange(sender, [here], 1)
        assert report.receivers == 1
        assert dict(report.excluded) == {"absent": f"it was not ready to receive within {slow(2):g} s"}
        with pytest.raises(ReceiverExcludedError, match=r"was not ready to receive[\s\S]*join\(\)"):
            absent.receive(timeout_s=200.0)
        absent.join()
        assert sender.new_receivers() == ("absent",)
        assert exchange(sender, [here, absent], 2).receivers == 2


def test_a_new_sender_deposes_the_old_and_may_go_back(store: Store) -> None:
    with sender_of(store) as first, receiver_of(store) as receiver:
        exchange(first, [receiver], 9)
        with pytest.raises(TransferFailedError, match="version 8 cannot follow version 9"):
            first.publish(8, model_of(8))
        with sender_of(store) as second:
            exchange(second, [receiver], 3)
            assert receiver.version == 3
            with pytest.raises(TransferFailedError, match=r"deposed[\s\S]*sender 2 has taken over"):
                first.publish(10, model_of(10))


def test_other_tensors_need_another_sender(store: Store) -> None:
    with sender_of(store) as sender, receiver_of(store) as receiver:
        exchange(sender, [receiver], 1)
        with pytest.raises(LayoutMismatchError, match="'b' was planned as"):
            sender.publish(2, [("w", torch.zeros(700)), ("b", torch.zeros(2))])
        with sender_of(store) as other:
            waiting = beside(lambda: receiver.receive(timeout_s=600.0))
            other.publish(2, [("only", torch.ones(3))])
            assert list(waiting()) == ["only"]


def _into(store: Store, targets: dict[str, torch.Tensor]) -> WeightReceiver:
    return WeightReceiver(store, replica="r0", backend=CpuBackend(INFO), into=targets)


def test_a_version_is_received_into_the_receivers_own_tensors(store: Store) -> None:
    targets = {"b": torch.zeros(()), "w": torch.zeros(1400)[::2], "other": torch.ones(3)}
    places = {name: tensor.data_ptr() for name, tensor in targets.items()}
    with sender_of(store, bucket_nbytes=1024) as sender, _into(store, targets) as receiver:
        for version in (1, 2):
            exchange(sender, [receiver], version)
            assert targets["w"].eq(version).all() and targets["b"].item() == version
    assert {name: tensor.data_ptr() for name, tensor in targets.items()} == places
    assert targets["other"].eq(1).all()


def test_a_damaged_bucket_excludes_its_receiver_which_has_no_version_until_it_joins_again(store: Store) -> None:
    targets = {"w": torch.zeros(700), "b": torch.zeros(())}
    backend = CorruptingBackend(at=2)  # a bucket and the sums are one version
    with (
        sender_of(store) as sender,
        receiver_of(store, "well") as well,
        receiver_of(store, backend=backend, into=targets) as receiver,
    ):
        exchange(sender, [well, receiver], 1)
        waiting = [beside(well.receive), beside(receiver.receive)]
        report = sender.publish(2, model_of(2))
        assert report.receivers == 1 and waiting[0]().version == 2
        assert report.excluded.keys() == {"r0"} and "other bytes than were sent" in report.excluded["r0"]
        with pytest.raises(ReceiverExcludedError, match=r"corrupt: buckets \[0\]"):
            waiting[1]()
        with pytest.raises(ReceiverExcludedError):
            receiver.poll()
        assert receiver.version is None
        receiver.join()
        exchange(sender, [receiver], 2)
        assert receiver.version == 2 and targets["w"].eq(2).all()


def test_an_offer_that_comes_between_two_looks_is_not_overslept(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hwrl.weights.registrations.RECEIVER_LOOK_S", 1000.0)
    with sender_of(store, transport="host") as sender, receiver_of(store) as receiver:
        look, looks = ControlChannel.newest, 0

        def look_and_be_late(channel: ControlChannel) -> int:
            nonlocal looks
            newest, looks = look(channel), looks + 1
            if looks == 1:
                sender.publish(1, model_of(1))
            return newest

        monkeypatch.setattr(ControlChannel, "newest", look_and_be_late)
        begin = time.monotonic()
        assert receiver.receive(timeout_s=600.0).version == 1
        assert time.monotonic() - begin < 500.0


@pytest.mark.parametrize(
    ("targets", "why"),
    [
        ({"w": torch.zeros(700)}, "'b' cannot be received in place[\\s\\S]*no tensor of this name"),
        ({"w": torch.zeros(70), "b": torch.zeros(())}, r"has it as torch.float32 \[700\], the receiver as"),
    ],
    ids=["missing", "shape"],
)
def test_targets_that_do_not_fit_are_named_and_hold_nobody_up_and_others_may_be_given(
    store: Store, targets: dict[str, torch.Tensor], why: str
) -> None:
    with sender_of(store, bucket_nbytes=1024) as sender, _into(store, targets) as receiver:
        publishing = beside(lambda: sender.publish(1, model_of(1)))
        with pytest.raises(LayoutMismatchError, match=why):
            receiver.receive(timeout_s=600.0)
        assert publishing().receivers == 0 and sender.receivers() == ()
        assert not any(tensor.any() for tensor in targets.values())
        targets |= model_of(0)
        receiver.poll()  # joins again
        exchange(sender, [receiver], 1)


class _Made:
    """Weights made during the read; counts the living ones, and the reads."""

    def __init__(self, count: int) -> None:
        self.count, self.alive, self.most, self.read = count, 0, 0, 0

    def source(self) -> WeightSource:
        return WeightSource(self._metadata, self._read)

    def _metadata(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((f"t{number}", torch.empty(2000, device="meta")) for number in range(self.count))

    def _read(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.read += 1
        for number in range(self.count):
            tensor = torch.full((2000,), float(number))
            weakref.finalize(tensor, self._forget)
            self.alive += 1
            self.most = max(self.most, self.alive)
            yield f"t{number}", tensor

    def _forget(self) -> None:
        self.alive -= 1


class _Breaking(DeviceSender):
    """Loses its receivers after the tensors were read."""

    def send(self, sending: SenderRound, reader: TensorReader, clock: StageClock) -> torch.Tensor:
        tensors = [reader.tensors_of(bucket) for bucket in reader.layout.buckets]
        raise CommError("a receiver was lost", why="a test", fix=f"none: {len(tensors)} buckets were read")


def test_a_torn_transfer_keeps_no_tensor_alive(store: Store) -> None:
    made = _Made(4)
    transports = {**TRANSPORTS, "device": replace(TRANSPORTS["device"], sender=_Breaking)}
    gc.collect()
    gc.disable()
    try:
        with sender_of(store, transports=transports, timeout_s=1.0) as sender, receiver_of(store) as receiver:
            waiting = beside(lambda: receiver.receive(timeout_s=600.0))
            assert sender.publish(1, made.source()).excluded
            assert made.read == 1 and made.alive == 0
            with pytest.raises(ReceiverExcludedError):
                waiting()
    finally:
        gc.enable()


def test_waiting_says_who_came_and_what_was_not_offered(store: Store) -> None:
    with sender_of(store) as sender, receiver_of(store, "only") as receiver:
        with pytest.raises(CommTimeoutError, match=r"1 of 2 receivers joined[\s\S]*\['only'\]"):
            sender.wait_for_receivers(2, timeout_s=0.05)
        with pytest.raises(CommTimeoutError, match="no new version of 'policy' was offered to 'only'"):
            receiver.receive(timeout_s=0.05)


def test_two_links_of_one_store_do_not_meet(store: Store) -> None:
    with sender_of(store) as sender, sender_of(store, name="critic") as critic, receiver_of(store) as receiver:
        assert critic.publish(4, model_of(4)).receivers == 0
        exchange(sender, [receiver], 1)


def test_the_store_does_not_grow_with_exclusions_and_withdrawn_offers(store: Store) -> None:
    with sender_of(store, timeout_s=0.5) as sender, receiver_of(store) as receiver:
        keys = []
        for version in range(3):
            assert sender.publish(version, model_of(version)).excluded.keys() == {"r0"}
            receiver.join()
            exchange(sender, [receiver], version)
            keys.append(store.num_keys())
        assert keys == keys[:1] * 3


def test_a_look_at_the_members_does_not_ask_for_receivers_that_left_long_ago(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    with sender_of(store) as sender:
        look = ControlChannel.replica

        def look_and_note(channel: ControlChannel, member: int) -> str | None:
            asked.append(member)
            return look(channel, member)

        monkeypatch.setattr(ControlChannel, "replica", look_and_note)
        for _ in range(5):
            receiver_of(store).close()
            assert sender.new_receivers() == ()
    assert asked == [1, 2, 3, 4, 5]


def test_wrong_options_are_refused(store: Store) -> None:
    with pytest.raises(ConfigError, match="no transport 'carrier pigeon'"):
        sender_of(store, transport="carrier pigeon")
    with pytest.raises(ConfigError, match="bucket_nbytes=1000"):
        sender_of(store, bucket_nbytes=1000)
    with pytest.raises(ConfigError, match="versions=0"):
        sender_of(store, transport="host", versions=0)
    with sender_of(store) as sender, pytest.raises(TransferFailedError, match="more than strings and numbers"):
        sender.publish(1, model_of(1), {"config": {"lr": 1}})  # type: ignore[dict-item]  # that is the point


@pytest.mark.parametrize("version", [3.0, True, "3", None])
def test_a_version_that_is_no_integer_is_refused_and_waiting_receivers_are_told(store: Store, version: Any) -> None:
    weights = iter(model_of(1))
    with sender_of(store) as sender, receiver_of(store) as receiver:
        waiting = beside(lambda: receiver.receive(timeout_s=600.0))
        with pytest.raises(TransferFailedError, match=rf"version {version!r} cannot be sent"):
            sender.publish(version, weights)
        assert next(weights, None) is None, "an iterator is read to its end"
        with pytest.raises(TransferFailedError, match="cannot be sent"):
            waiting()
        exchange(sender, [receiver], 1)


def test_a_version_may_be_an_integer_of_another_library(store: Store) -> None:
    with sender_of(store) as sender, receiver_of(store) as receiver:
        waiting = beside(lambda: receiver.receive(timeout_s=600.0))
        number: Any = torch.tensor(3)
        assert type(sender.publish(number, model_of(3)).version) is int
        assert type(waiting().version) is int


def test_a_lost_store_is_named() -> None:
    served = serve_store()
    receiver = receiver_of(connect_store(store_address(served)))
    del served
    with pytest.raises(PeerLostError, match="the store cannot be reached"):
        receiver.poll()


def test_a_receiver_that_has_lost_its_store_is_closed_whole() -> None:
    served = serve_store()
    with sender_of(connect_store(store_address(served)), transport="host") as sender:
        receiver = receiver_of(connect_store(store_address(served)))
        sender.publish(1, model_of(1))
        of_sender = _opened_versions()
        assert receiver.receive(timeout_s=200.0).version == 1
        assert _opened_versions() - of_sender, "the receiver keeps its file open"
        del served
        with pytest.raises(KeyError, match="its own"), receiver:
            raise KeyError("its own")
        assert not _opened_versions() - of_sender


def _opened_versions() -> set[str]:
    """Return the descriptors of version files that this process has open, and where they lead."""
    found = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # it was closed meanwhile
            found.add(f"{descriptor.name} -> {descriptor.readlink()}")
    return {one for one in found if "hwrl-weights" in one}


def test_a_first_number_without_a_proposal_hides_no_later_one(store: Store) -> None:
    channel_of(store).reserve_number(1)
    with sender_of(store) as sender, receiver_of(store) as receiver:
        exchange(sender, [receiver], 1)
        assert channel_of(store).newest() == 2


def test_the_time_of_a_transfer_does_not_include_connecting(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(Lanes):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            time.sleep(1.0)

    with sender_of(store) as sender, receiver_of(store) as receiver:
        monkeypatch.setattr("hwrl.weights.transports.device.Lanes", Slow)
        report = exchange(sender, [receiver], 1)
        assert 0.0 < report.transfer_s <= report.seconds["wire"] - 1.0
