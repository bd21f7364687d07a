"""The host transport: whole versions in page-locked files of this host, which receivers pull when they are ready."""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hwrl.errors import CommTimeoutError, TransferFailedError
from hwrl.interfaces import Backend
from hwrl.weights.board import Board, Offer
from hwrl.weights.buffer import BroadcastBuffer, Place
from hwrl.weights.checksum import Checksums
from hwrl.weights.layout import TensorFeed, WeightLayout
from hwrl.weights.report import StageClock
from hwrl.weights.roster import Roster
from hwrl.weights.rounds import Named
from hwrl.weights.transports.places import DirectoryFiles, MemoryFiles, SharedPlace, is_alive, open_place, place_nbytes

_log = logging.getLogger("hwrl.weights")
_HOST = torch.device("cpu")
_FIRST_SLOTS = (0, 1)  # those that alternate unless receivers lag; made and page-locked in the first transfer
_TORN = -1  # instead of a number of slabs: writing ended with an error
_POLL_S = 5e-5  # a slab of 16 MiB takes 300 µs on its way to the host
_WATCH_S = 0.2


class HostSender:
    """The writer of a ring of versions: the newest stays, and a place is written only when no receiver reads it.

    A place is one version's file. Receivers claim it by a shared lock, which the system takes back from a receiver
    that is killed; the sender takes the exclusive lock for the moment in which it makes the place another offer's.
    Receivers may read while it is written, as far as its header says that it is. Each process maps and page-locks a
    place once. The directory is deleted on ``close``; what a killed sender left is deleted by the next one.
    """

    def __init__(
        self,
        board: Board,
        roster: Roster,
        layout: WeightLayout,
        *,
        backend: Backend,
        slabs: int,
        directory: Path | None,
        versions: int,
        timeout_s: float,
    ) -> None:
        self._board, self._roster, self._layout = board, roster, layout
        self._backend, self._slabs, self._timeout_s = backend, slabs, timeout_s
        self._files = MemoryFiles() if directory is None else DirectoryFiles(directory)
        self._places: list[SharedPlace | None] = [None] * versions
        self._buffer = BroadcastBuffer(layout, backend=backend, slabs=slabs)
        self._sums = Checksums(layout, device=backend.device())
        # Two streams: copies to the host follow each other without a gap while later slabs are packed and summed.
        self._packing, self._copying = backend.stream(), backend.stream()
        self._copied = [backend.event() for _ in layout.slabs]
        # One for each slab here, too: on some devices a wait that is queued follows what is recorded later.
        self._packed = [backend.event() for _ in layout.slabs]
        self._offers: list[Offer] = []  # those on the board
        self._newest: Offer | None = None

    def publish(self, base: Offer, named: Named, clock: StageClock) -> tuple[int, dict[str, str]]:
        """Offer a free place and copy ``named`` into it; does not wait for receivers, only for a free place.

        Returns how many receivers had joined by then; nobody is excluded. If copying fails, receivers are told, and
        those that lack the version before still get it.
        """
        feed = TensorFeed(self._layout, named)
        feed.read_ahead()
        self._roster.refresh()
        receivers = len(self._roster.members)
        number = self._board.newest() + 1
        with clock("claim"):
            slot, place = self._claim(number, clock)
        before = 0 if self._newest is None else self._newest.number
        offer = self._describe(replace(base, number=number, slot=slot, before=before))
        self._board.put_offer(offer)
        self._offers.append(offer)
        with clock("copy"), torch.no_grad(), contextlib.closing(feed), clock.span(self._backend):
            self._write(place, feed, clock)
        for past in self._offers[:-1]:
            self._board.forget(past)
        self._offers, self._newest = [offer], offer
        return receivers, {}

    def release(self) -> None:
        """Free the buffer's memory; the versions stay."""
        self._buffer.release()

    def close(self) -> None:
        """Delete the files. A receiver that is reading one finishes undisturbed."""
        for place in self._places:
            if place is not None:
                place.close()
        self._places = []
        self._files.close()

    def _describe(self, offer: Offer) -> Offer:
        """Return ``offer`` with all that receivers need to find the places and to know them again."""
        places = [place for place in self._places if place is not None]  # they are made in order
        return replace(
            offer,
            directory=self._files.directory,
            pid=os.getpid(),
            files=[self._files.number(slot, place.file) for slot, place in enumerate(places)],
            inodes=[place.inode for place in places],
        )

    def _claim(self, number: int, clock: StageClock) -> tuple[int, SharedPlace]:
        """Make a place that nobody reads, and that does not hold the newest version, offer ``number``'s."""
        with clock("register"):
            for slot in _FIRST_SLOTS[: len(self._places)]:
                self._place(slot)
        deadline = time.monotonic() + self._timeout_s
        while True:
            for slot in range(len(self._places)):
                if self._newest is not None and slot == self._newest.slot:
                    continue
                with clock("register"):
                    place = self._place(slot)
                if place.begin(number):
                    return slot, place
            if time.monotonic() > deadline:
                raise TransferFailedError(
                    "there is no free place for a new version",
                    why=f"receivers have been reading all {len(self._places) - 1} older ones for {self._timeout_s:g} s",
                    fix="end receivers that hang, or give the WeightSender more versions",
                )
            time.sleep(0.001)

    def _place(self, slot: int) -> SharedPlace:
        place = self._places[slot]
        if place is None:
            file = self._files.make(slot, nbytes=place_nbytes(self._layout))
            place = self._places[slot] = SharedPlace(file, self._layout, backend=self._backend)
        return place

    def _write(self, place: SharedPlace, feed: TensorFeed, clock: StageClock) -> None:
        held: collections.deque[list[torch.Tensor]] = collections.deque()  # of the slabs that are not there yet
        there = 0
        try:
            for index, target in enumerate(place.slabs):
                with clock("gather"):
                    held.append(feed.of(self._layout.slabs[index]))
                self._copy_slab(index, target, held[-1])
                while there <= index and (self._copied[there].query() or len(held) > self._slabs):
                    self._copied[there].synchronize()
                    there = place.announce(there + 1)
                    held.popleft()
            feed.finish()
            with self._copying:
                place.sums.copy_(self._sums.values, non_blocking=True)
            for index in range(there, len(self._copied)):
                self._copied[index].synchronize()
                place.announce(index + 1)
            self._copying.synchronize()
            place.announce(len(self._copied) + 1)
        except BaseException:
            place.announce(_TORN)
            raise
        finally:  # the tensors are the caller's again, and the place is another version's
            self._packing.synchronize()
            self._copying.synchronize()

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
    """The reader of a ring of versions. Its mapping of a place lives until another sender's offer comes."""

    def __init__(self, board: Board, *, backend: Backend) -> None:
        self._board, self._backend = board, backend
        self._sender = ("", 0, 0)
        self._places: dict[int, SharedPlace] = {}
        self._copying, self._summing = backend.stream(), backend.stream()
        self._landed: dict[int, Any] = {}  # an event for each slab, kept for the next version

    def receive(
        self,
        offer: Offer,
        layout: WeightLayout,
        place: Place,
        sums: Checksums,
        *,
        after: int,
        deadline: float,
        clock: StageClock,
    ) -> Offer | None:
        """Copy the offered version into ``place`` while it is written; return its offer, None if it was replaced.

        If it does not become whole, the version before is received instead, provided its number is above ``after``.
        Raises TransferFailedError if that is not so either: the files are not there or hold other bytes than were
        written, or the sender failed or died. Raises CommTimeoutError if the version is not whole by ``deadline``.
        """
        try:
            return offer if self._pull(offer, layout, place, sums, deadline, clock) else None
        except TransferFailedError as exc:
            earlier = self._board.offer(offer.before) if offer.before > after else None
            if earlier is None:
                raise
            _log.warning("version %d is received instead: %s", earlier.version, exc)
            return earlier if self._pull(earlier, layout, place, sums, deadline, clock) else None

    def close(self) -> None:
        """Unmap the files."""
        for place in self._places.values():
            place.close()
        self._places = {}

    @contextlib.contextmanager
    def claim(self, offer: Offer, layout: WeightLayout, clock: StageClock) -> Iterator[SharedPlace | None]:
        """Keep the offered version from being overwritten; yield its place, or None if a newer one has replaced it."""
        with clock("register"):
            place = self._place(offer, layout)
        claimed = place.claim(offer.number)
        try:
            yield place if claimed else None
        finally:
            place.release()

    def _pull(
        self, offer: Offer, layout: WeightLayout, place: Place, sums: Checksums, deadline: float, clock: StageClock
    ) -> bool:
        with clock("copy"), torch.no_grad(), self.claim(offer, layout, clock) as source:
            if source is None:
                return False
            try:
                with clock.span(self._backend):
                    followed = self._follow(source, offer, place, sums, deadline)
                if not followed:
                    return False
                vote = sums.vote(source.sums.to(sums.values.device))
            finally:  # what is queued still reads the place
                self._copying.synchronize()
                self._summing.synchronize()
        if vote != "whole":
            raise TransferFailedError(
                f"version {offer.version} was not received",
                why=f"other bytes came than were written ({vote})",
                fix="publish it again; this receiver goes on with the version that it has",
            )
        return True

    def _follow(self, source: SharedPlace, offer: Offer, place: Place, sums: Checksums, deadline: float) -> bool:
        """Queue the copies of all slabs, each when it is there; return False if another sender's offer came."""
        current = self._backend.current_stream()
        self._copying.wait_stream(current)
        there, slabs = 0, len(source.slabs)
        while there <= slabs:
            now = self._await_more(source, offer, there, deadline)
            if now is None:
                return False
            for index in range(there, min(now, slabs)):
                self._take_slab(index, source.slabs[index], place, sums)
            there = now
        current.wait_stream(self._summing)
        return True

    def _take_slab(self, index: int, slab: torch.Tensor, place: Place, sums: Checksums) -> None:
        with self._copying:
            lease = place.room(index)
            lease.memory.copy_(slab, non_blocking=True)
            landed = self._landed[index] = self._landed.get(index) or self._backend.event()
            landed.record(self._copying)
        with self._summing:
            self._summing.wait_event(landed)
            sums.add(index, lease.memory)
            place.land(lease)
            lease.in_use_until(self._summing.record_event())

    def _await_more(self, place: SharedPlace, offer: Offer, there: int, deadline: float) -> int | None:
        """Wait until more than ``there`` slabs can be read; return how many, or None if another sender's offer came."""
        watch = time.monotonic() + _WATCH_S
        alive = True
        while True:
            now = place.written()  # after the look at the sender, which may have finished just before it went
            if now > there:
                return now
            if now == _TORN or not alive:
                raise TransferFailedError(
                    f"version {offer.version} will never be whole",
                    why="its sender failed while it was writing" if alive else "its sender died while it was writing",
                    fix="publish again; this receiver goes on with the version that it has",
                )
            if time.monotonic() > deadline:
                raise CommTimeoutError(
                    f"version {offer.version} is still being written",
                    why=f"{there} of {len(place.slabs)} slabs are there",
                    fix="receive again, with a longer timeout_s",
                )
            if time.monotonic() > watch:
                if self._board.newest() != offer.number:
                    return None
                alive, watch = is_alive(offer), time.monotonic() + _WATCH_S
            else:
                time.sleep(_POLL_S)

    def _place(self, offer: Offer, layout: WeightLayout) -> SharedPlace:
        sender = (offer.directory, offer.pid, offer.epoch)
        if sender != self._sender:
            self.close()
            self._sender = sender
        if not 0 <= offer.slot < len(offer.files) == len(offer.inodes):
            raise TransferFailedError(
                f"version {offer.version} cannot be read",
                why=f"it is in place {offer.slot} of {len(offer.files)} files and {len(offer.inodes)} inodes",
                fix="use the same hwrl on both sides",
            )
        for slot in range(len(offer.files)):
            if slot not in self._places:
                self._places[slot] = open_place(offer, slot, layout, backend=self._backend)
        return self._places[offer.slot]
