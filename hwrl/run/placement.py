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
    """What a process reserves: the ``share`` (1 is all of it) of each of its ``devices``, which the run counts."""

    devices: tuple[int, ...]
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
        return sum(len(seat.devices) for seat in (*self.ranks, *self.replicas)) > self.devices

    @property
    def bundles(self) -> list[tuple[int, ...]]:
        """The devices that Ray must reserve together: each by itself if they are shared, else those of each process."""
        if self.shared:
            return [(device,) for device in range(self.devices)]
        return [seat.devices for seat in (*self.ranks, *self.replicas)]

    def __str__(self) -> str:
        if not self.shared:
            return "no process shares a device"
        with_ranks = {seat.devices for seat in self.ranks} & {seat.devices for seat in self.replicas}
        which = "the trainer's" if with_ranks else "those that the trainer leaves"
        return f"too few devices ({self.devices}), so replicas share {which}"


def seat(*, devices: int, ranks: int, replicas: int, width: int, may_share: bool) -> Seating:
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
    return Seating(
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
) -> tuple[Transport, str]:
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


def machine_devices(env: Mapping[str, str], devices: DeviceMap, *, count: int) -> tuple[int, ...]:
    """Return the machine's numbers of the ``count`` devices that a process under ``env`` sees."""
    return devices.visible(env) or tuple(range(count))


def see_also(others: Sequence[int], env: Mapping[str, str], devices: DeviceMap) -> dict[str, str]:
    """Return what to set so that a process under ``env`` sees the machine's devices ``others`` too, behind its own."""
    own = devices.visible(env) or ()
    return devices.render([*own, *(index for index in others if index not in own)]) if others else {}
