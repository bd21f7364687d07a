"""Decide which devices each process of a run uses, and how weights travel between the processes. Needs no Ray.

Three numberings of devices meet here. The run numbers the devices that it reserves, from 0. A machine numbers its own
devices. A process numbers the devices that are visible to it.
"""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from hwrl.errors import ConfigError, PlacementError
from hwrl.interfaces import Backend, Capability, DeviceMap, Support
from hwrl.run.config import Config

if TYPE_CHECKING:
    from hwrl.weights import Transport, TransportName

_UNITS = 10_000
"""The parts of a device in which Ray counts shares."""
_MOST_SENDERS = 8
"""Each sender has process groups of its own with all receivers."""
_RANK_BESIDE_REPLICAS = 6_000
"""The share, in units, of a trainer rank on a device with replicas."""


# -- before anything starts -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reservation:
    """The devices of one process, by the run's numbers. It reserves the ``share`` of each; 1 is a whole device."""

    devices: tuple[int, ...]
    share: float


@dataclass(frozen=True)
class DeviceCounts:
    """How many devices a run uses. A process without a device counts as one device."""

    rollout: int
    """Devices with a replica, the trainer's among them if replicas share those."""
    distinct: int
    """Devices of the whole run. One that the trainer and replicas share counts once."""


@dataclass(frozen=True)
class DeviceAssignment:
    """A reservation for each trainer rank and each replica, in order, on ``devices`` devices."""

    devices: int
    ranks: tuple[Reservation, ...]
    replicas: tuple[Reservation, ...]

    @property
    def shared(self) -> bool:
        """Whether several processes share a device."""
        return sum(len(one.devices) for one in (*self.ranks, *self.replicas)) > self.devices

    @property
    def counts(self) -> DeviceCounts:
        """The number of devices of the replicas, and of the run."""
        rollout = {device for one in self.replicas for device in one.devices}
        return DeviceCounts(len(rollout), self.devices)

    @property
    def bundles(self) -> list[tuple[int, ...]]:
        """The groups of devices for Ray to reserve: one per device if they are shared, else one per process."""
        if self.shared:
            return [(device,) for device in range(self.devices)]
        return [one.devices for one in (*self.ranks, *self.replicas)]

    def __str__(self) -> str:
        if not self.shared:
            return "each process has its own"
        with_ranks = {one.devices for one in self.ranks} & {one.devices for one in self.replicas}
        shared = "the trainer's devices" if with_ranks else "the devices beside the trainer's"
        return f"too few devices ({self.devices}), so replicas share {shared}"


def assign_devices(
    *, devices: int, ranks: int, replicas: int, tensor_parallel: int, may_share: bool
) -> DeviceAssignment:
    """Divide ``devices`` devices among the processes of a run. A replica takes ``tensor_parallel`` devices.

    With enough devices each process has its own. With fewer, replicas share the devices beside the trainer's, or the
    trainer's if it has all of them. Raises ConfigError if replicas would have to share and may not. Two ranks never
    share, and a replica with several devices never does.
    """
    may_share = may_share and tensor_parallel == 1
    needed = ranks + replicas * tensor_parallel
    if (ranks if may_share else needed) > devices:
        raise _too_few(devices, ranks=ranks, replicas=replicas, tensor_parallel=tensor_parallel, may_share=may_share)
    left = range(ranks, devices)
    for_rank, for_replicas = (_UNITS, _UNITS) if left else (_RANK_BESIDE_REPLICAS, _UNITS - _RANK_BESIDE_REPLICAS)
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
        why=f"{unshared} share none, and {devices} are free",
        fix=f"use fewer {fewer}, or join a larger cluster with RAY_ADDRESS",
    )


def choose_transport(
    *, bypass_cpu: bool, shared: bool, one_machine: bool, supports: Callable[[Capability], Support]
) -> tuple[TransportName, str]:
    """Return the transport for weights, and the reason. ``shared``: processes of the run share a device.

    Raises ConfigError if no transport of these devices reaches all machines of the run.
    """
    collectives, groups, ipc = (
        supports(one) for one in (Capability.COLLECTIVES, Capability.SHARED_DEVICE_GROUPS, Capability.DEVICE_IPC)
    )
    if bypass_cpu and collectives.usable and not shared:
        return "device", "each process has a device of its own"
    if bypass_cpu and collectives.usable and groups.usable:
        return "device", f"processes share a device, and may form a group on it: {groups.reason}"
    why = "weights.bypass_cpu is false"
    if bypass_cpu:
        why = "processes share a device, and cannot form a group on it"
    if bypass_cpu and not collectives.usable:
        why = f"the device has no collectives ({collectives.reason})"
        if not one_machine:
            return "device", f"{why}, so groups are staged through the host"
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
        """How many machines there are."""
        return len({*self.ranks, *self.receivers})


