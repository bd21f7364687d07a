"""The rules of the host transport, with sender and receivers as threads of one process."""

import contextlib
import functools
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hwrl.comm import Store
from hwrl.errors import CommTimeoutError, LayoutMismatchError, TransferFailedError, UnsupportedError
from hwrl.interfaces import InlineEvent, InlineStream
from hwrl.weights import WeightReceiver, WeightSource
from hwrl.weights.report import StageClock
from hwrl.weights.transport import ReceiverContext
from hwrl.weights.transports.host import HostReceiver
from hwrl.weights.transports.host_versions import HostPayload, make_file
from hwrl_cpu import INFO, CpuBackend
from tests.support.faulty import LateBackend
from tests.support.weight_link import beside, channel_of, model_of, newest_proposal, receiver_of, sender_of, store

__all__ = ["store"]  # the fixture


def test_host_versions_wait_for_late_joiners_and_skip_to_the_newest(store: Store) -> None:
    with sender_of(store, transport="host") as sender:
        for version in (1, 2, 3):
            assert sender.publish(version, model_of(version)).receivers == 0
        with receiver_of(store, "late") as late:
            assert (late.poll(), sender.new_receivers()) == (3, ())
            received = late.receive(timeout_s=200.0)
            assert (received.version, received["w"][0].item(), late.poll()) == (3, 3.0, None)
            assert sender.publish(4, model_of(4)).receivers == 1
            assert received["w"][0].item() == 3.0
            assert late.receive(timeout_s=200.0)["w"][0].item() == 4.0


def test_corrupted_host_bytes_are_refused_and_the_old_version_stays(store: Store) -> None:
    with sender_of(store, transport="host") as sender, receiver_of(store) as receiver:
        sender.publish(1, model_of(1))
        old = receiver.receive(timeout_s=200.0)
        sender.publish(2, model_of(2))
        payload = newest_proposal(store).payload
        assert isinstance(payload, HostPayload)
        os.pwrite(payload.files[payload.slot], b"\x01", 0)  # this process is the sender
        with pytest.raises(
            TransferFailedError, match=r"the bytes received differ from those written \(corrupt: buckets \[0\] of 1"
        ):
            receiver.receive(timeout_s=200.0)
        assert receiver.version == 1 and old["w"][0].item() == 1.0
        sender.publish(3, model_of(3))
        assert receiver.receive(timeout_s=200.0).version == 3


_BUCKETS = {"bucket_nbytes": 4096, "transport": "host"}


def _buckets(value: float) -> list[tuple[str, torch.Tensor]]:
    """Four buckets of 4096 bytes."""
    return [("w", torch.full((4, 1024), float(value)))]


@pytest.mark.parametrize("there", [0, 2])
def test_a_receiver_follows_while_the_version_is_written_and_may_time_out_and_come_again(
    store: Store, there: int
) -> None:
    reached, gate = threading.Event(), threading.Event()

    def reach() -> None:
        reached.set()
        assert gate.wait(200.0)

    backend = LateBackend(at=1 + there, reach=reach)
    with sender_of(store, backend=backend, **_BUCKETS) as sender, receiver_of(store) as receiver:
        publishing = beside(lambda: sender.publish(1, _buckets(1)))
        assert reached.wait(200.0)
        with pytest.raises(CommTimeoutError, match=rf"still being written[\s\S]*{there} of 4 buckets are written"):
            receiver.receive(timeout_s=0.05)
        assert receiver.poll() == 1
        gate.set()
        received = receiver.receive(timeout_s=100.0)
        assert publishing().version == received.version == 1
        assert torch.equal(received["w"], _buckets(1)[0][1])


def test_after_a_failure_in_mid_write_the_version_before_is_still_there_for_who_lacks_it(store: Store) -> None:
    def reach() -> None:
        if failing:
            raise OSError("the device fell off the bus")

    failing = False
    backend = LateBackend(at=8 + 3, reach=reach)  # the third bucket of the second version
    with sender_of(store, backend=backend, **_BUCKETS) as sender, receiver_of(store, "old") as old:
        sender.publish(1, _buckets(1))
        kept = old.receive(timeout_s=200.0)
        keys = store.num_keys()
        failing = True
        with pytest.raises(OSError, match="fell off the bus"):
            sender.publish(2, _buckets(2))
        with pytest.raises(TransferFailedError, match=r"version 2 will never be complete[\s\S]*its sender failed"):
            old.receive(timeout_s=200.0)
        assert (old.version, old.poll(), kept["w"].sum().item()) == (1, None, 4096.0)
        with receiver_of(store, "late") as late:
            received = late.receive(timeout_s=200.0)
            assert (received.version, late.version, late.poll()) == (1, 1, None)
            assert torch.equal(received["w"], _buckets(1)[0][1])
        failing = False
        sender.publish(3, _buckets(3))
        assert old.receive(timeout_s=200.0)["w"].sum().item() == 3 * 4096.0
        assert store.num_keys() == keys


