"""The ipc transport's windows: faults in the middle of them, and how much is held at once."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hwrl.comm import Store, connect_store, serve_store, store_address
from hwrl.errors import CommError, TransferFailedError
from hwrl.interfaces import InlineEvent, InlineStream
from hwrl.testing.processes import Processes, run_processes
from hwrl.weights import WeightLayout, WeightReceiver, WeightSender
from hwrl.weights.buckets import Checksums
from hwrl.weights.destination import DoubleBuffer
from hwrl.weights.messages import VoteKind
from hwrl.weights.report import StageClock
from hwrl.weights.transport import ReceiverContext, SenderRound
from hwrl.weights.transports.ipc import IpcReceiver
from hwrl_cpu import INFO, CpuBackend
from tests.support.speed import slow
from tests.support.weight_link import opened_memories, received_by, store

__all__ = ["store"]  # the fixture

BUCKET_NBYTES = 1 << 16
BUCKETS = 4
TENSORS = 120
SLOW_S = slow(1.0)
LARGE = BUCKET_NBYTES  # elements: 256 KiB, which are read where they lie


def model_of(version: int) -> dict[str, torch.Tensor]:
    """Return small tensors, five in a bucket, and some large ones, each divided among four buckets."""
    elements = [LARGE if number % 10 == 9 else 3001 for number in range(TENSORS)]
    return {f"t{number}": torch.full((size,), float(version * number)) for number, size in enumerate(elements)}


def is_model(received: Any, version: int) -> bool:
    return all(torch.equal(received[name], tensor) for name, tensor in model_of(version).items())


class Dying(IpcReceiver):
    """Is killed when it has copied some windows."""

    def copy_window(self, window: Any, opened: Any, begin: int, *args: Any) -> Any:
        if begin > 4:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().copy_window(window, opened, begin, *args)


class FailingOnce(IpcReceiver):
    """Loses the sender's memory in the middle of its first transfer."""

    failed = False

    def copy_window(self, window: Any, opened: Any, begin: int, *args: Any) -> Any:
        if begin > 4 and not self.failed:
            self.failed = True
            raise CommError("the memory is gone", why="a test", fix="none")
        return super().copy_window(window, opened, begin, *args)


@contextlib.contextmanager
def sender_to(store: Store, receivers: int = 1, *, timeout_s: float = slow(9.0)) -> Iterator[WeightSender]:
    with WeightSender(
        store, transport="ipc", bucket_nbytes=BUCKET_NBYTES, buckets=BUCKETS, timeout_s=timeout_s
    ) as sender:
        sender.wait_for_receivers(receivers)
        yield sender


def seconds_to_publish(sender: WeightSender, version: int, weights: Any) -> float:
    begin = time.monotonic()
    sender.publish(version, weights)
    return time.monotonic() - begin


def send(address: str, receivers: int, *, timeout_s: float = slow(9.0)) -> Any:
    with sender_to(connect_store(address), receivers, timeout_s=timeout_s) as sender:
        reports = []
        for version in (1, 2):
            begin = time.monotonic()
            report = sender.publish(version, model_of(version).items())
            reports.append((report.receivers, dict(report.excluded), time.monotonic() - begin))
        return reports


def send_or_receive(rank: int, address: str, *kinds: type[IpcReceiver]) -> Any:
    if rank == 0:
        return send(address, len(kinds), timeout_s=SLOW_S if Slow in kinds else slow(9.0))
    transports = received_by("ipc", kinds[rank - 1])
    with WeightReceiver(connect_store(address), replica=f"r{rank}", transports=transports) as receiver:
        while receiver.version != 2:
            received = receiver.receive(timeout_s=300.0)
            assert is_model(received, received.version)
        return True


def test_a_receiver_that_is_killed_between_windows_is_excluded_and_the_other_gets_the_version() -> None:
    store = serve_store()
    with Processes(send_or_receive, 3, store_address(store), Dying, IpcReceiver) as processes:
        first, second = processes.wait(0).value
        assert processes.wait(2).value, processes.wait(2).error
        assert "exit code -9" in str(processes.wait(1).error)
    assert first[0] == 1 and first[1].keys() == {"r1"}, first
    assert second[:2] == (1, {})


