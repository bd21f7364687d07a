"""The plan of a run: the memory of its processes and devices, its links, and a message for whatever does not fit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from hwrl.errors import ConfigError
from hwrl.interfaces import (
    ALWAYS,
    Backend,
    Capability,
    DeviceMap,
    MemoryCause,
    Phase,
    Support,
    peak_phase,
    phase_nbytes,
)
from hwrl.run import ClusterNode, Config, PlacementPlan, needs, place_on_nodes, plan_placement
from hwrl_plan.processes import (
    SHARED_CAUSES,
    Link,
    count_groups,
    group_memory,
    links_of,
    rank_memory,
    worker_memory,
)


@dataclass(frozen=True)
class Hardware:
    """``devices`` devices with ``device_nbytes`` each, on ``nodes`` equal nodes with ``host_nbytes`` each, if known.

    ``bandwidth`` is the bandwidth of each link in bytes per second. ``group_nbytes`` is the device memory of the
    collective library for each group of a process, beside the usual buffers.
    """

    devices: int
    device_nbytes: int
    nodes: int = 1
    host_nbytes: int | None = None
    bandwidth: float = 50e9
    group_nbytes: int = 0


@dataclass(frozen=True)
class PlannedProcess:
    """A kind of process: how many the run has, and the memory of each by cause."""

    name: str
    count: int
    causes: tuple[MemoryCause, ...]


@dataclass(frozen=True)
class PlannedDevice:
    """A kind of device: how many the run has, the processes on it, and its peak memory.

    ``phases`` has the phase of each process at the peak.
    """

    name: str
    count: int
    processes: tuple[PlannedProcess, ...]
    phases: tuple[Phase, ...]
    nbytes: int


@dataclass(frozen=True)
class RunPlan:
    """What a run of ``config`` needs on ``hardware``.

    ``host_nbytes`` is the host memory of the node that needs most. ``misfits`` has a sentence for each thing that does
    not fit, and ``unknown`` one for each thing that the plan cannot count.
    """

    config: Config
    hardware: Hardware
    processes: tuple[PlannedProcess, ...]
    devices: tuple[PlannedDevice, ...]
    links: tuple[Link, ...]
    host_nbytes: int
    placed: str
    unknown: tuple[str, ...]
    misfits: tuple[str, ...]

    @property
    def fits(self) -> bool:
        """Whether the run fits."""
        return not self.misfits


def make_plan(config: Config, hardware: Hardware) -> RunPlan:
    """Return the plan of ``config`` on ``hardware``. Needs no device. Raises DataError if the model cannot be read."""
    try:
        placement = _place(config, hardware)
    except ConfigError as error:
        return RunPlan(config, hardware, (), (), (), 0, "", (), (f"{error}",))
    transport, assignment = placement.transport, placement.assignment
    ranks, workers = config.train.ranks, config.rollout.replicas * config.rollout.tensor_parallel
    of_rank, of_worker = (group_memory(count, hardware.group_nbytes) for count in count_groups(config, transport))
    rank_causes = rank_memory(config, device_nbytes=hardware.device_nbytes, transport=transport)
    rank = PlannedProcess("trainer rank", ranks, (*rank_causes, *of_rank))
    worker_causes = worker_memory(config, device_nbytes=hardware.device_nbytes)
    worker = PlannedProcess("replica worker", workers, (*worker_causes, *of_worker))
    devices = tuple(_devices(placement, rank, worker, takes_turns=config.takes_turns))
    host = _host_nbytes(hardware, placement, rank, worker)
    unknown = tuple(
        f"the memory of a {process.name}: the plugin of its engine does not report it"
        for process in (rank, worker)
        if not any(cause.place == "device" and not cause.cause.startswith(SHARED_CAUSES) for cause in process.causes)
    )
    return RunPlan(
        config=config,
        hardware=hardware,
        processes=(rank, worker),
        devices=devices,
        links=tuple(links_of(config, nodes=hardware.nodes, transport=transport)),
        host_nbytes=host,
        placed=f"{assignment}; weights travel by {transport}: {placement.why_transport}",
        unknown=unknown,
        misfits=tuple(_misfits(hardware, devices, host)),
    )


def _place(config: Config, hardware: Hardware) -> PlacementPlan:
    """Divide the devices. Raises ConfigError if they are too few, or if a replica does not fit on one node."""
    backend = cast(Backend, _Accelerator())
    placement = plan_placement(config, backend, devices=hardware.devices, one_machine=hardware.nodes == 1)
    nodes = [ClusterNode(f"node {number}", hardware.devices // hardware.nodes) for number in range(hardware.nodes)]
    place_on_nodes(placement.assignment, nodes, shard_ranks=config.train.shard_ranks)
    return placement


class _Accelerator:
    """What the placement asks of a backend, as most accelerators answer it."""

    devices = DeviceMap("VISIBLE_DEVICES", "device")

    def supports(self, capability: Capability) -> Support:
        """Return that it has all capabilities, except groups with two processes on one device."""
        shared = capability is Capability.SHARED_DEVICE_GROUPS
        return Support("unsupported" if shared else "supported", "a group can have only one process per device")


def _devices(
    placement: PlacementPlan, rank: PlannedProcess, worker: PlannedProcess, *, takes_turns: bool
) -> list[PlannedDevice]:
    assignment = placement.assignment
    ranks = {device for reservation in assignment.ranks for device in reservation.devices}
    workers = Counter(device for reservation in assignment.replicas for device in reservation.devices)
    kinds = Counter((device in ranks, workers[device]) for device in range(assignment.devices))
    planned = []
    for (has_rank, has_workers), count in sorted(kinds.items(), reverse=True):
        processes = (rank,) * has_rank + (worker,) * has_workers
        if processes:
            phases, nbytes = _peak(processes, takes_turns=takes_turns)
            names = ["a trainer rank"] * has_rank + [f"{has_workers} replica worker(s)"] * bool(has_workers)
            planned.append(PlannedDevice(f"device with {' and '.join(names)}", count, processes, phases, nbytes))
    return planned


def _peak(processes: Sequence[PlannedProcess], *, takes_turns: bool) -> tuple[tuple[Phase, ...], int]:
    """Return the phase of each process at the device's peak, and the bytes. If they take turns, only one steps."""
    choices: list[tuple[Phase, ...]] = [tuple(peak_phase(process.causes) for process in processes)]
    if takes_turns and len(processes) > 1:
        count = len(processes)
        choices = [tuple(_turn(index == active) for index in range(count)) for active in range(count)]
        transfer: Phase = "transfer"
        choices.append((transfer,) * count)

    def nbytes(phases: tuple[Phase, ...]) -> int:
        return sum(phase_nbytes(process.causes, phase) for process, phase in zip(processes, phases, strict=True))

    best = max(choices, key=nbytes)
    return best, nbytes(best)


def _turn(active: bool) -> Phase:  # noqa: FBT001 - private
    return "step" if active else "idle"


def _host_nbytes(hardware: Hardware, placement: PlacementPlan, rank: PlannedProcess, worker: PlannedProcess) -> int:
    """Return the host memory of the node that needs most. A process is on the node of its device."""
    per_node = max(1, hardware.devices // hardware.nodes)
    peaks = {kind: max(phase_nbytes(kind.causes, phase, place="host") for phase in ALWAYS) for kind in (rank, worker)}
    total: Counter[int] = Counter()
    for kind, reservations in ((rank, placement.assignment.ranks), (worker, placement.assignment.replicas)):
        for reservation in reservations:
            for device in reservation.devices:
                total[device // per_node] += peaks[kind]
    return max(total.values(), default=0)


def _misfits(hardware: Hardware, devices: Sequence[PlannedDevice], host: int) -> list[str]:
    misfits = [
        needs(f"a {device.name}", device.nbytes, hardware.device_nbytes)
        for device in devices
        if device.nbytes > hardware.device_nbytes
    ]
    if hardware.host_nbytes is not None and host > hardware.host_nbytes:
        misfits.append(needs("the host memory of a node", host, hardware.host_nbytes))
    return misfits
