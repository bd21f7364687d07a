"""The device transport: broadcasts buckets from the sender's device to the receivers', without copies on the host."""

from __future__ import annotations

import collections
import contextlib
import itertools
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from hwrl.comm import Comm, Group, Pending, Store, call_off_group, clone_store, forget_group, store_failures
from hwrl.errors import CommError, UnsupportedError
from hwrl.interfaces import Backend, Capability
from hwrl.weights.buckets import BucketLease, BucketRing, Checksums, TensorReader
from hwrl.weights.destination import Destination
from hwrl.weights.messages import Proposal, TransportPayload
from hwrl.weights.report import StageClock
from hwrl.weights.shares import divide_buckets
from hwrl.weights.transport import ReceiverContext, ReceiverRound, SenderContext, SenderRound, Transport


@dataclass(frozen=True)
class DevicePayload(TransportPayload):
    """Each sender has ``lanes`` process groups, named ``group``/SENDER/0, ``group``/SENDER/1, and so on."""

    group: str
    lanes: int


class Lanes:
    """The process groups of sender number ``share`` with a set of receivers. Buckets use them in turn.

    On a device with streams there are two. The collectives of one group run one after another, and the start of each
    leaves the wire idle for about 10 µs. The other group's bucket fills this gap (docs/benchmarks.md). Elsewhere there
    is one.
    """

    def __init__(self, store: Store, proposal: Proposal, *, share: int, rank: int, backend: Backend) -> None:
        """Connect with the other ranks of ``proposal``. Blocks; raises CommError if one does not come."""
        payload = proposal.payload
        self.name, self.to = payload.group, proposal.to
        self._groups: list[Group] = []
        self._broadcasts = 0
        options: dict[str, Any] = {"rank": rank, "size": 1 + len(proposal.to)}
        options["timeout_s"] = proposal.limits.wire_s
        try:
            for lane in range(payload.lanes):
                name = f"{payload.group}/{share}/{lane}"
                self._groups.append(Comm(backend).standalone_group(store, name=name, **options))
        except CommError:
            self.close()
            raise

    @property
    def count(self) -> int:
        """The number of lanes."""
        return len(self._groups)

    def broadcast(self, memory: torch.Tensor) -> Pending:
        """Begin to broadcast rank 0's ``memory`` on the next lane. All ranks call this in the same order."""
        group = self._groups[self._broadcasts % len(self._groups)]
        self._broadcasts += 1
        return group.broadcast(memory, src=0, async_op=True)

    def close(self) -> None:
        """Abort the operations under way, here and at the peers, and close the groups.

        Waits for the peers only if the library cannot abort.
        Closing without an abort could block: it is a collective operation, and a dead peer never joins it.
        """

        def abort(group: Group) -> None:
            with contextlib.suppress(CommError, UnsupportedError):  # if it cannot abort, close waits for the operations
                group.abort("the transfer is over")

        with ThreadPoolExecutor(max(1, self.count)) as threads:  # in parallel, because one may wait for another
            list(threads.map(abort, self._groups))
        for group in self._groups:
            group.close()


class _End:
    """An end with the lanes to its peers, one for each sender. They stay until the receivers change."""

    def __init__(self, store: Store, backend: Backend) -> None:
        self._store, self._backend = store, backend
        self._lanes: list[Lanes] = []
        self._connecting: Proposal | None = None

    def _lanes_for(
        self, proposal: Proposal, shares: Iterable[int], *, rank: int, check: Callable[[], object] = lambda: None
    ) -> list[Lanes]:
        """Return the lanes of the senders ``shares``. Connect if they are new; ``check`` raises after an abort."""
        lanes = self._lanes
        if not lanes or lanes[0].name != proposal.payload.group:
            self.abort()
            lanes, self._connecting = [], proposal
            try:
                check()  # a later abort ends the connecting
                for share in shares:
                    lanes.append(Lanes(self._store, proposal, share=share, rank=rank, backend=self._backend))
            finally:
                self._connecting, self._lanes = None, lanes  # from now on another thread can abort them
            check()  # an abort during the connecting had no groups to close
        return lanes

    def abort(self) -> None:
        """Close the groups, and abort the connecting of new ones, here and at the peers.

        Does not wait for the store, which may be dead: another thread tells it.
        """
        proposal, self._connecting = self._connecting, None
        if proposal is not None:
            threading.Thread(target=self._call_off, args=(proposal,), name="hwrl-call-off", daemon=True).start()
        lanes, self._lanes = self._lanes, []
        for of_sender in lanes:
            of_sender.close()

    def _call_off(self, proposal: Proposal) -> None:
        payload = proposal.payload
        with contextlib.suppress(CommError):  # without a store nobody connects
            store = clone_store(self._store)  # the connecting thread may be blocking the client
            for share, lane in itertools.product(range(proposal.senders), range(payload.lanes)):
                call_off_group(store, name=f"{payload.group}/{share}/{lane}")


