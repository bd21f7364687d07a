"""The device transport: broadcasts slabs from the sender's device to the receivers', without a copy on the host."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from hwrl.comm import Comm, Group, Pending, Store, forget_group, store_failures
from hwrl.errors import CommError, UnsupportedError
from hwrl.interfaces import Backend, Capability
from hwrl.weights.control import Limits, Proposal, TransportPayload
from hwrl.weights.destination import Destination
from hwrl.weights.report import StageClock
from hwrl.weights.slabs import Checksums, SlabLease, SlabRing, TensorReader
from hwrl.weights.transport import ReceiverContext, ReceiverRound, SenderContext, SenderRound, Transport


@dataclass(frozen=True)
class DevicePayload(TransportPayload):
    """``lanes`` process groups, named ``group``/0, ``group``/1, …"""

    group: str
    lanes: int


class Lanes:
    """The process groups of one set of receivers; slabs use them in turn.

    On a device with streams there are two. Collectives of one group run one after the other, and the start of each
    leaves the wire idle for about 10 µs; the other group's slab fills this gap (docs/benchmarks.md). Elsewhere one.
    """

    def __init__(self, store: Store, proposal: Proposal, *, rank: int, backend: Backend) -> None:
        """Connect with the other ranks of ``proposal``; blocks until all came, raises CommError if not."""
        payload = _payload(proposal)
        self.name, self.to = payload.group, proposal.to
        self._groups: list[Group] = []
        self._broadcasts = 0
        options: dict[str, Any] = {"rank": rank, "size": 1 + len(proposal.to)}
        options["timeout_s"] = Limits(proposal.timeout_s).wire_s
        try:
            for lane in range(payload.lanes):
                self._groups.append(Comm(backend).standalone_group(store, name=f"{payload.group}/{lane}", **options))
        except CommError:
            self.close()
            raise

    @property
    def count(self) -> int:
        """The number of lanes."""
        return len(self._groups)

    def broadcast(self, memory: torch.Tensor) -> Pending:
        """Begin to broadcast rank 0's ``memory`` on the next lane; every rank calls this in the same order."""
        group = self._groups[self._broadcasts % len(self._groups)]
        self._broadcasts += 1
        return group.broadcast(memory, src=0, async_op=True)

    def close(self) -> None:
        """Abort the operations under way, here and at the peers, and close the groups. Does not wait for the peers.

        Closing a group without an abort may wait: it is a collective, and an idle or dead peer does not join it.
        """

        def abort(group: Group) -> None:
            with contextlib.suppress(CommError, UnsupportedError):  # without abort, closing waits for the operations
                group.abort("the transfer is over")

        with ThreadPoolExecutor(max(1, self.count)) as threads:  # at once: ending one may wait for the other
            list(threads.map(abort, self._groups))
        for group in self._groups:
            group.close()