def test_a_receiver_that_fails_between_windows_is_heard_at_once_and_gets_the_version_in_another_round() -> None:
    store = serve_store()
    reports, *right = run_processes(send_or_receive, 3, store_address(store), FailingOnce, IpcReceiver)
    assert [report[:2] for report in reports] == [(2, {}), (2, {})] and right == [True, True]
    assert reports[0][2] < slow(5.0), "the sender waited for the failed receiver until its time was up"


class Slow(IpcReceiver):
    """Takes longer for all windows than the sender's ``timeout_s``, and less for each."""

    def copy_window(self, window: Any, opened: Any, begin: int, *args: Any) -> Any:
        time.sleep(SLOW_S * (0.23 if begin > 60 else 0.02))
        return super().copy_window(window, opened, begin, *args)


def test_a_slow_receiver_is_waited_for_as_long_as_it_takes_window_after_window() -> None:
    store = serve_store()
    reports, right = run_processes(send_or_receive, 2, store_address(store), Slow, timeout_s=600.0)
    assert [report[:2] for report in reports] == [(1, {}), (1, {})] and right
    assert reports[0][2] > SLOW_S


class Hesitant(IpcReceiver):
    """Has memory open for a while."""

    def copy_window(self, *args: Any) -> Any:
        time.sleep(0.02)
        return super().copy_window(*args)


