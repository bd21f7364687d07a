"""The ipc transport: receivers on the same host open the sender's device memory and copy from it.

Opening and closing memory takes a driver as long as copying hundreds of megabytes on the device. So buckets of several
tensors are packed into a ring, unless their tensors are contiguous in one storage. Receivers open the ring once for
each round. A window is a batch of buckets that receivers may read at the same time. They copy one
window while the sender fills the next.
"""

from __future__ import annotations

import collections
import contextlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hwrl.errors import CommError, TransferFailedError
from hwrl.interfaces import Backend, Capability, Handle
from hwrl.memory.fingerprint import bytes_of
from hwrl.weights.buckets import BucketLease, BucketRing, Checksums, TensorReader
from hwrl.weights.destination import Destination
from hwrl.weights.messages import TransportPayload
from hwrl.weights.report import StageClock
from hwrl.weights.transport import ReceiverContext, ReceiverRound, SenderContext, SenderRound, Transport

_LOOK_S = 1e-4  # a window takes about a millisecond between two devices
_ABORTED = "null"  # instead of a window: the sender has ended the round


def _window_key(number: int) -> str:
    """Return the key of the sender's note about window ``number``."""
    return f"window/{number}"


def _copied_key(number: int) -> str:
    """Return the key of a receiver's note: it has copied window ``number``, and holds only memory for later windows."""
    return f"copied/{number}"


@dataclass(frozen=True)
class IpcPayload(TransportPayload):
    """Empty: a note about each window has all that receivers need."""


class IpcSender:
    """Packs tensors into a ring of ``buckets`` buckets, and tells receivers where to read. Large tensors are read in
    place.

    Tensors that are read in place are held until every receiver has copied their window or has voted; after a failure
    ``votes_s`` at most. Two windows are under way at most, and perhaps a third with only the checksums. Each has half
    of the ring's slots, or as many bytes of other memory.
    """

    def __init__(self, context: SenderContext) -> None:
        context.backend.require(Capability.DEVICE_IPC, needed_for="send weights by the ipc transport")
        self._backend, self._limits = context.backend, context.limits
        self._max_under_way = min(2, context.buckets)
        self._slots = context.buckets // self._max_under_way
        buckets = self._slots * self._max_under_way
        self._buffer = BucketRing(context.layout, backend=context.backend, buckets=buckets)
        self._sums = Checksums(context.layout, device=context.backend.device())
        self._under_way: collections.deque[_LentWindow] = collections.deque()
        self._sending: SenderRound | None = None
        self._shown = 0

    def prepare(self, number: int, to: tuple[int, ...], clock: StageClock) -> IpcPayload:
        """Return the empty payload."""
        return IpcPayload()

    def send(self, sending: SenderRound, reader: TensorReader, clock: StageClock) -> torch.Tensor:
        """Lend the buckets window by window, the checksums in the last one. Block until all windows are copied."""
        self._sending = sending
        with clock.span(self._backend):
            self._show_buckets(sending, reader, clock)
        return self._sums.values

    def _show_buckets(self, sending: SenderRound, reader: TensorReader, clock: StageClock) -> None:
        handles: dict[int, Handle] = {}
        window = _LentWindow(handles)
        for index, bucket in enumerate(reader.layout.buckets):
            with clock("gather"):
                tensors = reader.tensors_of(bucket)
            if not window.memories:
                self._wait_until_copied(sending, max_under_way=self._max_under_way - 1)
            with clock("pack"):
                lease = self._buffer.pack(index, tensors)
            self._sums.add(index, lease.memory)
            window.add(lease, stays=lease.copied or reader.source_holds)
            if window.slots == self._slots or window.nbytes >= self._slots * reader.layout.bucket_nbytes:
                self._show(sending, window)
                window = _LentWindow(handles)
        reader.finish()
        if reader.layout.buckets:
            window.memories.append((self._sums.values.view(torch.uint8), True))
            self._show(sending, window)
        self._wait_until_copied(sending, max_under_way=0)

    def abort(self) -> None:
        """Tell the receivers not to wait for another window."""
        sending = self._sending
        if sending is not None:
            sending.tell(_window_key(self._shown), _ABORTED)

    def end_round(self, sending: SenderRound) -> None:
        """Drop the lent memory and delete the notes. Wait ``votes_s`` at most for votes, if they were not counted."""
        try:
            if self._under_way and not sending.votes_counted:  # the sender failed, and receivers are about to learn it
                sending.wait_for_votes(self._limits.votes_s)
        finally:
            shown, self._shown = self._shown, 0
            self._sending = None
            self._under_way.clear()
            for number in range(shown + 1):
                sending.forget(_window_key(number), of_receivers=False)
                sending.forget(_copied_key(number), of_receivers=True)

    def forget(self, payloads: Sequence[TransportPayload], *, kept: Sequence[TransportPayload]) -> None:
        """Do nothing: each round deletes its notes."""

    def release(self) -> None:
        """Free the ring."""
        self._buffer.release()

    def close(self) -> None:
        """Do nothing: release and end_round have freed all."""

    def _show(self, sending: SenderRound, window: _LentWindow) -> None:
        text = window.to_json(self._backend)  # as late as possible: a backend may move memory to make it shareable
        self._backend.current_stream().synchronize()  # receivers read on their own streams
        self._under_way.append(window)
        sending.tell(_window_key(self._shown), text)
        self._shown += 1

    def _wait_until_copied(self, sending: SenderRound, *, max_under_way: int) -> None:
        """Wait until at most ``max_under_way`` windows are under way. Raises CommError if a receiver does not copy."""
        while len(self._under_way) > max_under_way:
            oldest = self._shown - len(self._under_way)
            sending.wait_for_all(_copied_key(oldest), timeout_s=self._limits.wire_s)
            self._under_way.popleft()


