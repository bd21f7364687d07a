"""The ipc transport: receivers of the same host copy out of the sender's device memory, which they have opened.

Opening and closing a memory takes a driver as long as copying hundreds of megabytes on the device. So smaller tensors
are packed into a ring of slabs, which are opened once: the sender fills one window of it while receivers copy another.
"""

from __future__ import annotations

import collections
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hwrl.errors import CommError, CommTimeoutError, TransferFailedError
from hwrl.interfaces import Backend, Capability, Handle, StreamLike
from hwrl.memory.fingerprint import bytes_of
from hwrl.weights.board import Board, Offer
from hwrl.weights.buffer import Lease, Place
from hwrl.weights.checksum import Checksums
from hwrl.weights.layout import TensorFeed, WeightLayout
from hwrl.weights.report import StageClock
from hwrl.weights.roster import Roster
from hwrl.weights.rounds import Named, Rounds, vote_timeout_s, wire_timeout_s

_BROKEN_OFF = "broken off"


def window_note(number: int) -> str:
    """Return the name of the sender's note that says where the slabs of a window lie."""
    return f"window {number}"


def taken_note(number: int) -> str:
    """Return the name of a receiver's note that it has copied a window, and closed what was not the ring's."""
    return f"taken {number}"


class IpcSender(Rounds):
    """Packs tensors into a ring of ``slabs`` slabs, which receivers read; large tensors they read where these lie.

    Those are held, and must not change, until every receiver has taken their window, or has voted. Two windows are
    under way at most, each of half the ring, or as many bytes.
    """

    def __init__(
        self, board: Board, roster: Roster, layout: WeightLayout, *, backend: Backend, slabs: int, timeout_s: float
    ) -> None:
        self._most_under_way = min(2, slabs)
        self._slots = slabs // self._most_under_way
        slabs = self._slots * self._most_under_way
        super().__init__(board, roster, layout, backend=backend, slabs=slabs, timeout_s=timeout_s)
        backend.require(Capability.DEVICE_IPC, needed_for="send weights by the ipc transport")
        self._under_way: collections.deque[_Window] = collections.deque()
        self._reading: Offer | None = None
        self._shown = 0

    def _move(self, offer: Offer, feed: TensorFeed, clock: StageClock) -> None:
        handles: dict[int, Handle] = {}
        window = _Window(handles)
        for index, slab in enumerate(self._layout.slabs):
            with clock("gather"):
                tensors = feed.of(slab)
            if not window.memories:
                self._await_taken(offer, most_under_way=self._most_under_way - 1)
            with clock("pack"):
                lease = self._buffer.pack(index, tensors)
            self._sums.add(index, lease.memory)
            window.add(lease, stays=lease.copied or feed.is_there)
            if window.slots == self._slots or window.nbytes >= self._slots * self._layout.slab_nbytes:
                self._show(offer, window)
                window = _Window(handles)
        feed.finish()
        if self._layout.slabs:
            window.memories.append((self._sums.values.view(torch.uint8), True))
            self._show(offer, window)
        self._await_taken(offer, most_under_way=0)

    def _show(self, offer: Offer, window: _Window) -> None:
        text = window.to_json(self._backend)  # not earlier: a backend may move memory to where it can be opened
        self._backend.current_stream().synchronize()  # receivers read on streams of their own
        self._under_way.append(window)
        self._board.put_note(offer, window_note(self._shown), text)
        self._shown += 1

    def _await_taken(self, offer: Offer, *, most_under_way: int) -> None:
        """Wait until no more windows than that are under way; CommError if a receiver has given up or is silent."""
        while len(self._under_way) > most_under_way:
            oldest, late = self._shown - len(self._under_way), offer.to
            for late in self._watch(offer, taken_note(oldest), wire_timeout_s(self._timeout_s)):
                if late and (self._gone(offer) or any(self._board.vote(offer, member) for member in late)):
                    raise CommError(
                        "a receiver stopped reading",
                        why=f"of {late} one left, or failed, before it had taken window {oldest}",
                        fix="look at its log; it goes on with the version that it has",
                    )
            if late:
                raise CommTimeoutError(
                    "a receiver reads nothing",
                    why=f"{late} did not take window {oldest} in time",
                    fix="is it alive? give the sender a larger timeout_s if it is slow",
                )
            self._under_way.popleft()

    def _round(self, offer: Offer, named: Named, excluded: dict[str, str], clock: StageClock) -> bool:
        self._reading = offer
        try:
            return super()._round(offer, named, excluded, clock)
        finally:
            self._end_reading(offer)

    def _count_votes(self, *args: Any) -> bool:
        committed = super()._count_votes(*args)
        self._under_way.clear()
        return committed

    def _end_reading(self, offer: Offer) -> None:
        """Let go what was lent, and delete what was noted, when nobody reads it any more, or nobody that counts."""
        if self._under_way:  # the sender failed, and receivers learn of it now
            self._await_votes(offer, vote_timeout_s(self._timeout_s))
        self._reading = None
        self._under_way.clear()
        for number in range(self._shown + 1):
            self._board.forget_note(offer, window_note(number))
            self._board.forget_note(offer, taken_note(number), offer.to)
        self._shown = 0

    def _break_off(self) -> None:
        """Tell those who wait for another window that none comes."""
        if self._reading is not None:
            self._board.put_note(self._reading, window_note(self._shown), _BROKEN_OFF)


