"""The ways of ``hwrl bench weights``: raw copies and broadcasts, and the weight link over each transport."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from hwrl_bench.ways import TransferResult, TransferWay
from hwrl_bench.worker import BenchWorker

if TYPE_CHECKING:
    import torch

    from hwrl.comm import Group
    from hwrl_bench.weights_payload import BenchPayload, Tensors


@dataclass(frozen=True)
class TransferSetup:
    """The parts of one process, shared by all its ways.

    ``group`` is None where the processes share a device and cannot share a group. ``bucket_nbytes`` None means the
    transport's own choice. ``trainers`` is the group of several senders: rank 0, and the ranks after the receivers.
    """

    worker: BenchWorker
    payload: BenchPayload
    group: Group | None
    bucket_nbytes: int | None
    buckets: int
    trainers: Group | None = None

    def broadcast(self, tensors: Iterable[torch.Tensor]) -> None:
        """Broadcast the tensors from rank 0, all of them under way at once."""
        assert self.group is not None, "ways with broadcasts are measured where there is a group"
        for pending in [self.group.broadcast(tensor, src=0, async_op=True) for tensor in tensors]:
            pending.wait()


class PayloadWay(TransferWay):
    """A way to move a :class:`BenchPayload`."""

    def __init__(self, setup: TransferSetup) -> None:
        self.setup, self.worker, self.payload = setup, setup.worker, setup.payload

    @classmethod
    def run(cls, measure: Callable[..., Any], size: int, *args: Any, timeout_s: float) -> list[Any]:
        """Run ``measure(rank, size, *args)`` in ``size`` processes and return the results.

        A peer overrides this if it needs processes of another kind. ``args`` begins with the address of a store. No
        process outlives the call.
        """
        from hwrl.testing import run_processes

        return run_processes(measure, size, size, *args, timeout_s=timeout_s)


class FlatBroadcast(PayloadWay):
    """All tensors lie in one storage; broadcast it, at once or in pieces."""

    def __init__(self, setup: TransferSetup, *, piece_nbytes: int | None = None) -> None:
        super().__init__(setup)
        self._pieces = list(self.payload.flat.split(piece_nbytes or self.payload.flat.nbytes))

    def prepare(self) -> None:
        if self.worker.rank == 0:
            self.payload.copy_into(self.payload.views)

    def send(self, version: int) -> TransferResult:
        self.setup.broadcast(self._pieces)
        return TransferResult()

    def receive(self, version: int) -> TransferResult:
        self.setup.broadcast(self._pieces)
        return TransferResult(tensors=self.payload.views)


class DeviceCopy(PayloadWay):
    """Copy the storage to another place on the same device; rank 0 alone does so."""

    def __init__(self, setup: TransferSetup) -> None:
        super().__init__(setup)
        if self.worker.rank == 0:
            self._copy = self.payload.flat.clone()

    def prepare(self) -> None:
        if self.worker.rank == 0:
            self.payload.copy_into(self.payload.views)

    def send(self, version: int) -> TransferResult:
        self._copy.copy_(self.payload.flat)
        return TransferResult()

    def receive(self, version: int) -> TransferResult:
        return TransferResult()


class TensorBroadcasts(PayloadWay):
    """One broadcast for each tensor."""

    def __init__(self, setup: TransferSetup) -> None:
        super().__init__(setup)
        self._copies = self.payload.copies

    def prepare(self) -> None:
        if self.worker.rank == 0:
            self.payload.copy_into(self._copies)

    def send(self, version: int) -> TransferResult:
        self.setup.broadcast(self._copies.values())
        return TransferResult()

    def receive(self, version: int) -> TransferResult:
        self.setup.broadcast(self._copies.values())
        return TransferResult(tensors=self._copies)


class WeightLink(PayloadWay):
    """hwrl's weight link. ``in place``: into the receiver's tensors. ``flat``: also with one storage on each side.

    With several senders each has the whole weights, and sends its share.
    """

    def __init__(
        self, setup: TransferSetup, *, transport: Any, into: Literal["new memory", "in place", "flat"] = "new memory"
    ) -> None:
        from hwrl.weights import WeightReceiver, WeightSender

        super().__init__(setup)
        senders = 1 if setup.trainers is None else setup.trainers.size
        self._name = f"hwrl-{transport}-{into}".replace(" ", "-")
        store, name, buckets = self.worker.store, self._name, setup.buckets
        self._named = list(self.payload.views.items()) if into == "flat" else self.payload.named
        self._flat = into == "flat"
        self._end: Any
        if self.worker.rank and setup.trainers is None:
            tensors: Tensors | None = None
            if into != "new memory":
                tensors = self.payload.views if into == "flat" else self.payload.copies
            replica = f"r{self.worker.rank}"
            self._end = WeightReceiver(store, name=name, replica=replica, into=tensors, buckets=buckets)
            return
        options: dict[str, Any] = {"bucket_nbytes": setup.bucket_nbytes, "buckets": buckets, "timeout_s": 300.0}
        options |= {"group": setup.trainers, "senders": senders}
        self._end = WeightSender(store, name=name, transport=transport, **options)
        self._end.wait_for_receivers(self.worker.size - senders)

    def prepare(self) -> None:
        if self._flat and (self.worker.rank == 0 or self.setup.trainers is not None):
            self.payload.copy_into(self.payload.views)

    def send(self, version: int) -> TransferResult:
        report = self._end.publish(version, self._named)
        return TransferResult(stages=report.seconds, transfer_s=report.transfer_s)

    def receive(self, version: int) -> TransferResult:
        if self.setup.trainers is not None:
            self._end.publish(version, self._named)
            return TransferResult()
        received = self._end.receive()
        return TransferResult(stages=received.seconds, transfer_s=received.transfer_s, tensors=received)

    def close(self) -> None:
        self._end.close()


class Needs(Enum):
    """The condition under which a way works."""

    GROUP = "the processes can form a group"
    NO_GROUP = "they cannot"
    IPC = "a process can open the device memory of another"
    NOTHING = ""


WAYS: dict[str, tuple[Needs, Callable[[TransferSetup], TransferWay]]] = {
    "flat broadcast": (Needs.GROUP, FlatBroadcast),
    # One broadcast of tens of gigabytes may be slower than several.
    "flat broadcast in pieces": (Needs.GROUP, partial(FlatBroadcast, piece_nbytes=1 << 30)),
    "copy on the device": (Needs.NO_GROUP, DeviceCopy),
    "per-tensor broadcast": (Needs.GROUP, TensorBroadcasts),
    "hwrl device": (Needs.GROUP, partial(WeightLink, transport="device")),
    "hwrl device in place": (Needs.GROUP, partial(WeightLink, transport="device", into="in place")),
    "hwrl device flat": (Needs.GROUP, partial(WeightLink, transport="device", into="flat")),
    "hwrl ipc in place": (Needs.IPC, partial(WeightLink, transport="ipc", into="in place")),
    "hwrl host": (Needs.NOTHING, partial(WeightLink, transport="host")),
}
RAW = tuple(WAYS)[:3]
"""The ways without packing or checks. The others are compared with the fastest of them."""
