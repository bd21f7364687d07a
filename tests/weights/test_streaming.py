"""Versions that stream into a loader: each tensor as it comes, the decision at the end."""

import functools
import time
from typing import Any

import pytest
import torch

from hwrl.comm import Store, connect_store, serve_store, store_address
from hwrl.errors import CommAbortedError, CommTimeoutError, ConfigError, ReceiverExcludedError, TransferFailedError
from hwrl.testing.processes import Processes
from hwrl.weights import NamedTensor, StreamReceiver, TransferReport, WeightReceiver, WeightSender
from hwrl_cpu import INFO, CpuBackend
from tests.support.faulty import CorruptingBackend, DyingBackend
from tests.support.speed import slow
from tests.support.weight_link import beside, receiver_of, sender_of, store

__all__ = ["store"]  # the fixture

BUCKET_NBYTES = 4096


def _stream_of(store: Store, replica: str = "s0", **options: Any) -> StreamReceiver:
    return StreamReceiver(store, replica=replica, **{"backend": CpuBackend(INFO), **options})


def _tensors(version: int) -> list[NamedTensor]:
    """More buckets than the ring has, a tensor larger than a bucket, empty, tied, odd and 0-d ones."""
    tied = torch.full((50, 3), float(version))
    return [
        ("tied", tied),
        ("empty", torch.empty(0, 3)),
        *((f"t{number}", torch.full((700 + number,), float(version + number))) for number in range(12)),
        ("large", torch.arange(5000.0) + version),
        ("odd", torch.full((13,), version, dtype=torch.uint8)),
        ("scale", torch.tensor(float(version))),
        ("again", tied),
    ]


def _is_whole(found: dict[str, torch.Tensor], version: int) -> bool:
    expected = dict(_tensors(version))
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def _publish(sender: WeightSender, version: int) -> tuple[TransferReport, float]:
    return sender.publish(version, _tensors(version)), time.monotonic()


def _publish_until_joined(sender: WeightSender, version: int) -> None:
    sender.publish(version, _tensors(version))
    sender.wait_for_receivers(1)
    sender.publish(version, _tensors(version))


def _version_of(receiver: StreamReceiver) -> int | None:
    return receiver.version


def test_tensors_come_while_the_sender_still_sends_and_belong_to_the_caller(store: Store) -> None:
    with sender_of(store, bucket_nbytes=BUCKET_NBYTES, buckets=2) as sender, _stream_of(store, buckets=2) as receiver:
        kept: dict[str, torch.Tensor] = {}
        for version in (1, 2):
            publishing = beside(functools.partial(_publish, sender, version))
            with receiver.stream() as incoming:
                first = next(incoming)
                assert receiver.version is None and incoming.received is None
                time.sleep(0.1)
                resumed = time.monotonic()
                found = dict([first, *incoming])
            report, ended = publishing()
            assert ended > resumed, "the sender did not wait: all tensors are held somewhere"
            assert report.receivers == incoming.attempts == 1 and _version_of(receiver) == version
            assert incoming.received is not None and incoming.received.nbytes == report.nbytes
            assert _is_whole(found, version) and (not kept or _is_whole(kept, version - 1))
            kept = found


def test_leaving_the_context_early_reads_on_to_the_decision(store: Store) -> None:
    with sender_of(store, bucket_nbytes=BUCKET_NBYTES) as sender, _stream_of(store) as receiver:
        publishing = beside(lambda: sender.publish(1, _tensors(1)))
        with receiver.stream() as incoming:
            next(incoming)
        assert (publishing().receivers, receiver.version) == (1, 1)


