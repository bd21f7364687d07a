"""Which device each process of a run gets, and how the weights travel between them."""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hwrl.errors import ConfigError, PlacementError
from hwrl.interfaces import Backend, Capability, DeviceMap, Support
from hwrl.run.config import Config

if TYPE_CHECKING:
    from hwrl.weights import TransportName

_UNITS = 10_000
"""Ray counts shares of a device in such parts."""
_RANK_BESIDE_REPLICAS = 6_000
"""What a trainer rank reserves of a device that replicas share with it."""


@dataclass(frozen=True)
class Seat:
    """What a process reserves: the ``share`` (1 is all of it) of each of its ``devices``, which the run counts."""

    devices: tuple[int, ...]
    share: float


@dataclass(frozen=True)
class DeviceAssignment:
    """A seat for each trainer rank and each replica, in order, on ``devices`` devices."""

    devices: int
    ranks: tuple[Seat, ...]
    replicas: tuple[Seat, ...]

    @property
    def shared(self) -> bool:
        """Whether a device serves more than one process."""
        return sum(len(seat.devices) for seat in (*self.ranks, *self.replicas)) > self.devices

    @property
    def bundles(self) -> list[tuple[int, ...]]:
        """The devices that Ray must reserve together: each by itself if they are shared, else those of each process."""
        if self.shared:
            return [(device,) for device in range(self.devices)]
        return [seat.devices for seat in (*self.ranks, *self.replicas)]

    def __str__(self) -> str:
        if not self.shared:
            return "each process has its own"
        with_ranks = {seat.devices for seat in self.ranks} & {seat.devices for seat in self.replicas}
        which = "the trainer's" if with_ranks else "those that the trainer leaves"
        return f"too few devices ({self.devices}), so replicas share {which}"


def seat(*, devices: int, ranks: int, replicas: int, width: int, may_share: bool) -> DeviceAssignment:
    """Divide ``devices`` among the processes of a run; a replica takes ``width``.

    Each gets devices of its own if there are enough. If not, replicas share the devices that no trainer rank has, or,
    if each has one, the ranks' devices. Raises ConfigError if the replicas may not share and must, which those of
    several devices never may; nor may two ranks.
    """
    may_share = may_share and width == 1
    needed = ranks + replicas * width
    if (ranks if may_share else needed) > devices:
        raise _too_few(devices, ranks=ranks, replicas=replicas, width=width, may_share=may_share)
    left = range(ranks, devices)
    for_rank, for_replicas = (_UNITS, _UNITS) if left else (_RANK_BESIDE_REPLICAS, _UNITS - _RANK_BESIDE_REPLICAS)
    places = left or range(devices)
    each = for_replicas // -(-replicas * width // len(places))
    wide = [tuple(places[(index * width + own) % len(places)] for own in range(width)) for index in range(replicas)]
    return DeviceAssignment(
        devices=min(devices, needed),
        ranks=tuple(Seat((rank,), for_rank / _UNITS) for rank in range(ranks)),
        replicas=tuple(Seat(place, each / _UNITS) for place in wide),
    )


def _too_few(devices: int, *, ranks: int, replicas: int, width: int, may_share: bool) -> ConfigError:
    each = f"rollout.replicas={replicas}" + (f" of rollout.tensor_parallel={width}" if width > 1 else "")
    needing = f"train.ranks={ranks}" + ("" if may_share else f" and {each}")
    fewer = "ranks" if may_share else "ranks or replicas"
    return ConfigError(
        f"the run needs {ranks + (0 if may_share else replicas * width)} devices",
        why=f"{needing} share none, and {devices} are free",
        fix=f"use fewer {fewer}, or add machines to the cluster that RAY_ADDRESS names",
    )