def test_a_single_file_holds_a_single_version(store: Store) -> None:
    with sender_of(store, transport="host", versions=1, timeout_s=0.05) as sender:
        sender.publish(1, model_of(1))
        with pytest.raises(TransferFailedError, match="versions=1 files one has the newest version"):
            sender.publish(2, model_of(2))


def test_as_many_versions_are_kept_as_are_read(store: Store) -> None:
    options = {"versions": 3, "timeout_s": 0.05}
    with sender_of(store, transport="host", **options) as sender, contextlib.ExitStack() as claims:
        claimed = []
        for version in (1, 2):
            sender.publish(version, model_of(version))
            reader = HostReceiver(ReceiverContext(store, CpuBackend(INFO), 4))
            claims.callback(reader.close)
            proposal = newest_proposal(store)
            layout = channel_of(store).layout(proposal)
            claimed.append(claims.enter_context(reader.hold(proposal, layout, StageClock())))
        sender.publish(3, model_of(3))
        assert [version.buckets[0][:4].view(torch.float32).item() for version in claimed if version] == [1.0, 2.0]
        with pytest.raises(TransferFailedError, match="receivers have been reading all 2 others"):
            sender.publish(4, model_of(4))


class RegisteringBackend(CpuBackend):
    """The CPU with a list of page-locked memories; ``refuses`` like a device without the capability."""

    def __init__(self, *, refuses: bool = False) -> None:
        super().__init__(INFO)
        self.refuses, self.registered = refuses, 0
        self.calls: list[int] = []

    def register_host_memory(self, memory: torch.Tensor) -> None:
        if self.refuses:
            raise UnsupportedError("cannot page-lock", why="the test says so", fix="ask the test")
        self.registered += 1
        self.calls.append(memory.nbytes)

    def unregister_host_memory(self, memory: torch.Tensor) -> None:
        self.registered -= 1


def test_each_end_page_locks_each_place_once_and_releases_it(store: Store) -> None:
    mine, theirs = RegisteringBackend(), RegisteringBackend()
    receiver = WeightReceiver(store, replica="r0", backend=theirs)
    with sender_of(store, backend=mine, transport="host") as sender:
        for version in range(6):
            report = sender.publish(version, model_of(version))
            assert receiver.receive(timeout_s=200.0).version == version
            assert {"claim", "register", "copy"} < report.seconds.keys()
            assert (mine.registered, theirs.registered) == (2, 2)
        assert mine.registered == theirs.registered == len(mine.calls) == len(theirs.calls) == 2
        with sender_of(store, backend=mine, transport="host") as other:
            other.publish(0, model_of(0))
            receiver.receive(timeout_s=200.0)
            assert (mine.registered, theirs.registered) == (4, 2)
    receiver.close()
    assert mine.registered == theirs.registered == 0


