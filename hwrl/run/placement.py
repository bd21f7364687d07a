"""Which device each process of a run gets, and how the weights travel between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hwrl.backend import Capability, DeviceMap, Support
from hwrl.errors import ConfigError

if TYPE_CHECKING:
    from hwrl.weights.sender import Transport

_UNITS = 10_000
"""Ray counts shares of a device in such parts."""
_RANK_BESIDE_REPLICAS = 6_000
"""What a trainer rank reserves of a device that replicas share with it."""


@dataclass(frozen=True)
class Seat:
    """What a process reserves: the ``share`` (1 is all of it) of the device that the run counts as ``device``."""

    device: int
    share: float


@dataclass(frozen=True)
class Seating:
    """A seat for each trainer rank and each replica, in order, on ``devices`` devices."""

    devices: int
    ranks: tuple[Seat, ...]
    replicas: tuple[Seat, ...]

    @property
    def shared(self) -> bool:
        """Whether a device serves more than one process."""
        return len(self.ranks) + len(self.replicas) > self.devices

    def __str__(self) -> str:
        if not self.shared:
            return "a device for each process"
        with_ranks = {seat.device for seat in self.ranks} & {seat.device for seat in self.replicas}
        which = "the trainer's" if with_ranks else "those that the trainer leaves"
        return f"too few devices ({self.devices}), so replicas share {which}"


def seat(*, devices: int, ranks: int, replicas: int, may_share: bool) -> Seating:
    """Divide ``devices`` among the processes of a run.

    Each gets a device of its own if there are enough. If not, replicas share the devices that no trainer rank has, or,
    if each has one, the ranks' devices. Raises ConfigError if the replicas may not share and must; two ranks never do.
    """
    if ranks + (0 if may_share else replicas) > devices:
        raise _too_few(devices, ranks=ranks, replicas=replicas, may_share=may_share)
    left = range(ranks, devices)
    for_rank, for_replicas = (_UNITS, _UNITS) if left else (_RANK_BESIDE_REPLICAS, _UNITS - _RANK_BESIDE_REPLICAS)
    places = left or range(devices)
    each = for_replicas // -(-replicas // len(places))
    return Seating(
        devices=min(devices, ranks + replicas),
        ranks=tuple(Seat(rank, for_rank / _UNITS) for rank in range(ranks)),
        replicas=tuple(Seat(places[index % len(places)], each / _UNITS) for index in range(replicas)),
    )


def _too_few(devices: int, *, ranks: int, replicas: int, may_share: bool) -> ConfigError:
    needing = f"train.ranks={ranks}" + ("" if may_share else f" and rollout.replicas={replicas}")
    fewer = "ranks" if may_share else "ranks or replicas"
    return ConfigError(
        f"the run needs {ranks + (0 if may_share else replicas)} devices",
        why=f"{needing} take one each, and {devices} are free",
        fix=f"use fewer {fewer}, or add machines to the cluster that RAY_ADDRESS names",
    )


def choose_transport(
    *, bypass_cpu: bool, shared: bool, one_machine: bool, supports: Callable[[Capability], Support]
) -> tuple[Transport, str]:
    """Return how weights travel, and why so. ``shared`` says whether processes of the run share a device.

    Raises ConfigError if nothing that the devices can do reaches all of the run's machines.
    """
    groups, ipc = supports(Capability.SHARED_DEVICE_GROUPS), supports(Capability.DEVICE_IPC)
    if bypass_cpu and not shared:
        return "device", "each process has a device of its own"
    if bypass_cpu and groups.usable:
        return "device", f"processes share a device, and a group may: {groups.reason}"
    if not one_machine:
        raise _not_across_machines(bypass_cpu=bypass_cpu)
    if not bypass_cpu:
        return "host", "weights.bypass_cpu is false"
    if not ipc.usable:
        return "host", f"processes share a device, which no group may, and IPC is not possible: {ipc.reason}"
    return "ipc", "processes share a device, which no group may; all are on this machine"


def _not_across_machines(*, bypass_cpu: bool) -> ConfigError:
    return ConfigError(
        "weights cannot reach the other machines of this cluster",
        why="processes share a device, which no group may; IPC and host memory end at the machine's border"
        if bypass_cpu
        else "weights.bypass_cpu is false, and host memory ends at the machine's border",
        fix="use fewer replicas, so that each process has a device of its own, with weights.bypass_cpu=true, or one "
        "machine",
    )


def machine_devices(env: Mapping[str, str], devices: DeviceMap, *, count: int) -> tuple[int, ...]:
    """Return the machine's numbers of the ``count`` devices that a process under ``env`` sees."""
    return devices.visible(env) or tuple(range(count))


def see_also(others: Sequence[int], env: Mapping[str, str], devices: DeviceMap) -> dict[str, str]:
    """Return what to set so that a process under ``env`` sees the machine's devices ``others`` too, behind its own."""
    own = devices.visible(env) or ()
    return devices.render([*own, *(index for index in others if index not in own)]) if others else {}