class Tied:
    """Weights made during the read; the last one is tied to the first; ``fails`` before the last."""

    def __init__(self, *, fails: bool) -> None:
        self._fails = fails
        self.large = torch.arange(4 * LARGE, dtype=torch.float32)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield "embed", self.large
        for number in range(TENSORS // 4):
            yield f"t{number}", torch.full((LARGE,), float(number))
        if self._fails:
            raise ValueError("no more weights")
        yield "head", self.large


def fail_and_send_again(rank: int, address: str) -> Any:
    store = connect_store(address)
    if rank == 1:
        store.set("pid", str(os.getpid()))
        with WeightReceiver(store, replica="r1", transports=received_by("ipc", Hesitant)) as receiver:
            right = []
            for version in (1, 3):
                if version == 3:
                    with pytest.raises(TransferFailedError, match=r"gave up version 2[\s\S]*no more weights"):
                        receiver.receive(timeout_s=300.0)
                received = receiver.receive(timeout_s=300.0)
                right.append(received.version == version and torch.equal(received["head"], Tied(fails=False).large))
            return all(right)
    with sender_to(store) as sender:
        sender.publish(1, Tied(fails=False))
        keys = store.num_keys()
        with pytest.raises(ValueError, match="no more weights"):
            sender.publish(2, Tied(fails=True))
        assert opened_memories(int(store.get("pid"))) == 0, "a receiver has open what is freed from here on"
        assert store.num_keys() <= keys + 5, "of two offers only ready, start, vote, decision and proposal are left"
        return seconds_to_publish(sender, 3, Tied(fails=False))


def test_a_sender_that_fails_goes_on_when_nobody_reads_and_sends_again_at_once() -> None:
    store = serve_store()
    seconds, right = run_processes(fail_and_send_again, 2, store_address(store))
    assert right and seconds < slow(8.0)


def interrupt_the_vote(rank: int, address: str, times: int) -> Any:
    store = connect_store(address)
    if rank == 1:
        with WeightReceiver(store, replica="r1") as receiver:
            while receiver.version != 2:
                try:
                    received = receiver.receive(timeout_s=300.0)
                except TransferFailedError:
                    continue
            return is_model(received, 2)
    with sender_to(store) as sender:
        sender.publish(1, model_of(1).items())
        wait, waits = SenderRound.wait_for_votes, iter([KeyboardInterrupt] * times)

        def interrupted(sending: SenderRound, timeout_s: float, **limits: Any) -> Any:
            for error in waits:
                raise error
            return wait(sending, timeout_s, **limits)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(SenderRound, "wait_for_votes", interrupted)
            with pytest.raises(KeyboardInterrupt):
                sender.publish(2, model_of(2).items())
        return seconds_to_publish(sender, 2, model_of(2).items())


@pytest.mark.parametrize("times", [1, 2], ids=["once", "also while the sender gives up"])
def test_after_an_interrupted_vote_the_version_is_sent_again_at_once(times: int) -> None:
    store = serve_store()
    seconds, right = run_processes(interrupt_the_vote, 2, store_address(store), times)
    assert right and seconds < slow(3.0)


class LosingSecond(CpuBackend):
    """Opens a memory, and fails at the next."""

    def __init__(self) -> None:
        super().__init__(INFO)
        self.opened: list[weakref.ref[torch.Tensor]] = []

    def open_memory(self, handle: Any) -> torch.Tensor:
        if self.opened:
            raise CommError("the memory is gone", why="a test", fix="none")
        memory = torch.zeros(64, dtype=torch.uint8)
        self.opened.append(weakref.ref(memory))
        return memory


@pytest.mark.parametrize("stay", [True, False])
def test_if_one_memory_cannot_be_opened_those_before_it_are_closed_at_once(store: Store, stay: bool) -> None:
    backend, layout = LosingSecond(), WeightLayout.plan([("w", torch.zeros(9))])
    places = [[0, 0], [1, 0]]
    note = {"handles": [{"a": 1}, {"a": 2}], "stay": [stay, stay], "places": places}
    receiving: Any = SimpleNamespace(wait_for_note=lambda key: json.dumps(note).encode())
    destination, sums = DoubleBuffer(layout, backend=backend), Checksums(layout, device=backend.device())
    with pytest.raises(CommError, match="the memory is gone") as error:
        IpcReceiver(ReceiverContext(store, backend, BUCKETS)).receive(receiving, destination, sums, StageClock())
    assert error.traceback and backend.opened[0]() is None


class LateStream(InlineStream):
    """Its events come when somebody waits for them."""

    def record_event(self, event: InlineEvent | None = None) -> InlineEvent:
        made = LateEvent(self.synchronize)
        made.record()
        return made


class LateEvent(InlineEvent):
    def query(self) -> bool:
        return False


class OpeningHere(CpuBackend):
    """Opens memories of its own; ``log`` has the order of what was done."""

    def __init__(self, memories: dict[str, torch.Tensor], *, late: bool) -> None:
        super().__init__(INFO)
        self._memories, self._late = memories, late
        self.log: list[str] = []

    def stream(self) -> Any:
        return LateStream(self.synchronize) if self._late else super().stream()

    def open_memory(self, handle: Any) -> torch.Tensor:
        self.log.append(f"open {handle['name']}")
        return self._memories[handle["name"]]


@pytest.mark.parametrize(
    ("late", "order"),
    [
        (False, ["open 0", "copied/0", "open 1", "copied/1", "open sums", "copied/2"]),
        (True, ["open 0", "open 1", "copied/0", "open sums", "copied/1", "copied/2"]),
    ],
)
def test_a_shown_window_is_copied_before_the_one_before_is_done(store: Store, late: bool, order: list[str]) -> None:
    tensors = {f"t{number}": torch.full((128,), float(number)) for number in range(4)}
    layout = WeightLayout.plan(tensors.items(), bucket_nbytes=512, own_nbytes=512)
    sent = Checksums(layout, device=torch.device("cpu"))
    for index, tensor in enumerate(tensors.values()):
        sent.add(index, tensor.view(torch.uint8))
    memories = {str(one): torch.cat(list(tensors.values())[2 * one : 2 * one + 2]).view(torch.uint8) for one in (0, 1)}
    memories["sums"] = sent.values.view(torch.uint8)
    notes = {
        f"window/{number}": json.dumps({"handles": [{"name": name}], "stay": [False], "places": places}).encode()
        for number, (name, places) in enumerate(
            [("0", [(0, 0), (0, 512)]), ("1", [(0, 0), (0, 512)]), ("sums", [(0, 0)])]
        )
    }
    backend = OpeningHere(memories, late=late)
    receiving: Any = SimpleNamespace(wait_for_note=notes.__getitem__, find_note=notes.get, tell=backend.log.append)
    destination, sums = DoubleBuffer(layout, backend=backend), Checksums(layout, device=backend.device())
    destination.begin()
    end = IpcReceiver(ReceiverContext(store, backend, BUCKETS))
    assert sums.compare(end.receive(receiving, destination, sums, StageClock())).kind is VoteKind.WHOLE
    destination.finish()
    assert all(torch.equal(destination.tensors[name], tensor) for name, tensor in tensors.items())
    assert backend.log == order


def send_nothing(rank: int, address: str) -> Any:
    store = connect_store(address)
    if rank == 1:
        with WeightReceiver(store, replica="r1") as receiver:
            return dict(receiver.receive(timeout_s=300.0))
    with sender_to(store) as sender:
        return sender.publish(1, []).receivers


def test_no_weights_are_a_version_too() -> None:
    store = serve_store()
    assert run_processes(send_nothing, 2, store_address(store)) == [1, {}]