def choose_senders(
    setting: int | Literal["auto"],
    *,
    transport: TransportName,
    ranks: int,
    machines: Machines | None,
    own_devices: bool,
) -> tuple[int, str]:
    """Return how many of the trainer's ``ranks`` send the weights, and the reason.

    ``machines`` None: they are not known. ``own_devices``: each rank has a device, and so a network adapter near it.
    Raises ConfigError if the ``setting`` asks for several senders, and the transport has one.
    """
    if setting != "auto":
        if setting > 1 and not transport_facts(transport).several_senders:
            raise ConfigError(
                f"weights.senders={setting} is not possible here",
                why=f"weights travel by {transport}, and with it rank 0 alone sends",
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
        return 1, "all processes are on one machine, where one rank saturates the wire"
    if not own_devices:
        hosts = min(len(set(machines.ranks)), _MOST_SENDERS)
        return hosts, f"one for each of the trainer's machines, at most {_MOST_SENDERS}"
    widest = max(Counter(machines.receivers).values())  # a machine takes in each byte once, by all its adapters
    most = min(ranks, widest, _MOST_SENDERS)
    return most, f"{ranks} ranks on {len(set(machines.ranks))} machines have devices, a receiving machine {widest}"


def transport_facts(transport: TransportName) -> Transport:
    """Return the transport of this name, for its facts. Imports torch."""
    from hwrl.weights import TRANSPORTS

    return TRANSPORTS[transport]


def _not_across_machines(why: str) -> ConfigError:
    return ConfigError(
        "weights cannot reach the other machines of this cluster",
        why=f"{why}; IPC and host memory work on one machine only",
        fix="use fewer replicas, so that each process has a device of its own, with weights.bypass_cpu=true, or one "
        "machine",
    )


def has_devices(backend: Backend) -> bool:
    """Return whether the backend has devices to divide among processes. A host's processors serve all processes."""
    return backend.devices.ray_resource is not None or not backend.supports(Capability.SHARED_DEVICE_GROUPS).usable


@dataclass(frozen=True)
class PlacementPlan:
    """The decisions before any process starts: devices for each process, and the transport for weights."""

    assignment: DeviceAssignment
    transport: TransportName
    why_transport: str


def plan_placement(config: Config, backend: Backend, *, devices: int, one_machine: bool) -> PlacementPlan:
    """Place the run's processes on ``devices`` devices. Raises ConfigError if that is impossible."""
    width, divided = config.rollout.tensor_parallel, has_devices(backend)
    if width > 1 and divided and backend.devices.visible_variable is None:
        raise ConfigError(
            f"rollout.tensor_parallel={width} is not possible on this device",
            why="a replica with several devices must see no others, and the backend's DeviceMap has no "
            "visible_variable",
            fix="set rollout.tensor_parallel=1",
        )
    assignment = assign_devices(
        devices=devices,
        ranks=config.train.ranks,
        replicas=config.rollout.replicas,
        tensor_parallel=width,
        may_share=divided,
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
    """Return the machine's number for each of the run's devices. ``machines`` has the machine of each bundle.

    >>> number_devices_by_machine([(0,), (1, 2), (3,)], ["a", "b", "a"])
    {0: 0, 1: 0, 2: 1, 3: 1}
    """
    used: Counter[str] = Counter()
    numbers = {}
    for devices, machine in zip(bundles, machines, strict=True):
        for device in devices:
            numbers[device] = used[machine]
            used[machine] += 1
    return numbers


# -- in each process, as it starts ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class ProcessDevices:
    """The devices that one process shall use: ``count`` of them.

    ``indices`` counts among the devices visible under ``env``, or under the process's own environment if ``env`` is
    None. Without ``indices`` Ray has already hidden the other devices. ``opens`` has the machine's numbers of all
    devices whose memory the process may open.
    """

    count: int = 1
    indices: tuple[int, ...] = ()
    env: Mapping[str, str] | None = None
    opens: tuple[int, ...] = ()


def machine_devices(env: Mapping[str, str], devices: DeviceMap, *, count: int) -> tuple[int, ...]:
    """Return the machine's numbers of the ``count`` devices visible under ``env``."""
    return devices.visible(env) or tuple(range(count))


def with_visible(others: Sequence[int], env: Mapping[str, str], devices: DeviceMap) -> dict[str, str]:
    """Return the variables to set under ``env`` to make the machine's devices ``others`` visible too, after the own."""
    own = devices.visible(env) or ()
    return devices.render([*own, *(index for index in others if index not in own)]) if others else {}


def make_visible(wanted: ProcessDevices, devices: DeviceMap, env: MutableMapping[str, str]) -> tuple[int, ...]:
    """Make the ``wanted`` devices visible to this process; return their indices in it.

    Call it before the first use of a device: the vendors' libraries read ``env``, the process's environment, only once.
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
    env.update(with_visible(wanted.opens, env, devices))
    seen = devices.visible(env) or ()
    return tuple(seen.index(number) for number in numbers) or own  # some runtimes sort the visible devices


def check_devices(wanted: ProcessDevices, own: Sequence[int], backend: Backend, env: Mapping[str, str]) -> None:
    """Raise PlacementError if this process does not see the devices of :func:`make_visible`."""
    if not has_devices(backend):  # the host's processors serve as many workers as there are
        return
    variable, seen = backend.devices.visible_variable, backend.device_count()
    setting = f"{variable}={env.get(variable, '(not set)')}" if variable else "it has no visible-devices variable"
    if max(own) >= seen:
        raise PlacementError(
            f"this process has no device {max(own)}",
            why=f"it sees {seen} devices, counted from 0 ({setting})",
            fix="let the variable name only devices of this machine; `hwrl doctor` counts them",
        )
    if wanted.indices and variable and not wanted.opens and seen != wanted.count:
        raise PlacementError(
            f"{variable} does not hide the other devices",
            why=f"this process sees {seen} devices with {setting}",
            fix="let visible_variable of the backend's DeviceMap name the variable of the vendor's runtime, or be None",
        )


# -- reports of the processes ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DeviceReport:
    """The devices that a process really uses: their ``names`` on its ``host``, and a ``key`` for each.

    Equal keys mean the same device. A key is the device's UUID or, without one, its machine and number.
    """

    host: str
    names: tuple[str, ...]
    keys: tuple[str, ...]


def make_device_report(own: Sequence[int], backend: Backend) -> DeviceReport:
    """Return the devices of this process. A process with one device reports the device of a new tensor."""
    indices = own if len(own) > 1 else (_index_in_use(backend),)
    host = socket.gethostname()
    boot = Path("/proc/sys/kernel/random/boot_id")  # two hosts may have the same name
    machine = f"{host} {boot.read_text().strip()}" if boot.is_file() else host
    names = tuple(backend.devices.name(index, os.environ) for index in indices)
    keys = (backend.device_uuid(index) or f"{machine} {name}" for index, name in zip(indices, names, strict=True))
    return DeviceReport(host, names, tuple(keys))


def _index_in_use(backend: Backend) -> int:
    """Return the number of the device with this thread's new tensors: ``set_device`` may have had no effect on them."""
    import torch

    index = torch.empty(1, device=backend.info.device_type).device.index
    return backend.current_index() if index is None else index


class DeviceReports:
    """Collects the reported devices of ``processes``, and compares them with the reservations."""

    def __init__(self, processes: Sequence[str]) -> None:
        self._processes = processes
        self._reports: dict[str, tuple[Reservation, DeviceReport]] = {}

    def add(self, process: str, reservation: Reservation, held: DeviceReport) -> None:
        """Add a report. Raises PlacementError if two processes use one device, and their reservations share none."""
        for other, (other_reservation, other_held) in self._reports.items():
            common = [name for name, key in zip(held.names, held.keys, strict=True) if key in other_held.keys]
            if other != process and common and not set(reservation.devices) & set(other_reservation.devices):
                raise PlacementError(
                    f"{process} and {other} are on the same device",
                    why=f"each has its own by plan, and both report device {common[0]} of {held.host}",
                    fix="check visible_variable in the backend's DeviceMap, and its set_device; on a cluster, check "
                    "that each device of a machine is counted once",
                )
        self._reports[process] = (reservation, held)

    def remove(self, process: str) -> None:
        """Remove the report of a process that has ended."""
        self._reports.pop(process, None)

    def __str__(self) -> str:
        held = {process: self._reports[process][1] for process in self._processes if process in self._reports}
        several_hosts = len({one.host for one in held.values()}) > 1
        return ", ".join(
            f"{process} on device {'+'.join(one.names)}{f' of {one.host}' if several_hosts else ''}"
            for process, one in held.items()
        )