class _LentWindow:
    """The sender's side of a window: memories that receivers may read at the same time.

    ``handles`` are the exported handles of storages that stay open for later windows.
    """

    def __init__(self, handles: dict[int, Handle]) -> None:
        self.memories: list[tuple[torch.Tensor, bool]] = []  # each with: does it stay for later windows?
        self.slots = self.nbytes = 0
        self._handles = handles  # shared by the windows of a round

    def add(self, lease: BucketLease, *, stays: bool) -> None:
        self.memories.append((lease.memory, stays))
        self.slots += lease.copied
        self.nbytes += lease.memory.nbytes

    def to_json(self, backend: Backend) -> str:
        """Return each storage's handle once, whether it stays, and the (handle number, offset) of each memory."""
        numbers: dict[int, int] = {}
        handles: list[Handle] = []
        stay, places = [], []
        for memory, stays in self.memories:
            storage = memory.untyped_storage()
            if storage._cdata not in numbers:
                numbers[storage._cdata] = len(handles)
                handles.append(self._handles.get(storage._cdata) or backend.export_memory(bytes_of(storage)))
                if stays:
                    self._handles[storage._cdata] = handles[-1]
                stay.append(stays)
            places.append((numbers[storage._cdata], int(memory.storage_offset())))
        return json.dumps({"handles": handles, "stay": stay, "places": places})


@dataclass(frozen=True)
class Window:
    """A receiver's side of a window: handles, whether each stays, and the (handle number, offset) of each bucket."""

    handles: Sequence[Mapping[str, str | int]]
    stay: Sequence[bool]
    places: list[tuple[int, int]]

    @classmethod
    def read(cls, note: bytes, *, max_places: int) -> Window:
        """Read the sender's note. Raises CommError if the sender aborted, TransferFailedError if it is malformed."""
        try:
            found = json.loads(note)
            if found is None:
                raise CommError("the sender aborted", why="it or another receiver failed", fix="look at its log")
            handles = [dict(handle) for handle in found["handles"]]
            stay = [bool(stays) for stays in found["stay"]]
            places = [(int(number), int(offset)) for number, offset in found["places"]]
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as exc:
            raise _unreadable(f"{type(exc).__name__} in {note[:80]!r}") from exc
        good = all(0 <= number < len(handles) and offset >= 0 for number, offset in places)
        if not 0 < len(places) <= max_places or len(stay) != len(handles) or not good:
            raise _unreadable(f"{len(places)} buckets in {len(handles)} memories, and at most {max_places} are left")
        return cls(handles, stay, places)


class _Reading:
    """Window ``number``, whose copies are queued. The event ``copied`` is recorded after the last copy."""

    def __init__(self, number: int, memories: list[torch.Tensor]) -> None:
        self.number, self.memories = number, memories
        self.copied: Any = None

    def finish(self, receiving: ReceiverRound) -> None:
        """Wait for the copies, close the memories, and tell the sender that the window is copied."""
        self.copied.synchronize()
        self.memories.clear()
        receiving.tell(_copied_key(self.number))


