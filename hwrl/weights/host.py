"""The host transport: whole versions in memory-mapped files of this host, which receivers pull when they are ready."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from hwrl.backend import Backend
from hwrl.errors import TransferFailedError, WeightsError
from hwrl.weights.board import Board, Offer
from hwrl.weights.buffer import Place, Staging
from hwrl.weights.checksum import Checksums
from hwrl.weights.layout import ALIGNMENT_NBYTES, TensorFeed, WeightLayout
from hwrl.weights.report import StageClock
from hwrl.weights.roster import Roster
from hwrl.weights.rounds import Named

_PREFIX = "hwrl-weights-"
_HOST = torch.device("cpu")


class HostSender:
    """The writer of a ring of versions: the newest stays, and a place is written only when no receiver reads it.

    Receivers claim a place by a shared lock on its file, which the system takes back from a receiver that is killed.
    The directory is deleted on ``close``; what a killed sender left behind is deleted by the next one.
    """

    def __init__(
        self,
        board: Board,
        roster: Roster,
        layout: WeightLayout,
        *,
        backend: Backend,
        directory: Path | None,
        versions: int,
        timeout_s: float,
    ) -> None:
        self._board, self._roster, self._layout = board, roster, layout
        self._backend, self._timeout_s = backend, timeout_s
        base = directory or _memory_directory()
        _sweep(base)
        self.directory, self._owner = _new_directory(base)
        self._places: list[_Place | None] = [None] * versions
        self._newest: Offer | None = None

    def publish(self, base: Offer, named: Named, clock: StageClock) -> tuple[int, dict[str, str]]:
        """Copy ``named`` into a free place and offer it; does not wait for receivers, only for a free place.

        Returns how many receivers may pull it; nobody is excluded.
        """
        with clock("claim"):
            number = self._free_place()
            place = self._places[number]
            assert place is not None, "just claimed"
        with clock("copy"):
            place.write(named)
            self._backend.current_stream().synchronize()
            place.sum()
        place.unlock()
        offer = replace(
            base,
            number=self._board.newest() + 1,
            directory=str(self.directory),
            slot=number,
        )
        self._board.put_offer(offer)
        if self._newest is not None:
            self._board.forget(self._newest)
        self._newest = offer
        self._roster.refresh()
        return len(self._roster.members), {}

    def close(self) -> None:
        """Delete the files. A receiver that is reading one finishes undisturbed."""
        for place in self._places:
            if place is not None:
                place.close()
        self._places = []
        shutil.rmtree(self.directory, ignore_errors=True)
        os.close(self._owner)

    def _free_place(self) -> int:
        deadline = time.monotonic() + self._timeout_s
        while True:
            for number in range(len(self._places)):
                if (self._newest is None or number != self._newest.slot) and self._place(number).lock():
                    return number
            if time.monotonic() > deadline:
                raise TransferFailedError(
                    "there is no free place for a new version",
                    why=f"receivers have been reading all {len(self._places) - 1} older ones for {self._timeout_s:g} s",
                    fix="end receivers that hang, or give the WeightSender more versions",
                )
            time.sleep(0.001)

    def _place(self, number: int) -> _Place:
        place = self._places[number]
        if place is None:
            place = self._places[number] = _Place(self.directory / str(number), self._layout)
        return place


class _Place:
    """One version's file, as the writer holds it."""

    def __init__(self, path: Path, layout: WeightLayout) -> None:
        self._layout = layout
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        nbytes = _sums_at(layout) + Checksums.nbytes(layout)
        try:
            os.posix_fallocate(self._file, 0, nbytes)  # a sparse file would kill the process when the memory runs out
        except OSError as exc:
            os.close(self._file)
            raise WeightsError(
                f"cannot keep another version of {nbytes:,} bytes in {path.parent}",
                why=str(exc),
                fix="free memory there",
            ) from exc
        self._staging, self._sums = _parts(layout, mmap.mmap(self._file, nbytes))

    def lock(self) -> bool:
        """Take the place for writing, unless a receiver reads it."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def unlock(self) -> None:
        """Let receivers read."""
        fcntl.flock(self._file, fcntl.LOCK_UN)

    def write(self, named: Named) -> None:
        """Copy all tensors in, tied ones once."""
        feed = TensorFeed(self._layout, named)
        for slab in self._layout.slabs:
            for piece, tensor in zip(slab.pieces, feed.of(slab), strict=True):
                if piece.start == 0:
                    self._staging.tensors[self._layout.entries[piece.entry].name].copy_(tensor)
        feed.finish()

    def sum(self) -> None:
        """Write the checksums of what was copied in."""
        for index, raw in enumerate(self._staging.slabs):
            self._sums.add(index, raw)

    def close(self) -> None:
        """Close the file; its memory is unmapped with this object."""
        os.close(self._file)


class HostReceiver:
    """The reader of a ring of versions."""

    def __init__(self, board: Board) -> None:
        self._board = board

    def receive(self, offer: Offer, layout: WeightLayout, place: Place, sums: Checksums) -> bool:
        """Copy the offered version into ``place``; return False if a newer one has replaced it.

        Raises TransferFailedError if the files are not there or hold other bytes than were written.
        """
        with self.claim(offer) as file:
            if file is None:
                return False
            source, written = _parts(layout, mmap.mmap(file, 0))
            for index, raw in enumerate(source.slabs):
                lease = place.room(index)
                lease.memory.copy_(raw)
                sums.add(index, lease.memory)
                place.land(lease)
            vote = sums.vote(written.values.to(sums.values.device))
        if vote != "whole":
            raise TransferFailedError(
                f"version {offer.version} was not received",
                why=f"other bytes came than were written ({vote})",
                fix="publish it again; this receiver goes on with the version that it has",
            )
        return True

    @contextlib.contextmanager
    def claim(self, offer: Offer) -> Iterator[int | None]:
        """Keep the offered version from being overwritten; yield its file, or None if a newer one has replaced it."""
        try:
            file = os.open(Path(offer.directory) / str(offer.slot), os.O_RDWR)
        except FileNotFoundError as exc:
            raise TransferFailedError(
                f"version {offer.version} is not on this host",
                why=f"{exc.filename} is missing: its sender has closed it, or runs on another host",
                fix="use transport='device' between hosts",
            ) from exc
        try:
            yield file if self._is_held(file, offer) else None
        finally:
            os.close(file)  # and with it the lock

    def _is_held(self, file: int, offer: Offer) -> bool:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:  # it is being overwritten, so it is not the newest
            return False
        return self._board.newest() == offer.number


def _sums_at(layout: WeightLayout) -> int:
    return ALIGNMENT_NBYTES + layout.nbytes + -layout.nbytes % ALIGNMENT_NBYTES  # never empty, which mmap refuses


def _parts(layout: WeightLayout, memory: mmap.mmap) -> tuple[Staging, Checksums]:
    """Return the two parts of a version's file: the tensors, and their checksums."""
    flat, at = torch.frombuffer(memory, dtype=torch.uint8), _sums_at(layout)
    values = flat[at : at + Checksums.nbytes(layout)].view(torch.int64)
    return Staging(layout, flat=flat), Checksums(layout, device=_HOST, values=values)


def _memory_directory() -> Path:
    shared = Path("/dev/shm")
    return shared if os.access(shared, os.W_OK) else Path(tempfile.gettempdir())


def _new_directory(base: Path) -> tuple[Path, int]:
    # Locked before it gets the name that _sweep looks for.
    made = Path(tempfile.mkdtemp(prefix=".hwrl-new-", dir=base))
    owner = os.open(made / "owner", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(owner, fcntl.LOCK_EX)
    final = base / (_PREFIX + made.name.removeprefix(".hwrl-new-"))
    made.rename(final)
    return final, owner


def _sweep(base: Path) -> None:
    """Delete the directories whose sender is gone: a sender holds a lock on its directory as long as it lives."""
    for left in base.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # another user's, or gone meanwhile
            owner = os.open(left / "owner", os.O_RDWR)
            try:
                fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left)
            finally:
                os.close(owner)
