"""The host transport: versions are stored in page-locked files of this host, and receivers fetch them when ready."""

from __future__ import annotations

import collections
import contextlib
import os
import time
from collections.abc import Iterator, Sequence

import torch

from hwrl.errors import CommTimeoutError, TransferFailedError
from hwrl.weights.control import Proposal, TransportPayload
from hwrl.weights.destination import Destination
from hwrl.weights.layout import WeightLayout
from hwrl.weights.report import StageClock
from hwrl.weights.slabs import Checksums, SlabRing, TensorReader
from hwrl.weights.transport import ReceiverContext, ReceiverRound, SenderContext, SenderRound, Transport
from hwrl.weights.transports.host_versions import (
    DirectoryFiles,
    HostPayload,
    MemoryFiles,
    VersionFile,
    is_alive,
    open_version_file,
    payload_of,
    version_nbytes,
)

_FIRST_SLOTS = (0, 1)  # they alternate unless receivers lag; made and page-locked in the first transfer
_TORN = -1  # instead of a number of slabs: writing failed
_POLL_S = 5e-5  # a slab of 16 MiB takes 300 µs on its way to the host
_LOOK_S = 0.2


class HostSender:
    """Writes a ring of files, one version each. It overwrites neither the newest version nor one that is being read.

    A receiver holds a version by a shared lock on its file; the system releases the lock if the receiver is killed.
    The sender takes the exclusive lock for the moment in which it gives the file to another proposal. Receivers may
    read a version while it is written, as far as its header says. Each process maps and page-locks a file once.
    ``close`` deletes the directory; the next sender deletes the directory of a killed one.
    """

    def __init__(self, context: SenderContext) -> None:
        self._layout, self._backend = context.layout, context.backend
        self._slabs, self._timeout_s = context.slabs, context.limits.timeout_s
        self._maker = MemoryFiles() if context.directory is None else DirectoryFiles(context.directory)
        self._files: list[VersionFile | None] = [None] * context.versions
        self._buffer = SlabRing(context.layout, backend=context.backend, slabs=context.slabs)
        self._sums = Checksums(context.layout, device=context.backend.device())
        # Two streams: slabs are copied to the host without a gap while later ones are packed and summed.
        self._packing, self._copying = context.backend.stream(), context.backend.stream()
        self._renew_events()
        self._newest_slot: int | None = None

    def prepare(self, number: int, to: tuple[int, ...], clock: StageClock) -> HostPayload:
        """Take a free file for proposal ``number``; blocks until there is one."""
        with clock("claim"):
            slot = self._take_free_file(number, clock)
        made = [file for file in self._files if file is not None]  # they are made in order
        return HostPayload(
            directory=self._maker.directory,
            pid=os.getpid(),
            slot=slot,
            files=tuple(self._maker.number(index, file.descriptor) for index, file in enumerate(made)),
            inodes=tuple(file.inode for file in made),
        )

    def send(self, sending: SenderRound, reader: TensorReader, clock: StageClock) -> None:
        """Copy the tensors to the file taken by :meth:`prepare`; if this fails, the file says so to its readers."""
        slot = payload_of(sending.proposal).slot
        file = self._file(slot)
        try:
            with clock.span(self._backend):
                self._write(file, reader, clock)
        except BaseException:
            file.announce(_TORN)
            raise
        finally:  # the caller may change the tensors, and the file gets another version
            self._packing.synchronize()
            self._copying.synchronize()
            self._renew_events()
        self._newest_slot = slot

    def _renew_events(self) -> None:
        """Make an event for each slab of the next version: the ring will queue waits for those of this version.

        On some devices a queued wait follows a later record of its event.
        """
        self._copied = [self._backend.event() for _ in self._layout.slabs]
        self._packed = [self._backend.event() for _ in self._layout.slabs]

    def abort(self) -> None:
        """Do nothing: no receiver takes part."""

    def end_round(self, sending: SenderRound) -> None:
        """Do nothing: nothing is lent."""

    def forget(self, payloads: Sequence[TransportPayload], *, kept: Sequence[TransportPayload]) -> None:
        """Do nothing: a version's file is reused."""

    def release(self) -> None:
        """Free the ring on the device; the versions stay."""
        self._buffer.release()

    def close(self) -> None:
        """Delete the files. A receiver that reads one finishes undisturbed."""
        for file in self._files:
            if file is not None:
                file.close()
        self._files = []
        self._maker.close()

    def _take_free_file(self, number: int, clock: StageClock) -> int:
        """Give proposal ``number`` a file that nobody reads and that does not hold the newest version."""
        with clock("register"):
            for slot in _FIRST_SLOTS[: len(self._files)]:
                self._file(slot)
        deadline = time.monotonic() + self._timeout_s
        while True:
            for slot in range(len(self._files)):
                if slot == self._newest_slot:
                    continue
                with clock("register"):
                    file = self._file(slot)
                if file.begin(number):
                    return slot
            if time.monotonic() > deadline:
                raise TransferFailedError(
                    "there is no free place for a new version",
                    why=f"receivers have been reading all {len(self._files) - 1} older ones for {self._timeout_s:g} s",
                    fix="end receivers that hang, or give the WeightSender more versions",
                )
            time.sleep(0.001)

    def _file(self, slot: int) -> VersionFile:
        file = self._files[slot]
        if file is None:
            descriptor = self._maker.make(slot, nbytes=version_nbytes(self._layout))
            file = self._files[slot] = VersionFile(descriptor, self._layout, backend=self._backend)
        return file

    def _write(self, file: VersionFile, reader: TensorReader, clock: StageClock) -> None:
        held: collections.deque[list[torch.Tensor]] = collections.deque()  # the tensors of slabs still being copied
        copied = 0
        for index, target in enumerate(file.slabs):
            with clock("gather"):
                held.append(reader.tensors_of(self._layout.slabs[index]))
            self._copy_slab(index, target, held[-1])
            while copied <= index and (self._copied[copied].query() or len(held) > self._slabs):
                self._copied[copied].synchronize()
                copied = file.announce(copied + 1)
                held.popleft()
        reader.finish()
        with self._copying:
            file.sums.copy_(self._sums.values, non_blocking=True)
        for index in range(copied, len(self._copied)):
            self._copied[index].synchronize()
            file.announce(index + 1)
        self._copying.synchronize()
        file.announce(len(self._copied) + 1)

    def _copy_slab(self, index: int, target: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
        self._packing.wait_stream(self._backend.current_stream())
        with self._packing:
            lease = self._buffer.pack(index, tensors)
            self._sums.add(index, lease.memory)
            self._packed[index].record(self._packing)
        with self._copying:
            self._copying.wait_event(self._packed[index])
            target.copy_(lease.memory, non_blocking=True)
            self._copied[index].record(self._copying)
        lease.in_use_until(self._copied[index])


class HostReceiver:
    """Reads versions from the sender's files. It maps a file once, until a version of another sender comes."""

    def __init__(self, context: ReceiverContext) -> None:
        self._backend = context.backend
        self._sender = ("", 0, 0)
        self._files: dict[int, VersionFile] = {}
        self._copying, self._summing = context.backend.stream(), context.backend.stream()

    def receive(
        self, receiving: ReceiverRound, destination: Destination, sums: Checksums, clock: StageClock
    ) -> torch.Tensor | None:
        """Copy the version, also while it is being written; return the sender's sums, None if it was replaced.

        Raises TransferFailedError if the files are gone or are not the sender's, or if the sender failed or died.
        """
        with self.hold(receiving.proposal, receiving.layout, clock) as file:
            if file is None:
                return None
            try:
                with clock.span(self._backend):
                    whole = self._follow(file, receiving, destination, sums)
                return file.sums.to(sums.values.device, copy=True) if whole else None
            finally:  # the queued copies still read the file
                self._copying.synchronize()
                self._summing.synchronize()

    def abort(self) -> None:
        """Do nothing: nothing is under way outside receive."""

    def close(self) -> None:
        """Unmap the files."""
        for file in self._files.values():
            file.close()
        self._files = {}

    @contextlib.contextmanager
    def hold(self, proposal: Proposal, layout: WeightLayout, clock: StageClock) -> Iterator[VersionFile | None]:
        """Keep the proposed version from being overwritten; yields None if a newer one has already replaced it."""
        with clock("register"):
            file = self._file(proposal, layout)
        held = file.hold(proposal.number)
        try:
            yield file if held else None
        finally:
            file.let_go()

    def _follow(self, file: VersionFile, receiving: ReceiverRound, destination: Destination, sums: Checksums) -> bool:
        """Queue the copy of each slab as soon as it is written; return False if a newer proposal came."""
        current = self._backend.current_stream()
        self._copying.wait_stream(current)
        taken, slabs = 0, len(file.slabs)
        while taken <= slabs:
            written = self._wait_for_more(file, receiving, taken)
            if written is None:
                return False
            for index in range(taken, min(written, slabs)):
                self._take_slab(index, file.slabs[index], destination, sums)
            taken = written
        current.wait_stream(self._summing)
        return True

    def _take_slab(self, index: int, slab: torch.Tensor, destination: Destination, sums: Checksums) -> None:
        with self._copying:
            lease = destination.memory_for(index)
            lease.memory.copy_(slab, non_blocking=True)
            arrived = self._copying.record_event()
        with self._summing:
            self._summing.wait_event(arrived)
            sums.add(index, lease.memory)
            destination.unpack(lease)
            lease.in_use_until(self._summing.record_event())

    def _wait_for_more(self, file: VersionFile, receiving: ReceiverRound, taken: int) -> int | None:
        """Wait until more than ``taken`` slabs are written; return how many, or None if a newer proposal came."""
        look = time.monotonic() + _LOOK_S
        alive = True
        while True:
            written = file.written()  # after the look at the sender: it may have finished just before it died
            if written > taken:
                return written
            if written == _TORN or not alive:
                raise TransferFailedError(
                    f"version {receiving.proposal.version} will never be whole",
                    why="its sender failed while it was writing" if alive else "its sender died while it was writing",
                    fix="publish again; this receiver continues with the version that it has",
                )
            if time.monotonic() > receiving.deadline:
                raise CommTimeoutError(
                    f"version {receiving.proposal.version} is still being written",
                    why=f"{taken} of {len(file.slabs)} slabs are there",
                    fix="receive again, with a longer timeout_s",
                )
            if time.monotonic() > look:
                if not receiving.is_newest():
                    return None
                receiving.cancellation.check()
                alive, look = is_alive(payload_of(receiving.proposal)), time.monotonic() + _LOOK_S
            else:
                time.sleep(_POLL_S)

    def _file(self, proposal: Proposal, layout: WeightLayout) -> VersionFile:
        payload = payload_of(proposal)
        sender = (payload.directory, payload.pid, proposal.epoch)
        if sender != self._sender:
            self.close()
            self._sender = sender
        if not 0 <= payload.slot < len(payload.files) == len(payload.inodes):
            raise TransferFailedError(
                f"version {proposal.version} cannot be read",
                why=f"it is in file {payload.slot} of {len(payload.files)}, with {len(payload.inodes)} inodes",
                fix="use the same hwrl on both sides",
            )
        for slot in range(len(payload.files)):
            known = self._files.get(slot)
            if known is not None and known.inode != payload.inodes[slot]:  # the sender was closed, and made new files
                self._files.pop(slot).close()
            if slot not in self._files:
                self._files[slot] = open_version_file(proposal, slot, layout, backend=self._backend)
        return self._files[payload.slot]


HOST = Transport(HostPayload, HostSender, HostReceiver, keeps_versions=True, stage="copy")