class DeviceSender(_End):
    """Rank 0 of the process groups with the receivers. The groups stay until the receivers change.

    At most ``buckets`` broadcasts are under way, and tensors are read ahead no further. With several senders each has
    its own groups, so that their wires work at the same time.
    """

    def __init__(self, context: SenderContext) -> None:
        super().__init__(context.store, context.backend)
        self._context = context
        # With only one bucket under way, two senders could wait for each other's shards, and receivers for both.
        self._under_way = context.buckets if context.senders == 1 else max(2, context.buckets)
        self._buffer = BucketRing(context.layout, backend=context.backend, buckets=context.buckets)
        self._sums = Checksums(context.layout, device=context.backend.device())
        shares = divide_buckets(context.layout, context.senders)
        self._own_buckets = [index for index, share in enumerate(shares) if share == context.share]

    def prepare(self, number: int, to: tuple[int, ...], clock: StageClock) -> DevicePayload:
        """Name the groups: as in the last round if the receivers are the same."""
        if any(lanes.to != to for lanes in self._lanes):
            self.abort()
        name = next((lanes.name for lanes in self._lanes), f"{self._context.epoch}.{number}")
        streams = self._backend.supports(Capability.STREAMS).usable
        return DevicePayload(name, 2 if streams else 1)

    def send(self, sending: SenderRound, reader: TensorReader, clock: StageClock) -> torch.Tensor:
        """Broadcast this sender's buckets in the layout's order, then the checksums."""
        (lanes,) = self._lanes_for(sending.proposal, [self._context.share], rank=0)
        with clock.span(self._backend):
            self._send_buckets(lanes, reader, clock)
        return self._sums.values

    def _send_buckets(self, lanes: Lanes, reader: TensorReader, clock: StageClock) -> None:
        under_way = collections.deque[tuple[Pending, BucketLease, list[torch.Tensor]]]()
        for index in self._own_buckets:
            with clock("gather"):
                tensors = reader.tensors_of(reader.layout.buckets[index])
            with clock("pack"):
                lease = self._buffer.pack(index, tensors)
            pending = lanes.broadcast(lease.memory)
            lease.in_use_until(pending)
            under_way.append((pending, lease, tensors))
            self._sums.add(index, lease.memory)
            if len(under_way) >= self._under_way:
                under_way.popleft()[0].wait()  # with streams this orders the stream, and the host goes on
        reader.finish()
        for pending, *_ in under_way:
            pending.wait()
        lanes.broadcast(self._sums.values).wait()

    def abort(self) -> None:
        """Close the groups, and abort the connecting of new ones, here and at the peers; see :meth:`_End.abort`."""
        self._buffer.forget_pending()
        super().abort()

    def end_round(self, sending: SenderRound) -> None:
        """Do nothing: the groups stay for the next round."""

    def forget(self, payloads: Sequence[TransportPayload], *, kept: Sequence[TransportPayload]) -> None:
        """Delete the store keys of groups that no proposal in ``kept`` names."""
        groups = {payload.group for payload in payloads if isinstance(payload, DevicePayload)}
        for name in groups - {payload.group for payload in kept if isinstance(payload, DevicePayload)}:
            with store_failures():
                forget_group(self._store, name=name)

    def release(self) -> None:
        """Free the ring."""
        self._buffer.release()

    def close(self) -> None:
        """Do nothing: abort has closed the groups."""


class DeviceReceiver(_End):
    """A receiver's rank in the groups."""

    def __init__(self, context: ReceiverContext) -> None:
        super().__init__(context.store, context.backend)
        self._buckets = context.buckets

    def receive(
        self, receiving: ReceiverRound, destination: Destination, sums: Checksums, clock: StageClock
    ) -> torch.Tensor:
        """Receive the buckets, then the sender's checksums. Blocks until the collectives are done on the device."""
        try:
            proposal, check = receiving.proposal, receiving.cancellation.check
            lanes = self._lanes_for(proposal, range(proposal.senders), rank=receiving.rank, check=check)
            with clock.span(self._backend):
                theirs, newest = self._receive_buckets(lanes, destination, sums)
            for pending in newest:
                pending.complete()  # blocks the host; any other wait for the device would hang if the sender is lost
            return theirs
        except BaseException:  # the ranks of the groups are out of step
            self.abort()
            raise

    def close(self) -> None:
        """Close the groups."""
        self.abort()

    def _receive_buckets(
        self, lanes: list[Lanes], destination: Destination, sums: Checksums
    ) -> tuple[torch.Tensor, list[Pending]]:
        """Queue the whole transfer; return the senders' checksums, and the last operation of each lane."""
        under_way: collections.deque[tuple[Pending, BucketLease]] = collections.deque()
        newest = [collections.deque[Pending](maxlen=of_sender.count) for of_sender in lanes]
        most = self._buckets * len(lanes)
        most = min(most, destination.slots or most)
        for index, share in enumerate(divide_buckets(sums.layout, len(lanes))):
            if len(under_way) >= most:
                _finish_bucket(*under_way.popleft(), destination, sums)
            lease = destination.memory_for(index)
            newest[share].append(lanes[share].broadcast(lease.memory))
            under_way.append((newest[share][-1], lease))
        while under_way:
            _finish_bucket(*under_way.popleft(), destination, sums)
        each = torch.empty(len(lanes), len(sums.values), dtype=torch.int64, device=sums.values.device)
        for share, theirs in enumerate(each):
            newest[share].append(lanes[share].broadcast(theirs))
            newest[share][-1].wait()
        # Each sender has the checksums of its own buckets, and zeros for others.
        return each.sum(0), [pending for of_sender in newest for pending in of_sender]


def _finish_bucket(pending: Pending, lease: BucketLease, destination: Destination, sums: Checksums) -> None:
    pending.wait()
    sums.add(lease.index, lease.memory)
    destination.unpack(lease)


DEVICE = Transport(
    DevicePayload, DeviceSender, DeviceReceiver, several_senders=True, across_machines=True, forms_groups=True
)