class DeviceSender:
    """Rank 0 of process groups with the receivers; the groups stay until the receivers change.

    At most ``slabs`` broadcasts are under way, and only so many slabs of tensors are read ahead.
    """

    def __init__(self, context: SenderContext) -> None:
        self._context = context
        self._buffer = SlabRing(context.layout, backend=context.backend, slabs=context.slabs)
        self._sums = Checksums(context.layout, device=context.backend.device())
        self._lanes: Lanes | None = None

    def open(self, number: int, to: tuple[int, ...], clock: StageClock) -> DevicePayload:
        """Name the groups: those of the last round if the receivers are the same."""
        if self._lanes is not None and self._lanes.to != to:
            self.abort()
        name = f"{self._context.epoch}.{number}" if self._lanes is None else self._lanes.name
        streams = self._context.backend.supports(Capability.STREAMS).usable
        return DevicePayload(name, 2 if streams else 1)

    def send(self, sending: SenderRound, reader: TensorReader, clock: StageClock) -> None:
        """Broadcast the slabs in the layout's order, then the checksums."""
        if self._lanes is None:
            self._lanes = Lanes(self._context.store, sending.proposal, rank=0, backend=self._context.backend)
        with clock.span(self._context.backend):
            self._send_slabs(self._lanes, reader, clock)

    def _send_slabs(self, lanes: Lanes, reader: TensorReader, clock: StageClock) -> None:
        under_way = collections.deque[tuple[Pending, SlabLease, list[torch.Tensor]]]()
        for index, slab in enumerate(self._context.layout.slabs):
            with clock("gather"):
                tensors = reader.tensors_of(slab)
            with clock("pack"):
                lease = self._buffer.pack(index, tensors)
            pending = lanes.broadcast(lease.memory)
            lease.in_use_until(pending)
            under_way.append((pending, lease, tensors))
            self._sums.add(index, lease.memory)
            if len(under_way) >= self._context.slabs:
                under_way.popleft()[0].wait()
        reader.finish()
        for pending, *_ in under_way:
            pending.wait()
        lanes.broadcast(self._sums.values).wait()

    def abort(self) -> None:
        """Close the groups."""
        lanes, self._lanes = self._lanes, None
        self._buffer.forget_pending()
        if lanes is not None:
            lanes.close()

    def end_round(self, sending: SenderRound) -> None:
        """Do nothing: the groups stay for the next round."""

    def forget(self, payloads: Sequence[TransportPayload], *, kept: Sequence[TransportPayload]) -> None:
        """Delete the keys of groups that no proposal names any longer."""
        groups = {payload.group for payload in payloads if isinstance(payload, DevicePayload)}
        for name in groups - {payload.group for payload in kept if isinstance(payload, DevicePayload)}:
            with store_failures():
                forget_group(self._context.store, name=name)

    def release(self) -> None:
        """Free the ring."""
        self._buffer.release()

    def close(self) -> None:
        """Do nothing: the groups are closed by abort."""


class DeviceReceiver:
    """A receiver's rank of the groups."""

    def __init__(self, context: ReceiverContext) -> None:
        self._context = context
        self._lanes: Lanes | None = None

    def receive(
        self, receiving: ReceiverRound, destination: Destination, sums: Checksums, clock: StageClock
    ) -> torch.Tensor:
        """Receive the slabs, then the sender's sums. Blocks until the collectives are done."""
        try:
            lanes = self._lanes_for(receiving)
            with clock.span(self._context.backend):
                theirs, newest = self._receive_slabs(lanes, destination, sums)
            for pending in newest:
                pending.complete()  # before a wait for the device: that one would hang if the sender is lost
            return theirs
        except BaseException:  # the groups are out of step
            self.abort()
            raise

    def abort(self) -> None:
        """Close the groups."""
        lanes, self._lanes = self._lanes, None
        if lanes is not None:
            lanes.close()

    def close(self) -> None:
        """Close the groups."""
        self.abort()

    def _lanes_for(self, receiving: ReceiverRound) -> Lanes:
        proposal = receiving.proposal
        if self._lanes is None or self._lanes.name != _payload(proposal).group:
            self.abort()
            self._lanes = Lanes(self._context.store, proposal, rank=receiving.rank, backend=self._context.backend)
        return self._lanes

    def _receive_slabs(
        self, lanes: Lanes, destination: Destination, sums: Checksums
    ) -> tuple[torch.Tensor, collections.deque[Pending]]:
        """Queue the whole transfer; return the sender's sums and the last operation of each lane."""
        under_way: collections.deque[tuple[Pending, SlabLease]] = collections.deque()
        newest: collections.deque[Pending] = collections.deque(maxlen=lanes.count)
        most = min(self._context.slabs, destination.slots or self._context.slabs)
        for index in range(sums.slabs):
            if len(under_way) >= most:
                _store(*under_way.popleft(), destination, sums)
            lease = destination.memory_for(index)
            newest.append(lanes.broadcast(lease.memory))
            under_way.append((newest[-1], lease))
        while under_way:
            _store(*under_way.popleft(), destination, sums)
        theirs = torch.empty_like(sums.values)
        newest.append(lanes.broadcast(theirs))
        newest[-1].wait()
        return theirs, newest


def _store(pending: Pending, lease: SlabLease, destination: Destination, sums: Checksums) -> None:
    pending.wait()
    sums.add(lease.index, lease.memory)
    destination.store(lease)


def _payload(proposal: Proposal) -> DevicePayload:
    assert isinstance(proposal.payload, DevicePayload), "proposals are read with their transport's payload"
    return proposal.payload


DEVICE = Transport(DevicePayload, DeviceSender, DeviceReceiver)