class IpcReceiver:
    """Opens the sender's memory and copies from it, window by window.

    The copies have their own stream, so that buckets are summed and unpacked at the same time. If the sender has lent
    the next window early enough, its copies are queued before this window's are done. So the link between the devices
    is never idle.
    """

    def __init__(self, context: ReceiverContext) -> None:
        self._backend = context.backend
        self._copying, self._unpacking = context.backend.stream(), context.backend.stream()

    def receive(
        self, receiving: ReceiverRound, destination: Destination, sums: Checksums, clock: StageClock
    ) -> torch.Tensor:
        """Copy all windows; return the sender's checksums.

        Closes the sender's memory in any case, because a device loses memory that is freed while it is open elsewhere.
        """
        if not sums.buckets:
            return torch.empty_like(sums.values)
        opened: dict[str, torch.Tensor] = {}  # memories that stay open for later windows
        under_way: collections.deque[_Reading] = collections.deque()
        note = receiving.wait_for_note(_window_key(0))
        try:
            with clock.span(self._backend), self._streams():
                return self._copy_windows(note, opened, under_way, receiving, destination, sums)
        finally:
            for reading in under_way:  # explicitly: the traceback of an error would keep them open
                reading.memories.clear()
            opened.clear()

    def abort(self) -> None:
        """Do nothing: receive ends by itself when the sender has decided."""

    def close(self) -> None:
        """Do nothing: memory is open only during receive."""

    @contextlib.contextmanager
    def _streams(self) -> Iterator[None]:
        """Order both streams after the current one, and wait for their work at the end."""
        current = self._backend.current_stream()
        self._copying.wait_stream(current)
        self._unpacking.wait_stream(current)
        try:
            yield
        finally:
            for stream in (self._copying, self._unpacking, current):
                stream.synchronize()

    def _copy_windows(
        self,
        note: bytes | None,
        opened: dict[str, torch.Tensor],
        under_way: collections.deque[_Reading],
        receiving: ReceiverRound,
        destination: Destination,
        sums: Checksums,
    ) -> torch.Tensor:
        first = number = 0
        while True:
            note = note or receiving.wait_for_note(_window_key(number))
            window = Window.read(note, max_places=sums.buckets + 1 - first)
            under_way.append(_Reading(number, self._open(window, opened)))
            theirs = self.copy_window(window, under_way[-1], first, destination, sums)
            first, number = first + len(window.places), number + 1
            while len(under_way) > 1:
                under_way.popleft().finish(receiving)
            note = None
            if theirs is None:
                note = _find_early(receiving, _window_key(number), under_way[0].copied)
            if theirs is not None:
                opened.clear()  # before the sender is told, because it may then free its ring
            if note is None:
                under_way.popleft().finish(receiving)
            if theirs is not None:
                return theirs

    def copy_window(
        self, window: Window, reading: _Reading, first: int, destination: Destination, sums: Checksums
    ) -> torch.Tensor | None:
        """Queue the copies of the buckets of ``window``; the first one is bucket number ``first``.

        Returns the sender's checksums if the window has them.
        """
        copying, unpacking = self._copying, self._unpacking
        theirs = None
        for index, (number, offset) in enumerate(window.places, first):
            with copying:
                if index == sums.buckets:
                    theirs = torch.empty_like(sums.values)
                    part = _part(reading.memories, number, offset, theirs.nbytes).view(torch.int64)
                    theirs.copy_(part, non_blocking=True)
                    del part
                    break
                lease = destination.memory_for(index)
                part = _part(reading.memories, number, offset, lease.memory.numel())
                lease.memory.copy_(part, non_blocking=True)
                del part  # another reference would keep the memory open
            unpacking.wait_event(copying.record_event())
            with unpacking:
                sums.add(index, lease.memory)
                destination.unpack(lease)
                lease.in_use_until(unpacking.record_event())
        reading.copied = copying.record_event()
        return theirs

    def _open(self, window: Window, opened: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        """Return the memories of ``window``. Those that stay are opened once. If one cannot be opened, close all."""
        memories: list[torch.Tensor] = []
        try:
            for handle, stays in zip(window.handles, window.stay, strict=True):
                key = json.dumps(handle, sort_keys=True)
                memories.append(opened[key] if key in opened else self._backend.open_memory(handle))
                if stays:
                    opened[key] = memories[-1]
        except BaseException:
            memories.clear()  # the traceback would keep them
            raise
        return memories


def _find_early(receiving: ReceiverRound, key: str, copied: Any) -> bytes | None:
    """Return the sender's note if it exists before the event ``copied`` is done, else None."""
    while not copied.query():
        note = receiving.find_note(key)
        if note is not None:
            return note
        time.sleep(_LOOK_S)
    return None


def _part(memories: list[torch.Tensor], number: int, offset: int, nbytes: int) -> torch.Tensor:
    available = memories[number].numel()  # not a local name for the memory: an error's traceback would keep it open
    if offset + nbytes > available:
        raise _unreadable(f"bytes {offset} to {offset + nbytes} of a memory of {available}")
    return memories[number][offset : offset + nbytes]


def _unreadable(why: str) -> TransferFailedError:
    return TransferFailedError(
        "the sender's note about its memory is wrong", why=why, fix="use the same hwrl on both sides"
    )


# Receivers must open memory that is read in place, so all tensors smaller than a bucket share buckets.
IPC = Transport(IpcPayload, IpcSender, IpcReceiver, packs_large_tensors=True, lends_device_memory=True)
