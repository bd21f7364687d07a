"""The host transport: versions are stored in page-locked files on this host, and receivers copy them when ready."""

from __future__ import annotations

import collections
import contextlib
import os
import time
from collections.abc import Iterator, Sequence

import torch

from hwrl.errors import CommTimeoutError, TransferFailedError
from hwrl.weights.buckets import BucketRing, Checksums, TensorReader
from hwrl.weights.destination import Destination
from hwrl.weights.layout import WeightLayout
from hwrl.weights.messages import Proposal, TransportPayload
from hwrl.weights.report import StageClock
from hwrl.weights.transport import ReceiverContext, ReceiverRound, SenderContext, SenderRound, Transport
from hwrl.weights.transports.host_versions import (
    HostPayload,
    VersionFile,
    is_alive,
    make_file,
    open_version_file,
    version_nbytes,
)

_FIRST_SLOTS = (0, 1)  # made and page-locked in the first transfer; they alternate unless receivers lag
_WRITE_FAILED = -1  # in a file's header instead of the number of buckets: the sender failed while it was writing
_POLL_S = 5e-5  # a bucket of 16 MiB takes 300 µs on its way to the host
_LOOK_S = 0.2


class HostSender:
    """Writes versions into a ring of files. It overwrites neither the newest version nor one that is being read.

    A receiver holds a version by a shared lock on its file; the system releases the lock if the receiver is killed.
    The sender takes the exclusive lock for the moment when it gives the file to another proposal. Receivers may read a
    version while it is written, up to the number of buckets in its header. Each process maps and page-locks a file
    once. The files vanish with this process.
    """

    def __init__(self, context: SenderContext) -> None:
        self._layout, self._backend = context.layout, context.backend
        self._buckets, self._timeout_s = context.buckets, context.limits.timeout_s
        self._files: list[VersionFile | None] = [None] * context.versions
        self._buffer = BucketRing(context.layout, backend=context.backend, buckets=context.buckets)
        self._sums = Checksums(context.layout, device=context.backend.device())
        # Two streams, so that buckets are copied to the host without a gap while later ones are packed and summed.
        self._packing, self._copying = context.backend.stream(), context.backend.stream()
        self._renew_events()
        self._newest_slot: int | None = None

    def prepare(self, number: int, to: tuple[int, ...], clock: StageClock) -> HostPayload:
        """Take a free file for proposal ``number``. Blocks until there is one."""
        with clock("claim"):
            slot = self._take_free_file(number, clock)
        made = [file for file in self._files if file is not None]  # files are made in order
        return HostPayload(
            pid=os.getpid(),
            slot=slot,
            files=tuple(file.descriptor for file in made),
            inodes=tuple(file.inode for file in made),
        )

    def send(self, sending: SenderRound, reader: TensorReader, clock: StageClock) -> torch.Tensor:
        """Copy the tensors to the file taken by :meth:`prepare`. If this fails, write that into the file's header."""
        slot = sending.proposal.payload.slot
        file = self._file(slot)
        try:
            with clock.span(self._backend):
                self._write(file, reader, clock)
        except BaseException:
            file.announce(_WRITE_FAILED)
            raise
        finally:  # after this the caller may change the tensors, and the file may get another version
            self._packing.synchronize()
            self._copying.synchronize()
            self._renew_events()
        self._newest_slot = slot
        return self._sums.values

    def _renew_events(self) -> None:
        """Make an event for each bucket of the next version, because the ring still waits for this version's events.

        Some devices bind a queued wait to the event's latest record. Reusing an event would make an old wait wait for
        the new version.
        """
        self._copied = [self._backend.event() for _ in self._layout.buckets]
        self._packed = [self._backend.event() for _ in self._layout.buckets]

    def abort(self) -> None:
        """Do nothing: no receiver takes part."""

    def end_round(self, sending: SenderRound) -> None:
        """Do nothing: nothing is lent."""

    def forget(self, payloads: Sequence[TransportPayload], *, kept: Sequence[TransportPayload]) -> None:
        """Do nothing: a version's file is reused."""

    def release(self) -> None:
        """Free the ring on the device; the stored versions stay."""
        self._buffer.release()

    def close(self) -> None:
        """Delete the files. A receiver that is reading one can finish."""
        for file in self._files:
            if file is not None:
                file.close()
        self._files = []

    def _take_free_file(self, number: int, clock: StageClock) -> int:
        """Give proposal ``number`` a file that no receiver reads and that does not have the newest version."""
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
                    "there is no free file for a new version",
                    why=f"of versions={len(self._files)} files one has the newest version, and receivers have been "
                    f"reading all {len(self._files) - 1} others for {self._timeout_s:g} s",
                    fix="end receivers that hang, or give the WeightSender more versions",
                )
            time.sleep(0.001)

    def _file(self, slot: int) -> VersionFile:
        file = self._files[slot]
        if file is None:
            descriptor = make_file(slot, nbytes=version_nbytes(self._layout))
            file = self._files[slot] = VersionFile(descriptor, self._layout, backend=self._backend)
        return file

    def _write(self, file: VersionFile, reader: TensorReader, clock: StageClock) -> None:
        held: collections.deque[list[torch.Tensor]] = (
            collections.deque()
        )  # the tensors of buckets that are being copied
        copied = 0
        for index, target in enumerate(file.buckets):
            with clock("gather"):
                held.append(reader.tensors_of(self._layout.buckets[index]))
            self._copy_bucket(index, target, held[-1])
            while copied <= index and (self._copied[copied].query() or len(held) > self._buckets):
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

    def _copy_bucket(self, index: int, target: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
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
    """Reads versions from the sender's files. It maps each file once, until another sender's version comes."""

    def __init__(self, context: ReceiverContext) -> None:
        self._backend = context.backend
        self._sender = (0, 0)
        self._files: dict[int, VersionFile] = {}
        self._copying, self._summing = context.backend.stream(), context.backend.stream()

    def receive(
        self, receiving: ReceiverRound, destination: Destination, sums: Checksums, clock: StageClock
    ) -> torch.Tensor | None:
        """Copy the version, even while it is written; return the sender's checksums, or None if it was replaced.

        Raises TransferFailedError if the files do not exist or are not the sender's, or if the sender failed or died.
        """
        with self.hold(receiving.proposal, sums.layout, clock) as file:
            if file is None:
                return None
            try:
                with clock.span(self._backend):
                    whole = self._follow(file, receiving, destination, sums)
                return file.sums.to(sums.values.device, copy=True) if whole else None
            finally:  # until here the queued copies read the file
                self._copying.synchronize()
                self._summing.synchronize()

    def abort(self) -> None:
        """Do nothing: receive checks the cancellation itself."""

    def close(self) -> None:
        """Unmap the files."""
        for file in self._files.values():
            file.close()
        self._files = {}

    @contextlib.contextmanager
    def hold(self, proposal: Proposal, layout: WeightLayout, clock: StageClock) -> Iterator[VersionFile | None]:
        """Protect the proposed version from being overwritten. Yields None if a newer version has replaced it."""
        with clock("register"):
            file = self._file(proposal, layout)
        held = file.hold(proposal.number)
        try:
            yield file if held else None
        finally:
            file.unlock()

    def _follow(self, file: VersionFile, receiving: ReceiverRound, destination: Destination, sums: Checksums) -> bool:
        """Queue the copy of each bucket as soon as it is written. Return False if there is a newer proposal."""
        current = self._backend.current_stream()
        self._copying.wait_stream(current)
        taken, buckets = 0, len(file.buckets)
        while taken <= buckets:
            written = self._wait_for_more(file, receiving, taken)
            if written is None:
                return False
            for index in range(taken, min(written, buckets)):
                self._take_bucket(index, file.buckets[index], destination, sums)
            taken = written
        current.wait_stream(self._summing)
        return True

    def _take_bucket(self, index: int, bucket: torch.Tensor, destination: Destination, sums: Checksums) -> None:
        with self._copying:
            lease = destination.memory_for(index)
            lease.memory.copy_(bucket, non_blocking=True)
            arrived = self._copying.record_event()
        with self._summing:
            self._summing.wait_event(arrived)
            sums.add(index, lease.memory)
            destination.unpack(lease)
            lease.in_use_until(self._summing.record_event())

    def _wait_for_more(self, file: VersionFile, receiving: ReceiverRound, taken: int) -> int | None:
        """Wait until more than ``taken`` buckets are written; return their number, or None if a newer proposal came."""
        look = time.monotonic() + _LOOK_S
        alive = True
        while True:
            written = file.written()  # after is_alive: the sender may have finished just before it died
            if written > taken:
                return written
            if written == _WRITE_FAILED or not alive:
                raise TransferFailedError(
                    f"version {receiving.proposal.version} will never be complete",
                    why="its sender failed while it was writing" if alive else "its sender died while it was writing",
                    fix="publish again, then receive again",
                )
            if time.monotonic() > receiving.deadline:
                raise CommTimeoutError(
                    f"version {receiving.proposal.version} is still being written",
                    why=f"{taken} of {len(file.buckets)} buckets are written",
                    fix="receive again, with a longer timeout_s",
                )
            if time.monotonic() > look:
                if not receiving.is_newest():
                    return None
                receiving.cancellation.check()
                alive, look = is_alive(receiving.proposal.payload), time.monotonic() + _LOOK_S
            else:
                time.sleep(_POLL_S)

    def _file(self, proposal: Proposal, layout: WeightLayout) -> VersionFile:
        payload = proposal.payload
        sender = (payload.pid, proposal.epoch)
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
            if known is not None and known.inode != payload.inodes[slot]:  # the sender has made new files
                self._files.pop(slot).close()
            if slot not in self._files:
                self._files[slot] = open_version_file(proposal, slot, layout, backend=self._backend)
        return self._files[payload.slot]


HOST = Transport(HostPayload, HostSender, HostReceiver, keeps_versions=True, stage="copy")