class _Window:
    """Memories that receivers may read at the same time, and whether they stay the sender's afterwards."""

    def __init__(self, handles: dict[int, Handle]) -> None:
        self.memories: list[tuple[torch.Tensor, bool]] = []
        self.slots = self.nbytes = 0
        self._handles = handles  # of storages that stay, which this transfer's windows share

    def add(self, lease: Lease, *, stays: bool) -> None:
        self.memories.append((lease.memory, stays))
        self.slots += lease.copied
        self.nbytes += lease.memory.nbytes

    def to_json(self, backend: Backend) -> str:
        """Return handles of whole storages, each once, which of them stay, and where in them each memory lies."""
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


class IpcReceiver:
    """A receiver's end."""

    def __init__(self, *, backend: Backend) -> None:
        self._backend = backend
        self._streams: list[StreamLike] = []

    def receive(
        self,
        await_note: Callable[[str], bytes],
        say: Callable[[str], None],
        place: Place,
        sums: Checksums,
        clock: StageClock,
    ) -> torch.Tensor:
        """Copy what the sender shows into ``place``, and its sums into ``sums``; return its own, for comparison.

        ``await_note`` waits for its notes, ``say`` writes one. Blocks until nothing of the sender's memory is used any
        more, and closes it: what is freed while somebody has it open is lost to the device. Raises CommError if it
        cannot be opened or the sender breaks off, TransferFailedError if a note is malformed.
        """
        if not sums.slabs:
            return torch.empty_like(sums.values)
        staying: dict[str, torch.Tensor] = {}
        window, theirs, begin, number = _read(await_note(window_note(0)), most=sums.slabs + 1), None, 0, 0
        try:
            with clock.span(self._backend):
                while True:
                    theirs = self._copy(window, self._open(window, staying), begin, place, sums)
                    say(taken_note(number))
                    if theirs is not None:
                        return theirs
                    begin, number = begin + len(window.places), number + 1
                    window = _read(await_note(window_note(number)), most=sums.slabs + 1 - begin)
        finally:
            staying.clear()  # an error's traceback keeps this frame

    def _open(self, window: _Shown, staying: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        """Return the memories of ``window``; those that stay are opened once."""
        opened = []
        for handle, stays in zip(window.handles, window.stay, strict=True):
            key = json.dumps(handle, sort_keys=True)
            memory = staying[key] if key in staying else self._backend.open_memory(handle)
            if stays:
                staying[key] = memory
            opened.append(memory)
        return opened

    def _copy(
        self, window: _Shown, opened: list[torch.Tensor], begin: int, place: Place, sums: Checksums
    ) -> torch.Tensor | None:
        """Copy the slabs of ``window``, from number ``begin`` on; return the sender's sums if they are in it."""
        # Two in turn: while one slab is summed and unpacked, the next is copied.
        self._streams = self._streams or [self._backend.stream() for _ in range(2)]
        current = self._backend.current_stream()
        for stream in self._streams:
            stream.wait_stream(current)
        theirs = None
        try:
            for index, (number, offset) in enumerate(window.places, begin):
                if index == sums.slabs:
                    theirs = torch.empty_like(sums.values)
                    theirs.copy_(_part(opened[number], offset, theirs.nbytes).view(torch.int64))
                    break
                stream = self._streams[index % len(self._streams)]
                with stream:
                    lease = place.room(index)
                    lease.memory.copy_(_part(opened[number], offset, lease.memory.numel()), non_blocking=True)
                    sums.add(index, lease.memory)
                    place.land(lease)
                    lease.in_use_until(stream.record_event())
        finally:
            for stream in (*self._streams, current):
                stream.synchronize()
            opened.clear()
        return theirs


@dataclass(frozen=True)
class _Shown:
    """A window as its receivers see it: handles, which of them stay, and a (handle, offset) for each slab or sums."""

    handles: Sequence[Mapping[str, str | int]]
    stay: Sequence[bool]
    places: list[tuple[int, int]]


def _read(note: bytes, *, most: int) -> _Shown:
    if note == _BROKEN_OFF.encode():
        raise CommError("the sender broke off", why="another receiver, or itself, failed", fix="look at its log")
    try:
        found = json.loads(note)
        handles = [dict(handle) for handle in found["handles"]]
        stay = [bool(stays) for stays in found["stay"]]
        places = [(int(number), int(offset)) for number, offset in found["places"]]
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as exc:
        raise _unreadable(f"{type(exc).__name__} in {note[:80]!r}") from exc
    good = len(stay) == len(handles) and all(0 <= number < len(handles) and offset >= 0 for number, offset in places)
    if not 0 < len(places) <= most or not good:
        raise _unreadable(f"{len(places)} places in {len(handles)} memories, and {most} are left at most")
    return _Shown(handles, stay, places)


def _part(memory: torch.Tensor, offset: int, nbytes: int) -> torch.Tensor:
    if offset + nbytes > memory.numel():
        raise _unreadable(f"bytes {offset} to {offset + nbytes} of a memory of {memory.numel()}")
    return memory[offset : offset + nbytes]


def _unreadable(why: str) -> TransferFailedError:
    return TransferFailedError("the sender's memory cannot be opened", why=why, fix="use the same hwrl on both sides")
