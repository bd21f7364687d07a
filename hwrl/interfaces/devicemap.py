"""How processes get their devices: :class:`DeviceMap`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hwrl.errors import ConfigError


@dataclass(frozen=True)
class DeviceMap:
    """How processes get their devices: pure functions of an environment, without a device context.

    ``visible_variable`` is the environment variable with a process's visible devices (None: all are always visible). A
    device's logical number counts these from 0; its physical number counts the machine's. ``ray_resource`` is the
    device's resource name in Ray (None: Ray schedules it by CPU cores).
    """

    visible_variable: str | None = None
    ray_resource: str | None = None

    def visible(self, env: Mapping[str, str]) -> tuple[int, ...] | None:
        """Return the physical numbers of the devices visible under ``env``, in order; None if it does not restrict
        them."""
        if self.visible_variable is None or self.visible_variable not in env:
            return None
        text = env[self.visible_variable].strip()
        try:
            ids = tuple(int(part) for part in text.split(",")) if text else ()
        except ValueError as exc:
            raise ConfigError(
                f"{self.visible_variable}={text!r} cannot be read",
                why="it must be device numbers separated by commas",
                fix=f"set it like {self.visible_variable}=0,1 or unset it",
            ) from exc
        if len(set(ids)) != len(ids) or any(index < 0 for index in ids):
            raise ConfigError(
                f"{self.visible_variable}={text!r} is not a set of devices",
                why="a number is negative or appears twice",
                fix=f"name each device once, like {self.visible_variable}=0,1",
            )
        return ids

    def to_physical(self, logical: int, env: Mapping[str, str]) -> int:
        """Return the physical number of device ``logical``; ConfigError if it is not visible under ``env``."""
        ids = self.visible(env)
        if ids is None:
            return logical
        if not 0 <= logical < len(ids):
            raise ConfigError(
                f"device {logical} is not visible",
                why=f"{self.visible_variable} shows {len(ids)} devices",
                fix="use a smaller number, or make more devices visible",
            )
        return ids[logical]

    def render(self, physical: Sequence[int]) -> dict[str, str]:
        """Return the variables to set so exactly the devices ``physical`` are visible."""
        if self.visible_variable is None:
            return {}
        return {self.visible_variable: ",".join(str(index) for index in physical)}

    def narrow(self, logical: Sequence[int], env: Mapping[str, str]) -> dict[str, str]:
        """Return the variables to set so only the devices ``logical`` of ``env`` are visible."""
        return self.render([self.to_physical(index, env) for index in logical])

    def name(self, logical: int, env: Mapping[str, str]) -> str:
        """Return the name of device ``logical`` of ``env`` on this machine: by default its physical number as text."""
        return str(self.to_physical(logical, env))

    def ray_options(self, count: float) -> dict[str, Any]:
        """Return the options of ``ray.remote`` for an actor with ``count`` devices; below 1, a share of one device.

        ``ray.init`` takes the same options to declare a machine with ``count`` devices.
        """
        if self.ray_resource is None:
            return {"num_cpus": count}
        return {"resources": {self.ray_resource: count}}
