"""The ipc transport: receivers of the same host copy out of the sender's device memory, which they have opened."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hwrl.backend import Backend, Capability, StreamLike
from hwrl.errors import TransferFailedError
from hwrl.memory.fingerprint import bytes_of
from hwrl.weights.board import Board, Offer
from hwrl.weights.buffer import Place
from hwrl.weights.checksum import Checksums
from hwrl.weights.layout import TensorFeed, WeightLayout
from hwrl.weights.report import StageClock
from hwrl.weights.roster import Roster
from hwrl.weights.rounds import Rounds

EXPORTS, READY = "exports", "ready"
"""The sender's notes: where its memory is, so that receivers open it, and that it may be read."""


class IpcSender(Rounds):
    """Lets receivers read the tensors where they lie; only slabs of several small tensors are copied, and kept.

    The tensors are held, and must not change, until every receiver has voted.
    """

    def __init__(
        self, board: Board, roster: Roster, layout: WeightLayout, *, backend: Backend, timeout_s: float
    ) -> None:
        # A slot for each slab: what is packed stays until the receivers have copied it. Empty slots cost nothing.
        slabs = max(1, len(layout.slabs))
        super().__init__(board, roster, layout, backend=backend, slabs=slabs, timeout_s=timeout_s)
        backend.require(Capability.DEVICE_IPC, needed_for="send weights by the ipc transport")
        self._lent: list[torch.Tensor] = []

    def _move(self, offer: Offer, feed: TensorFeed, clock: StageClock) -> None:
        memories = []
        for index, slab in enumerate(self._layout.slabs):
            with clock("gather"):
                tensors = feed.of(slab)
            with clock("pack"):
                memories.append(self._buffer.pack(index, tensors).memory)
        feed.finish()
        exports = _Exports(self._backend)
        for memory in (*memories, self._sums.values.view(torch.uint8)):
            exports.add(memory)  # not earlier: a backend may move memory to where it can be opened
        self._lent = exports.memories
        self._board.put_note(offer, EXPORTS, exports.to_json())  # opening takes a while
        for index, memory in enumerate(memories):
            self._sums.add(index, memory)
        self._backend.current_stream().synchronize()  # receivers read on streams of their own
        self._board.put_note(offer, READY, "ready")

    def _count_votes(self, *args: Any) -> bool:
        committed = super()._count_votes(*args)
        self._lent = []
        return committed

    def _break_off(self) -> None:
        """Forget what was lent; no receiver reads it any more, or none that is waited for."""
        self._lent = []


class _Exports:
    """Handles of whole storages, each once, and where in them each slab lies."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._numbers: dict[int, int] = {}
        self._handles: list[dict[str, str | int]] = []
        self._places: list[tuple[int, int]] = []
        self.memories: list[torch.Tensor] = []

    def add(self, memory: torch.Tensor) -> None:
        storage = memory.untyped_storage()
        if storage._cdata not in self._numbers:
            self._numbers[storage._cdata] = len(self._handles)
            self.memories.append(bytes_of(storage))
            self._handles.append(self._backend.export_memory(self.memories[-1]))
        self._places.append((self._numbers[storage._cdata], int(memory.storage_offset())))

    def to_json(self) -> str:
        return json.dumps({"handles": self._handles, "places": self._places})


class IpcReceiver:
    """A receiver's end."""

    def __init__(self, *, backend: Backend) -> None:
        self._backend = backend
        self._streams: list[StreamLike] = []

    def receive(
        self, await_note: Callable[[str], bytes], place: Place, sums: Checksums, clock: StageClock
    ) -> torch.Tensor:
        """Copy what the sender lends into ``place``, and its sums into ``sums``; ``await_note`` waits for its notes.

        Returns the sender's sums, for comparison. Blocks until nothing of the sender's memory is used any more, and
        closes it: what is freed while somebody has it open is lost to the device. Raises CommError if it cannot be
        opened, TransferFailedError if the note is malformed.
        """
        lent = _read(await_note(EXPORTS), sums.slabs)
        opened = [self._backend.open_memory(handle) for handle in lent.handles]
        try:
            await_note(READY)
            with clock.span(self._backend):
                return self._copy(lent.places, opened, place, sums)
        finally:
            for stream in (*self._streams, self._backend.current_stream()):
                stream.synchronize()

    def _copy(
        self, places: list[tuple[int, int]], opened: list[torch.Tensor], place: Place, sums: Checksums
    ) -> torch.Tensor:
        current = self._backend.current_stream()
        # Two in turn: while one slab is summed and unpacked, the next is copied.
        self._streams = self._streams or [self._backend.stream() for _ in range(2)]
        for stream in self._streams:
            stream.wait_stream(current)
        for index, (number, offset) in enumerate(places[:-1]):
            stream = self._streams[index % len(self._streams)]
            with stream:
                lease = place.room(index)
                lease.memory.copy_(_part(opened[number], offset, lease.memory.numel()), non_blocking=True)
                sums.add(index, lease.memory)
                place.land(lease)
                lease.in_use_until(stream.record_event())
        for stream in self._streams:
            current.wait_stream(stream)
        number, offset = places[-1]
        theirs = torch.empty_like(sums.values)
        return theirs.copy_(_part(opened[number], offset, theirs.nbytes).view(torch.int64))


@dataclass(frozen=True)
class _Opening:
    """What the sender wrote: handles, and a (handle, offset) for each slab and for the checksums."""

    handles: Sequence[Mapping[str, str | int]]
    places: list[tuple[int, int]]


def _read(note: bytes, slabs: int) -> _Opening:
    try:
        found = json.loads(note)
        handles = [dict(handle) for handle in found["handles"]]
        places = [(int(number), int(offset)) for number, offset in found["places"]]
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as exc:
        raise _unreadable(f"{type(exc).__name__} in {note[:80]!r}") from exc
    good = all(0 <= number < len(handles) and offset >= 0 for number, offset in places)
    if len(places) != slabs + 1 or not good:
        raise _unreadable(f"{len(places)} places in {len(handles)} memories for {slabs} slabs")
    return _Opening(handles, places)


def _part(memory: torch.Tensor, offset: int, nbytes: int) -> torch.Tensor:
    if offset + nbytes > memory.numel():
        raise _unreadable(f"bytes {offset} to {offset + nbytes} of a memory of {memory.numel()}")
    return memory[offset : offset + nbytes]


def _unreadable(why: str) -> TransferFailedError:
    return TransferFailedError("the sender's memory cannot be opened", why=why, fix="use the same hwrl on both sides")
