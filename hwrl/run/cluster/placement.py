"""Decide which devices each process of a run uses, and how weights travel between the processes. Needs no Ray.

A device has three numbers here. The run numbers all devices that it reserves, from 0. Each machine numbers its own
devices. Each process numbers the devices that are visible to it.
"""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from hwrl.errors import ConfigError, PlacementError
from hwrl.interfaces import Backend, Capability, DeviceMap, Support
from hwrl.run.config import Config

if TYPE_CHECKING:
    from hwrl.weights import Transport, TransportName

_UNITS = 10_000
"""Ray counts shares of a device in units of 1 / 10,000."""
_MOST_SENDERS = 8
"""The maximum number of senders: each one has its own process groups with all receivers."""
_RANK_WITH_REPLICAS = 6_000
"""The share of a trainer rank, in units, on a device that it shares with replicas."""


# -- before anything starts -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reservation:
    """The devices of one process, by the run's numbers, and the ``share`` of each that it reserves: 1 is all of it."""

    devices: tuple[int, ...]
    share: float


@dataclass(frozen=True)
class DeviceCounts:
    """How many devices a run uses. A process that uses no device counts as one device."""

    rollout: int
    """Devices with a replica, including those that a replica shares with the trainer."""
    distinct: int
    """Devices of the whole run. A shared device counts once."""

    @classmethod
    def of(cls, ranks: Collection[Reservation], replicas: Collection[Reservation]) -> DeviceCounts:
        """Count the devices of these reservations."""
        rollout = {device for reservation in replicas for device in reservation.devices}
        return cls(len(rollout), len(rollout.union(*(reservation.devices for reservation in ranks))))


@dataclass(frozen=True)
class DeviceAssignment:
    """The reservation of each trainer rank and each replica, in order, on ``devices`` devices."""

    devices: int
    ranks: tuple[Reservation, ...]
    replicas: tuple[Reservation, ...]

    @property
    def shared(self) -> bool:
        """Whether several processes share a device."""
        return sum(len(reservation.devices) for reservation in (*self.ranks, *self.replicas)) > self.devices

    @property
    def bundles(self) -> list[tuple[int, ...]]:
        """The groups of devices for Ray to reserve: one per device if devices are shared, otherwise one per process."""
        if self.shared:
            return [(device,) for device in range(self.devices)]
        return [reservation.devices for reservation in (*self.ranks, *self.replicas)]

    def __str__(self) -> str:
        if not self.shared:
            return "each process has its own device"
        with_ranks = {reservation.devices for reservation in self.ranks} & {
            reservation.devices for reservation in self.replicas
        }
        shared = "the trainer's devices" if with_ranks else "the devices that the trainer does not use"
        return f"too few devices ({self.devices}), so replicas share {shared}"


def assign_devices(
    *, devices: int, ranks: int, replicas: int, tensor_parallel: int, may_share: bool
) -> DeviceAssignment:
    """Divide ``devices`` devices among the processes of a run. A replica takes ``tensor_parallel`` devices.

    With enough devices each process has its own. With fewer, replicas share the devices that the trainer does not use,
    or the trainer's devices if it uses all. Ranks never share a device with each other, and a replica with several
    devices never shares them. Raises ConfigError if there are too few devices for these rules, or if replicas would
    have to share without ``may_share``.
    """
    may_share = may_share and tensor_parallel == 1
    needed = ranks + replicas * tensor_parallel
    if (ranks if may_share else needed) > devices:
        raise _too_few(devices, ranks=ranks, replicas=replicas, tensor_parallel=tensor_parallel, may_share=may_share)
    left = range(ranks, devices)
    for_rank, for_replicas = (_UNITS, _UNITS) if left else (_RANK_WITH_REPLICAS, _UNITS - _RANK_WITH_REPLICAS)
    choices = left or range(devices)
    each = for_replicas // -(-replicas * tensor_parallel // len(choices))
    taken = [
        tuple(choices[(replica * tensor_parallel + offset) % len(choices)] for offset in range(tensor_parallel))
        for replica in range(replicas)
    ]
    return DeviceAssignment(
        devices=min(devices, needed),
        ranks=tuple(Reservation((rank,), for_rank / _UNITS) for rank in range(ranks)),
        replicas=tuple(Reservation(devices_of_one, each / _UNITS) for devices_of_one in taken),
    )