def choose_transport(
    *, bypass_cpu: bool, shared: bool, one_machine: bool, supports: Callable[[Capability], Support]
) -> tuple[TransportName, str]:
    """Return how weights travel, and why so. ``shared`` says whether processes of the run share a device.

    Raises ConfigError if nothing that the devices can do reaches all of the run's machines.
    """
    collectives, groups, ipc = (
        supports(one) for one in (Capability.COLLECTIVES, Capability.SHARED_DEVICE_GROUPS, Capability.DEVICE_IPC)
    )
    if bypass_cpu and collectives.usable and not shared:
        return "device", "each process has a device of its own"
    if bypass_cpu and collectives.usable and groups.usable:
        return "device", f"processes share a device, and a group may: {groups.reason}"
    why = "weights.bypass_cpu is false"
    if bypass_cpu:
        why = "processes share a device, which no group may"
    if bypass_cpu and not collectives.usable:
        why = f"the device has no collectives ({collectives.reason})"
    if not one_machine:
        raise _not_across_machines(why, one_machine_only=not collectives.usable)
    if not bypass_cpu:
        return "host", why
    if not ipc.usable:
        return "host", f"{why}, and IPC is not possible: {ipc.reason}"
    return "ipc", f"{why}; all processes are on this machine"


def _not_across_machines(why: str, *, one_machine_only: bool) -> ConfigError:
    apart = (
        "use fewer replicas, so that each process has a device of its own, with weights.bypass_cpu=true, or one machine"
    )
    return ConfigError(
        "weights cannot reach the other machines of this cluster",
        why=f"{why}; IPC and host memory end at the machine's border",
        fix="use one machine: unset RAY_ADDRESS" if one_machine_only else apart,
    )


def check_ranks(ranks: int, *, collectives: Support) -> None:
    """Raise ConfigError if there are several trainer ``ranks`` on a device whose processes can form no group."""
    if ranks > 1 and not collectives.usable:
        raise ConfigError(
            f"train.ranks={ranks} is not possible on this device",
            why=f"ranks share their work by collectives, which it lacks: {collectives.reason}",
            fix="set train.ranks=1",
        )


def has_devices(backend: Backend) -> bool:
    """Return whether the backend has devices to divide among processes; a host's processors serve all of them."""
    return backend.devices.ray_resource is not None or not backend.supports(Capability.SHARED_DEVICE_GROUPS).usable


@dataclass(frozen=True)
class Plan:
    """What was decided before anything starts: the seats, and how weights travel."""

    seating: DeviceAssignment
    transport: TransportName
    why_transport: str


def plan_placement(config: Config, backend: Backend, *, devices: int, one_machine: bool) -> Plan:
    """Seat the run's processes on ``devices`` devices. Raises ConfigError if they cannot be, or weights not travel."""
    check_ranks(config.train.ranks, collectives=backend.supports(Capability.COLLECTIVES))
    width, divided = config.rollout.tensor_parallel, has_devices(backend)
    if width > 1 and divided and backend.devices.visible_variable is None:
        raise ConfigError(
            f"rollout.tensor_parallel={width} is not possible on this device",
            why="a replica of several devices must see no others, and the backend's DeviceMap has no visible_variable",
            fix="set rollout.tensor_parallel=1",
        )
    seating = seat(
        devices=devices,
        ranks=config.train.ranks,
        replicas=config.rollout.replicas,
        width=width,
        may_share=divided,
    )
    transport, why = choose_transport(
        bypass_cpu=config.weights.bypass_cpu,
        shared=seating.shared or not divided,
        one_machine=one_machine,
        supports=backend.supports,
    )
    return Plan(seating, transport, why)


@dataclass(frozen=True)
class Assignment:
    """What one process is told: to take ``count`` devices, and which.

    They are ``indices`` among those that a process under ``env`` sees, or under its own environment if that is None.
    Without ``indices`` Ray has narrowed what it sees. ``opens``: the machine's devices whose memory it may open.
    """

    count: int = 1
    indices: tuple[int, ...] = ()
    env: Mapping[str, str] | None = None
    opens: tuple[int, ...] = ()


def number_by_machine(bundles: Sequence[Sequence[int]], machines: Sequence[str]) -> dict[int, int]:
    """Return for each device of the run its number on its machine, as bundle after bundle was put on ``machines``.

    >>> number_by_machine([(0,), (1, 2), (3,)], ["a", "b", "a"])
    {0: 0, 1: 0, 2: 1, 3: 1}
    """
    taken: Counter[str] = Counter()
    numbers = {}
    for devices, machine in zip(bundles, machines, strict=True):
        for device in devices:
            numbers[device] = taken[machine]
            taken[machine] += 1
    return numbers


def machine_devices(env: Mapping[str, str], devices: DeviceMap, *, count: int) -> tuple[int, ...]:
    """Return the machine's numbers of the ``count`` devices that a process under ``env`` sees."""
    return devices.visible(env) or tuple(range(count))