def test_a_loader_that_fails_leaves_and_the_others_get_the_version(store: Store) -> None:
    with (
        sender_of(store, bucket_nbytes=BUCKET_NBYTES, buckets=2) as sender,
        receiver_of(store) as other,
        _stream_of(store, buckets=2) as receiver,
    ):
        publishing, waiting = beside(lambda: sender.publish(1, _tensors(1))), beside(other.receive)
        with pytest.raises(ZeroDivisionError), receiver.stream() as incoming:
            for _ in incoming:
                _ = 1 / 0
        assert publishing().receivers == 1 and _is_whole(dict(waiting()), 1)
        assert receiver.version is None
        streaming = receiver.stream()  # joins again
        sender.wait_for_receivers(["r0", "s0"])
        publishing, waiting = beside(lambda: sender.publish(2, _tensors(2))), beside(other.receive)
        with streaming as incoming:
            assert _is_whole(dict(incoming), 2)
        assert publishing().receivers == 2 and waiting().version == 2


def test_wrong_bytes_are_no_version(store: Store) -> None:
    wrong = CorruptingBackend(at=3)
    with sender_of(store, bucket_nbytes=BUCKET_NBYTES) as sender, _stream_of(store, backend=wrong) as receiver:
        publishing = beside(lambda: sender.publish(1, _tensors(1)))
        with pytest.raises(ReceiverExcludedError, match=r"corrupt: buckets \[3\]"), receiver.stream() as incoming:
            for _ in incoming:
                pass
        assert publishing().receivers == 0 and receiver.version is None and incoming.received is None


def test_nothing_to_stream_is_a_timeout(store: Store) -> None:
    with _stream_of(store) as receiver, pytest.raises(CommTimeoutError), receiver.stream(timeout_s=0.05) as incoming:
        next(incoming)


def test_a_cancelled_stream_ends_soon_and_the_next_one_works(store: Store) -> None:
    with sender_of(store, bucket_nbytes=BUCKET_NBYTES) as sender, _stream_of(store) as receiver:
        begin = time.monotonic()
        incoming = receiver.stream()
        incoming.cancel()
        with pytest.raises(CommAbortedError):
            next(incoming)
        incoming.close()
        assert time.monotonic() - begin < 300.0
        publishing = beside(lambda: sender.publish(1, _tensors(1)))
        with receiver.stream() as incoming:
            assert _is_whole(dict(incoming), 1)
        assert publishing().receivers == 1


@pytest.mark.parametrize("transport", ["device", "host"])
@pytest.mark.parametrize("taken", [1, 2])
def test_a_stream_closed_after_the_decision_and_before_its_end_has_no_version(
    store: Store, taken: int, transport: str
) -> None:
    small = [("w", torch.ones(3)), ("b", torch.ones(2))]
    with sender_of(store, transport=transport) as sender, _stream_of(store) as receiver:
        publishing = beside(lambda: sender.publish(1, small))
        incoming = receiver.stream()
        assert publishing().receivers == 1, "both tensors are in one bucket, which waits here for the consumer"
        for _ in range(taken):
            next(incoming)
        incoming.close()
        with pytest.raises(CommAbortedError):
            next(incoming)
        assert receiver.version is None and incoming.received is None
        incoming = receiver.stream()  # joins again
        sender.wait_for_receivers(["s0"])
        publishing = beside(lambda: sender.publish(1, small))
        assert len(dict(incoming)) == 2 and receiver.version == 1
        assert publishing().receivers == 1


def test_a_stream_that_was_left_open_ends_when_the_next_one_begins(store: Store) -> None:
    with sender_of(store, bucket_nbytes=BUCKET_NBYTES) as sender, _stream_of(store) as receiver:
        publishing = beside(lambda: _publish_until_joined(sender, 1))
        abandoned = receiver.stream()
        next(abandoned)
        incoming = receiver.stream()  # joins again
        assert _is_whole(dict(incoming), 1)
        publishing()
        with pytest.raises(CommAbortedError):
            next(abandoned)
        publishing = beside(lambda: sender.publish(2, _tensors(2)))
        with receiver.stream() as incoming:
            found = dict([next(incoming)])
            abandoned.close()  # has ended: this is no concern of the newer stream
            found.update(incoming)
        assert publishing().receivers == 1 and _is_whole(found, 2)