def _too_few(devices: int, *, ranks: int, replicas: int, tensor_parallel: int, may_share: bool) -> ConfigError:
    each = f"rollout.replicas={replicas}" + (
        f" of rollout.tensor_parallel={tensor_parallel}" if tensor_parallel > 1 else ""
    )
    unshared = f"train.ranks={ranks}" + ("" if may_share else f" and {each}")
    fewer = "ranks" if may_share else "ranks or replicas"
    return ConfigError(
        f"the run needs {ranks + (0 if may_share else replicas * tensor_parallel)} devices",
        why=f"{unshared} need devices of their own, and {devices} are free",
        fix=f"use fewer {fewer}, or join a larger cluster with RAY_ADDRESS",
    )


def choose_transport(
    *, bypass_cpu: bool, shared: bool, one_machine: bool, supports: Callable[[Capability], Support]
) -> tuple[TransportName, str]:
    """Return the transport for weights, and the reason as text. ``shared``: some processes of the run share a device.

    The device transport may itself stage the bytes through the host, if the device has no collectives and the run has
    several machines. Raises ConfigError if no transport reaches all machines of the run.
    """
    collectives, groups, ipc = (
        supports(feature)
        for feature in (Capability.COLLECTIVES, Capability.SHARED_DEVICE_GROUPS, Capability.DEVICE_IPC)
    )
    if bypass_cpu and collectives.usable and not shared:
        return "device", "each process has a device of its own"
    if bypass_cpu and collectives.usable and groups.usable:
        return "device", f"processes share a device, and can form a group on it: {groups.reason}"
    why = "weights.bypass_cpu is false"
    if bypass_cpu:
        why = "processes share a device, and cannot form a group on it"
    if bypass_cpu and not collectives.usable:
        why = f"the device has no collectives ({collectives.reason})"
        if not one_machine:
            return "device", f"{why}, so the data is staged through the host"
    if not one_machine:
        raise _not_across_machines(why)
    if not bypass_cpu:
        return "host", why
    if not ipc.usable:
        return "host", f"{why}, and IPC is not possible: {ipc.reason}"
    return "ipc", f"{why}; all processes are on this machine"


@dataclass(frozen=True)
class Machines:
    """The machine of each trainer rank, and of each device of the replicas."""

    ranks: Sequence[str]
    receivers: Sequence[str]

    @property
    def count(self) -> int:
        """The number of machines."""
        return len({*self.ranks, *self.receivers})


def choose_senders(
    setting: int | Literal["auto"],
    *,
    transport: TransportName,
    ranks: int,
    machines: Machines | None,
    own_devices: bool,
) -> tuple[int, str]:
    """Return how many of the trainer's ``ranks`` send the weights, and the reason as text.

    ``setting`` is ``weights.senders``. ``machines`` is None if they are not known yet. ``own_devices`` says that each
    rank has a device, and therefore a network adapter nearby. Raises ConfigError if ``setting`` demands several senders
    and the transport allows only one.
    """
    if setting != "auto":
        if setting > 1 and not transport_facts(transport).several_senders:
            raise ConfigError(
                f"weights.senders={setting} is not possible here",
                why=f"weights travel by {transport}, and only rank 0 can send with it",
                fix="set weights.senders=1 or auto",
            )
        return setting, f"weights.senders={setting}"
    if ranks == 1:
        return 1, "the trainer has one rank"
    if not transport_facts(transport).several_senders:
        return 1, f"weights travel by {transport}"
    if machines is None:
        return 1, "the processes' machines are not known"
    if machines.count == 1:
        return 1, "all processes are on one machine, where one rank uses the full bandwidth"
    if not own_devices:
        hosts = min(len(set(machines.ranks)), _MOST_SENDERS)
        return hosts, f"one on each of the trainer's machines, at most {_MOST_SENDERS}"
    widest = max(Counter(machines.receivers).values())  # a machine receives each byte once, over all its adapters
    senders = min(ranks, widest, _MOST_SENDERS)
    nmachines = len(set(machines.ranks))
    return senders, f"{ranks} ranks on {nmachines} machines have devices, and a receiving machine has up to {widest}"