def with_visible(others: Sequence[int], env: Mapping[str, str], devices: DeviceMap) -> dict[str, str]:
    """Return what to set so that a process under ``env`` sees the machine's devices ``others`` too, behind its own."""
    own = devices.visible(env) or ()
    return devices.render([*own, *(index for index in others if index not in own)]) if others else {}


def show_devices(told: Assignment, devices: DeviceMap, env: MutableMapping[str, str]) -> tuple[int, ...]:
    """Make this process see its devices; return their indices in it. Call it before the device is first used.

    ``env`` is the process's environment, which vendors' libraries read once.
    """
    own = told.indices or tuple(range(told.count))
    if devices.visible_variable is None:
        return own
    if told.indices:
        env.update(devices.narrow(told.indices, env if told.env is None else told.env))
    own = tuple(range(told.count))
    if not told.opens:
        return own
    numbers = (devices.visible(env) or ())[: told.count]
    env.update(with_visible(told.opens, env, devices))
    seen = devices.visible(env) or ()
    return tuple(seen.index(number) for number in numbers) or own  # some devices are always seen in ascending order


def check_devices(told: Assignment, own: Sequence[int], backend: Backend, env: Mapping[str, str]) -> None:
    """Raise PlacementError if this process does not see what :func:`show_devices` made it see."""
    variable, seen = backend.devices.visible_variable, backend.device_count()
    shown = f"{variable}={env.get(variable, '(not set)')}" if variable else "it has no visible-devices variable"
    if max(own) >= seen:
        raise PlacementError(
            f"device {max(own)} is not there for this process",
            why=f"it sees {seen} devices, counted from 0 ({shown})",
            fix="let the variable name devices only that this machine has; `hwrl doctor` counts them",
        )
    if told.indices and variable and not told.opens and seen != told.count:
        raise PlacementError(
            f"{variable} does not narrow what a process sees",
            why=f"it sees {seen} devices with {shown}",
            fix="let visible_variable of the backend's DeviceMap name what the vendor's runtime reads, or be None",
        )


@dataclass(frozen=True)
class Holding:
    """The devices that a process really has: their ``names`` on its ``host``, and a ``key`` for each.

    Equal keys mean the same device: its UUID, or its machine and number if it has none.
    """

    host: str
    names: tuple[str, ...]
    keys: tuple[str, ...]


def held_devices(own: Sequence[int], backend: Backend) -> Holding:
    """Return what this process holds; a process of one device says its current one."""
    indices = own if len(own) > 1 else (backend.current_index(),)
    host = socket.gethostname()
    boot = Path("/proc/sys/kernel/random/boot_id")  # hosts may have the same name
    machine = f"{host} {boot.read_text().strip()}" if boot.is_file() else host
    names = tuple(backend.devices.name(index, os.environ) for index in indices)
    keys = (backend.device_uuid(index) or f"{machine} {name}" for index, name in zip(indices, names, strict=True))
    return Holding(host, names, tuple(keys))


class Proof:
    """The devices of the ``processes`` that are set up, as each reported them, held against their seats."""

    def __init__(self, processes: Sequence[str]) -> None:
        self._processes = processes
        self._held: dict[str, tuple[Seat, Holding]] = {}

    def add(self, process: str, place: Seat, holding: Holding) -> None:
        """Note a process's devices. Raises PlacementError if another has one of them whose seat is elsewhere."""
        for other, (its_place, its_holding) in self._held.items():
            common = [name for name, key in zip(holding.names, holding.keys, strict=True) if key in its_holding.keys]
            if other != process and common and not set(place.devices) & set(its_place.devices):
                raise PlacementError(
                    f"{process} and {other} are on the same device",
                    why=f"each was given its own, and both report device {common[0]} of {holding.host}",
                    fix="look at visible_variable in the backend's DeviceMap, and at its set_device; on a cluster, let "
                    "each device of a machine be counted once",
                )
        self._held[process] = (place, holding)

    def forget(self, process: str) -> None:
        """Forget a process that has ended."""
        self._held.pop(process, None)

    def __str__(self) -> str:
        held = {process: self._held[process][1] for process in self._processes if process in self._held}
        several = len({holding.host for holding in held.values()}) > 1
        return ", ".join(
            f"{process} on device {'+'.join(holding.names)}{f' of {holding.host}' if several else ''}"
            for process, holding in held.items()
        )
