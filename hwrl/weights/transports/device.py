"""The device transport: slab by slab, from the trainer's device to each receiver's, with no copy on the host."""

from __future__ import annotations

import collections
import contextlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch

from hwrl.comm import Comm, Group, Pending, Store
from hwrl.errors import CommError, UnsupportedError
from hwrl.interfaces import Backend, Capability
from hwrl.weights.board import Board, Offer
from hwrl.weights.buffer import Lease, Place
from hwrl.weights.checksum import Checksums
from hwrl.weights.layout import TensorFeed, WeightLayout
from hwrl.weights.report import StageClock
from hwrl.weights.roster import Roster
from hwrl.weights.rounds import Rounds, wire_timeout_s


class Lanes:
    """The groups over which slabs travel in turn.

    On a device with streams there are two: collectives of one group run one behind the other, and the start of each
    leaves the wire idle for about 10 µs, which the other group's slab fills (docs/benchmarks.md). Elsewhere, one.
    """

    def __init__(self, store: Store, offer: Offer, *, rank: int, backend: Backend) -> None:
        """Connect with the other ranks of ``offer``; blocks until all came, raises CommError if not."""
        self.name, self.to = offer.group, offer.to
        self._groups: list[Group] = []
        self._turn = 0
        comm, size, wire_s = Comm(backend), 1 + len(offer.to), wire_timeout_s(offer.timeout_s)
        try:
            for lane in range(offer.lanes):
                self._groups.append(
                    comm.standalone_group(store, rank=rank, size=size, name=f"{offer.group}/{lane}", timeout_s=wire_s)
                )
        except CommError:
            self.close()
            raise

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self._groups)

    def broadcast(self, memory: torch.Tensor) -> Pending:
        """Begin to broadcast rank 0's ``memory`` on the next lane; every rank calls this in the same order."""
        group = self._groups[self._turn % len(self._groups)]
        self._turn += 1
        return group.broadcast(memory, src=0, async_op=True)

    def close(self) -> None:
        """End what is under way, here and at the peers, and close the groups. Does not wait for the peers.

        A library's own end may: it is a collective, too, for which a peer that is idle or dead does not come.
        """

        def abort(group: Group) -> None:
            with contextlib.suppress(CommError, UnsupportedError):  # it cannot, and closing waits for what is under way
                group.abort("the transfer is over")

        with ThreadPoolExecutor(max(1, self.count)) as threads:  # at once: one's end may wait for the other's work
            list(threads.map(abort, self._groups))
        for group in self._groups:
            group.close()


def lanes_on(backend: Backend) -> int:
    """Return how many lanes serve ``backend`` best."""
    return 2 if backend.supports(Capability.STREAMS).usable else 1


class DeviceSender(Rounds):
    """Rank 0 of standalone groups with the receivers, which are made anew only when the receivers change.

    ``slabs`` broadcasts are under way at most; only so much of ``named`` is read ahead and held.
    """

    def __init__(
        self, board: Board, roster: Roster, layout: WeightLayout, *, backend: Backend, slabs: int, timeout_s: float
    ) -> None:
        super().__init__(board, roster, layout, backend=backend, slabs=slabs, timeout_s=timeout_s)
        self._slabs = slabs
        self._lanes: Lanes | None = None

    def _begin(self, offer: Offer) -> Offer:
        if self._lanes is not None and self._lanes.to != offer.to:
            self._break_off()
        name = f"{offer.epoch}.{offer.number}" if self._lanes is None else self._lanes.name
        return replace(offer, group=name, lanes=lanes_on(self._backend))

    def _move(self, offer: Offer, feed: TensorFeed, clock: StageClock) -> None:
        if self._lanes is None:
            self._lanes = Lanes(self._board.store, offer, rank=0, backend=self._backend)
        under_way = collections.deque[tuple[Pending, Lease, list[torch.Tensor]]]()
        for index, slab in enumerate(self._layout.slabs):
            with clock("gather"):
                tensors = feed.of(slab)
            with clock("pack"):
                lease = self._buffer.pack(index, tensors)
            pending = self._lanes.broadcast(lease.memory)
            lease.in_use_until(pending)
            under_way.append((pending, lease, tensors))
            self._sums.add(index, lease.memory)
            if len(under_way) >= self._slabs:
                under_way.popleft()[0].wait()
        feed.finish()
        for pending, *_ in under_way:
            pending.wait()
        self._lanes.broadcast(self._sums.values).wait()

    def _break_off(self) -> None:
        lanes, self._lanes = self._lanes, None
        self._buffer.free_all()
        if lanes is not None:
            lanes.close()


class DeviceReceiver:
    """A receiver's end of the groups."""

    def __init__(self, board: Board, *, backend: Backend, slabs: int) -> None:
        self._board, self._backend, self._slabs = board, backend, slabs
        self._lanes: Lanes | None = None

    def receive(self, offer: Offer, member: int, place: Place, sums: Checksums, clock: StageClock) -> torch.Tensor:
        """Receive ``offer`` into ``place`` and its sums into ``sums``; return the sender's sums, for comparison.

        Blocks until the collectives are done. Raises CommError if one was lost.
        """
        try:
            lanes = self._lanes_for(offer, member)
            with clock.span(self._backend):
                theirs, newest = self._receive_slabs(lanes, place, sums)
            for pending in newest:
                pending.complete()  # before anything waits for the device, which a lost sender would leave hanging
            return theirs
        except BaseException:  # the groups are out of step, whatever ended the receiving
            self.close()
            raise

    def close(self) -> None:
        """Close the groups."""
        lanes, self._lanes = self._lanes, None
        if lanes is not None:
            lanes.close()

    def _lanes_for(self, offer: Offer, member: int) -> Lanes:
        if self._lanes is None or self._lanes.name != offer.group:
            self.close()
            rank = 1 + offer.to.index(member)
            self._lanes = Lanes(self._board.store, offer, rank=rank, backend=self._backend)
        return self._lanes

    def _receive_slabs(
        self, lanes: Lanes, place: Place, sums: Checksums
    ) -> tuple[torch.Tensor, collections.deque[Pending]]:
        """Queue the whole transfer; return the sender's sums and the last operation of each lane."""
        under_way: collections.deque[tuple[Pending, Lease]] = collections.deque()
        newest: collections.deque[Pending] = collections.deque(maxlen=lanes.count)
        for index in range(sums.slabs):
            if len(under_way) >= self._slabs:
                _land(*under_way.popleft(), place, sums)
            lease = place.room(index)
            newest.append(lanes.broadcast(lease.memory))
            under_way.append((newest[-1], lease))
        while under_way:
            _land(*under_way.popleft(), place, sums)
        theirs = torch.empty_like(sums.values)
        newest.append(lanes.broadcast(theirs))
        newest[-1].wait()
        return theirs, newest


def _land(pending: Pending, lease: Lease, place: Place, sums: Checksums) -> None:
    pending.wait()
    sums.add(lease.index, lease.memory)
    place.land(lease)