def test_without_page_locking_weights_travel_and_a_warning_says_so(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    backend = RegisteringBackend(refuses=True)
    with (
        sender_of(store, backend=backend, transport="host") as sender,
        receiver_of(store) as receiver,
    ):
        sender.publish(1, model_of(1))
        assert receiver.receive(timeout_s=200.0)["b"].item() == 1.0
    assert "not page-locked" in caplog.text and "the test says so" in caplog.text


def test_without_files_in_memory_versions_are_in_the_temporary_directory_and_a_warning_says_so(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with sender_of(store, transport="host") as sender, receiver_of(store) as receiver:
        sender.publish(1, model_of(1))
        assert receiver.receive(timeout_s=200.0)["b"].item() == 1.0
        assert f"versions of weights are in {tmp_path}" in caplog.text
    assert not list(tmp_path.iterdir())


_WHY = {
    "short": r"the file has 4,096 bytes, and this layout takes [\d,]+",
    "can be shortened": "not a memory file of fixed size",
    "another file": "is now another file",
    "a pipe": "is now another file",
    "open to others": "belongs to another user or is open to others",
    "another user's": "belongs to another user or is open to others",
    "no such place": "in file 7 of 1, with 1 inodes",
}


@pytest.mark.parametrize("fault", [*_WHY])
def test_a_file_that_is_not_what_the_sender_made_is_refused_before_it_is_read(
    store: Store, tmp_path: Path, fault: str
) -> None:
    if fault == "another user's" and os.geteuid() != 0:
        pytest.skip("only root gives files away")
    with sender_of(store, transport="host") as sender, receiver_of(store) as receiver:
        sender.publish(1, model_of(1))
        proposal = newest_proposal(store)
        assert isinstance(proposal.payload, HostPayload)
        with _file_for(tmp_path, fault) as file:
            inode = os.fstat(file).st_ino + (fault == "another file")
            slot = 7 if fault == "no such place" else 0
            payload = replace(proposal.payload, slot=slot, files=(file,), inodes=(inode,))
            channel_of(store).propose(replace(proposal, number=proposal.number + 1, payload=payload))
            with pytest.raises(TransferFailedError, match=f"version 1 cannot be read[\\s\\S]*{_WHY[fault]}"):
                receiver.receive(timeout_s=200.0)


@contextlib.contextmanager
def _file_for(directory: Path, fault: str) -> Iterator[int]:
    if fault == "a pipe":
        os.mkfifo(directory / "pipe")
        file = os.open(directory / "pipe", os.O_RDWR | os.O_NONBLOCK)
    elif fault == "can be shortened":
        file = os.memfd_create("hwrl-weights-unsealed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.fchmod(file, 0o600)
    else:
        file = make_file(0, nbytes=4096)
    if fault == "open to others":
        os.fchmod(file, 0o604)
    if fault == "another user's":
        os.fchown(file, os.getuid() + 1, -1)
    try:
        yield file
    finally:
        os.close(file)


class EagerEvents(CpuBackend):
    """Events of some devices: a wait follows the newest record. Counts the records after a wait."""

    def __init__(self) -> None:
        super().__init__(INFO)
        self.waited: list[InlineEvent] = []  # kept alive, so that no later event has the id of one
        self.again = 0

    def event(self, *, timing: bool = False) -> InlineEvent:
        backend = self

        class Event(InlineEvent):
            def record(self, stream: Any = None) -> None:
                backend.again += any(self is event for event in backend.waited)
                super().record(stream)

        return Event(self.synchronize)

    def stream(self) -> InlineStream:
        backend = self

        class Stream(InlineStream):
            def wait_event(self, event: InlineEvent) -> None:
                backend.waited.append(event)

        return Stream(self.synchronize)


def test_no_event_is_recorded_again_while_a_stream_may_wait_for_it(store: Store) -> None:
    mine, theirs = EagerEvents(), EagerEvents()
    receiver = WeightReceiver(store, replica="r0", backend=theirs)
    with sender_of(store, backend=mine, **_BUCKETS) as sender, receiver:
        for version in (1, 2):
            sender.publish(version, _buckets(version))
            assert torch.equal(receiver.receive(timeout_s=200.0)["w"], _buckets(version)[0][1])
            assert (mine.again, theirs.again) == (0, 0)


def test_a_sender_that_was_closed_and_publishes_again_is_read_from_its_new_files(store: Store) -> None:
    with sender_of(store, transport="host") as sender, receiver_of(store) as receiver:
        for version in (1, 2):
            sender.publish(version, model_of(version))
            assert receiver.receive(timeout_s=200.0)["w"][0].item() == version
            sender.close()


def test_held_weights_are_read_ahead_as_gathering_and_to_their_end_also_if_they_are_wrong(store: Store) -> None:
    ended: list[torch.Tensor] = []
    wrong = torch.zeros(3)

    def read(*, second: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        assert not torch.is_grad_enabled()
        time.sleep(0.2)
        yield "a", tensor
        yield "b", second
        yield "c", tensor
        ended.append(second)

    tensor = torch.zeros(8)
    metadata = [(name, tensor.clone()) for name in "abc"]
    sources = [
        WeightSource(lambda: iter(metadata), functools.partial(read, second=second), holds_tensors=True)
        for second in (tensor, wrong)
    ]
    with sender_of(store, transport="host") as sender:
        assert sender.publish(1, sources[0]).seconds["gather"] >= 0.2
        with pytest.raises(LayoutMismatchError, match="'b' was planned as"):
            sender.publish(2, sources[1])
        assert len(ended) == 2