def test_a_receiver_that_is_closed_ends_its_stream(store: Store) -> None:
    with _stream_of(store) as receiver:
        incoming = receiver.stream()
    with pytest.raises(CommAbortedError):
        next(incoming)


class _Recorder:
    """A loader that writes down its calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def begin(self) -> None:
        self.calls.append("begin")

    def load(self, tensors: Any) -> None:
        self.calls += [name for name, _ in tensors]

    def finish(self) -> None:
        self.calls.append("finish")

    def cancel(self) -> None:
        self.calls.append("cancel")


def test_a_loader_gets_one_beginning_and_one_end_also_for_a_generator(store: Store) -> None:
    loader = _Recorder()
    with sender_of(store, bucket_nbytes=BUCKET_NBYTES) as sender, receiver_of(store, loader=loader) as receiver:
        for version in (1, 2):
            waiting = beside(receiver.receive)
            sender.wait_for_receivers(1)
            sender.publish(version, (pair for pair in _tensors(version)))
            assert not dict(waiting())
            assert (loader.calls[0], loader.calls[-1]) == ("begin", "finish")
            assert sorted(loader.calls[1:-1]) == sorted(name for name, _ in _tensors(1))
            loader.calls.clear()


def test_a_receiver_has_one_place(store: Store) -> None:
    with pytest.raises(ConfigError, match="`into` and `loader`"):
        WeightReceiver(store, replica="r0", backend=CpuBackend(INFO), into={}, loader=_Recorder())


def _stream_past_a_death(rank: int, address: str) -> Any:
    store = connect_store(address)
    if rank == 0:
        with WeightSender(store, backend=CpuBackend(INFO), bucket_nbytes=BUCKET_NBYTES, timeout_s=slow(4.0)) as sender:
            sender.wait_for_receivers(["s1", "s2"])
            report = sender.publish(1, _tensors(1))
            return report.receivers, set(report.excluded)
    with _stream_of(store, f"s{rank}", backend=DyingBackend(at=6) if rank == 2 else CpuBackend(INFO)) as receiver:
        with receiver.stream() as incoming:
            found = dict(incoming)
        return incoming.attempts, _is_whole(found, 1), receiver.version


def test_a_stream_goes_on_with_the_repeated_transfer_when_another_receiver_is_killed() -> None:
    store = serve_store()
    with Processes(_stream_past_a_death, 3, store_address(store)) as processes:
        assert processes.wait(0).value == (1, {"s2"})
        assert processes.wait(1).value == (2, True, 1)
        assert "exit code -9" in str(processes.wait(2).error)


def _die_in_mid_stream(rank: int, address: str) -> None:
    backend = DyingBackend(at=8) if rank == 0 else CpuBackend(INFO)
    with WeightSender(
        connect_store(address), backend=backend, bucket_nbytes=BUCKET_NBYTES, timeout_s=slow(1.0)
    ) as sender:
        sender.wait_for_receivers(1)
        sender.publish(1, _tensors(1))


def test_a_sender_killed_in_mid_stream_leaves_no_version_and_the_next_sender_repairs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = serve_store()
    monkeypatch.setattr("hwrl.weights.messages.SLACK_S", slow(0.5))
    with _stream_of(store) as receiver:
        with Processes(_die_in_mid_stream, 1, store_address(store)) as processes:
            with pytest.raises(TransferFailedError, match="was not committed"), receiver.stream() as incoming:
                for _ in incoming:
                    pass
            assert incoming.attempts == 1 and receiver.version is None
            assert "exit code -9" in str(processes.wait(0).error)
        with sender_of(store, bucket_nbytes=BUCKET_NBYTES) as sender, receiver_of(store) as other:
            streaming = receiver.stream()
            waiting = beside(other.receive)
            sender.wait_for_receivers(2)
            publishing = beside(lambda: sender.publish(1, _tensors(1)))
            with streaming as incoming:
                assert _is_whole(dict(incoming), 1)
            assert publishing().receivers == 2 and waiting().version == 1