def transport_facts(transport: TransportName) -> Transport:
    """Return the properties of the transport with this name. Imports torch."""
    from hwrl.weights import TRANSPORTS

    return TRANSPORTS[transport]


def _not_across_machines(why: str) -> ConfigError:
    return ConfigError(
        "weights cannot reach the other machines of this cluster",
        why=f"{why}; IPC and host memory work only on one machine",
        fix="set weights.bypass_cpu=true with fewer replicas, so that each process has its own device, or use one "
        "machine",
    )


def has_devices(backend: Backend) -> bool:
    """Return whether processes need devices of their own. On the CPU they do not: all share the host's processors."""
    return backend.devices.ray_resource is not None or not backend.supports(Capability.SHARED_DEVICE_GROUPS).usable


@dataclass(frozen=True)
class PlacementPlan:
    """What is decided before any process starts: the devices of each process, and the transport for weights."""

    assignment: DeviceAssignment
    transport: TransportName
    why_transport: str


def plan_placement(config: Config, backend: Backend, *, devices: int, one_machine: bool) -> PlacementPlan:
    """Place the run's processes on ``devices`` devices. Raises ConfigError if that is impossible."""
    width, divided = config.rollout.tensor_parallel, has_devices(backend)
    if width > 1 and divided and backend.devices.visible_variable is None:
        raise ConfigError(
            f"rollout.tensor_parallel={width} is not possible on this device",
            why="a replica with several devices must not see others, and the backend's DeviceMap has no "
            "visible_variable",
            fix="set rollout.tensor_parallel=1",
        )
    assignment = assign_devices(
        devices=devices,
        ranks=config.train.ranks,
        replicas=config.rollout.replicas,
        tensor_parallel=width,
        may_share=divided,  # without devices of their own, all processes count as one device each
    )
    transport, why = choose_transport(
        bypass_cpu=config.weights.bypass_cpu,
        shared=assignment.shared or not divided,
        one_machine=one_machine,
        supports=backend.supports,
    )
    choose_senders(  # raises now, before anything starts
        config.weights.senders, transport=transport, ranks=config.train.ranks, machines=None, own_devices=divided
    )
    return PlacementPlan(assignment, transport, why)


def number_devices_by_machine(bundles: Sequence[Sequence[int]], machines: Sequence[str]) -> dict[int, int]:
    """Return each device's index on its machine, by its number in the run. ``machines`` has each bundle's machine.

    >>> number_devices_by_machine([(0,), (1, 2), (3,)], ["a", "b", "a"])
    {0: 0, 1: 0, 2: 1, 3: 1}
    """
    used: Counter[str] = Counter()
    indices = {}
    for devices, machine in zip(bundles, machines, strict=True):
        for device in devices:
            indices[device] = used[machine]
            used[machine] += 1
    return indices


# -- in each process, as it starts ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class ProcessDevices:
    """The ``count`` devices that one process must use.

    ``indices`` are their positions among the devices that are visible under ``env``; None means the process's own
    environment. Without ``indices``, Ray has already hidden all other devices from the process. ``opens`` lists other
    devices by their indices on the machine: the process may open memory on them.
    """

    count: int = 1
    indices: tuple[int, ...] = ()
    env: Mapping[str, str] | None = None
    opens: tuple[int, ...] = ()


def machine_devices(env: Mapping[str, str], devices: DeviceMap, *, count: int) -> tuple[int, ...]:
    """Return the indices, on the machine, of the ``count`` devices that are visible under ``env``."""
    return devices.visible(env) or tuple(range(count))


def make_visible(wanted: ProcessDevices, devices: DeviceMap, env: MutableMapping[str, str]) -> tuple[int, ...]:
    """Make the ``wanted`` devices visible to this process; return their indices among its visible devices.

    ``env`` is the process's environment. Call this before the first use of a device: the vendors' libraries read the
    environment only once.
    """
    own = wanted.indices or tuple(range(wanted.count))
    if devices.visible_variable is None:
        return own
    if wanted.indices:
        env.update(devices.narrow(wanted.indices, env if wanted.env is None else wanted.env))
    own = tuple(range(wanted.count))
    if not wanted.opens:
        return own
    numbers = (devices.visible(env) or ())[: wanted.count]
    env.update(devices.render([*numbers, *(index for index in wanted.opens if index not in numbers)]))
    visible = devices.visible(env) or ()
    return tuple(visible.index(number) for number in numbers) or own  # some runtimes sort the visible devices


def check_devices(wanted: ProcessDevices, own: Sequence[int], backend: Backend, env: Mapping[str, str]) -> None:
    """Raise PlacementError if this process does not see exactly the devices of :func:`make_visible`."""
    if not has_devices(backend):  # all processes share the host's processors
        return
    variable, visible = backend.devices.visible_variable, backend.device_count()
    setting = f"{variable}={env.get(variable, '(not set)')}" if variable else "it has no visible-devices variable"
    if max(own) >= visible:
        raise PlacementError(
            f"this process has no device {max(own)}",
            why=f"it sees {visible} devices, counted from 0 ({setting})",
            fix="set the variable to devices of this machine only; `hwrl doctor` shows how many it has",
        )
    if wanted.indices and variable and not wanted.opens and visible != wanted.count:
        raise PlacementError(
            f"{variable} does not hide the other devices",
            why=f"this process sees {visible} devices with {setting}",
            fix="set visible_variable in the backend's DeviceMap to the variable of the vendor's runtime, or to None",
        )


# -- reports of the processes ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DeviceReport:
    """The devices that a process really uses: their ``names`` on its ``host``, and the key of each.

    Two devices with equal keys are the same device. A key is the device's UUID; without a UUID, machine and index.
    """

    host: str
    names: tuple[str, ...]
    keys: tuple[str, ...]


def make_device_report(own: Sequence[int], backend: Backend) -> DeviceReport:
    """Return the report of this process. With one device, report the device on which a new tensor is."""
    indices = own if len(own) > 1 else (_index_in_use(backend),)
    host = socket.gethostname()
    boot = Path("/proc/sys/kernel/random/boot_id")  # two hosts may have the same name
    machine = f"{host} {boot.read_text().strip()}" if boot.is_file() else host
    names = tuple(backend.devices.name(index, os.environ) for index in indices)
    keys = (backend.device_uuid(index) or f"{machine} {name}" for index, name in zip(indices, names, strict=True))
    return DeviceReport(host, names, tuple(keys))


def _index_in_use(backend: Backend) -> int:
    """Return the index of the device on which this thread makes tensors. ``set_device`` may have had no effect."""
    import torch

    index = torch.empty(1, device=backend.info.device_type).device.index
    return backend.current_index() if index is None else index


class DeviceReports:
    """Collects the reports of ``processes``, and compares them with the reservations."""

    def __init__(self, processes: Sequence[str]) -> None:
        self._processes = processes
        self._reports: dict[str, tuple[Reservation, DeviceReport]] = {}

    def add(self, process: str, reservation: Reservation, report: DeviceReport) -> None:
        """Add a report. Raises PlacementError if two processes use the same device without a shared reservation."""
        for other, (other_reservation, other_report) in self._reports.items():
            common = [name for name, key in zip(report.names, report.keys, strict=True) if key in other_report.keys]
            if other != process and common and not set(reservation.devices) & set(other_reservation.devices):
                raise PlacementError(
                    f"{process} and {other} are on the same device",
                    why=f"by plan each has its own device, but both report device {common[0]} of {report.host}",
                    fix="check the backend's set_device and its DeviceMap's visible_variable; on a cluster, check that "
                    "each device of a machine is counted once",
                )
        self._reports[process] = (reservation, report)

    def remove(self, process: str) -> None:
        """Remove the report of a process that has ended."""
        self._reports.pop(process, None)

    def __str__(self) -> str:
        reports = {process: self._reports[process][1] for process in self._processes if process in self._reports}
        several_hosts = len({report.host for report in reports.values()}) > 1
        return ", ".join(
            f"{process} on device {'+'.join(report.names)}{f' of {report.host}' if several_hosts else ''}"
            for process, report in reports.items()
        )
