"""The devices of a run in Ray: what is reserved, what each process is told, and what each one reports."""

from __future__ import annotations

import os
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from hwrl.discovery import process_env
from hwrl.errors import ConfigError
from hwrl.interfaces import Backend
from hwrl.run.cluster import local_devices
from hwrl.run.config import Config
from hwrl.run.inputs import is_local
from hwrl.run.placement import (
    Assignment,
    Holding,
    Proof,
    Seat,
    has_devices,
    machine_devices,
    number_by_machine,
    plan_placement,
)

RESERVE_S = 60.0


class RunDevices:
    """Gives each process of a run its devices, and checks what it reports.

    Processes go by their names: :attr:`ranks` and :attr:`replicas` map them to their seats. Making one may reserve
    devices, which :meth:`close` gives back. Raises ConfigError if there are too few devices, or if weights cannot
    reach every process.
    """

    def __init__(self, config: Config, backend: Backend) -> None:
        self._backend, devices = backend, backend.devices
        resource, divided = devices.ray_resource or "CPU", has_devices(backend)
        if divided and devices.ray_resource is None and not is_local():
            raise _not_counted(backend.info.name)
        self.plan = plan_placement(
            config,
            backend,
            devices=local_devices(config) if is_local() else int(ray.available_resources().get(resource, 0)),
            one_machine=is_local() or sum(node["Alive"] for node in ray.nodes()) == 1,
        )
        seating = self.plan.seating
        self.ranks = {f"trainer rank {rank}": place for rank, place in enumerate(seating.ranks)}
        self.replicas = {f"replica-{index}": place for index, place in enumerate(seating.replicas)}
        self._proof = Proof([*self.ranks, *self.replicas])
        self._shown = {name: value for name, value in os.environ.items() if name == devices.visible_variable}
        self._opens: tuple[int, ...] = ()
        if self.plan.transport == "ipc":
            self._opens = machine_devices(os.environ, devices, count=backend.device_count())
        self._reserve(resource, divided=divided, wide=config.rollout.tensor_parallel > 1)

    def told(self, process: str) -> Assignment:
        """Return the devices that ``process`` is to take."""
        devices = self._seat(process).devices
        return Assignment(
            count=len(devices),
            indices=tuple(self._numbers[device] for device in devices) if self._numbers else (),
            env=self._shown if is_local() else None,
            opens=self._opens if process in self.replicas else (),
        )

    def options(self, process: str) -> dict[str, Any]:
        """Return what Ray is told about ``process``: its devices, and the variables that its backend wants."""
        place, seating = self._seat(process), self.plan.seating
        options = self._backend.devices.ray_options(place.share * len(place.devices))
        if self._group is not None:
            strategy = PlacementGroupSchedulingStrategy(self._group, seating.bundles.index(place.devices))
            options = {"num_cpus": 0, **options, "scheduling_strategy": strategy}
        variables = process_env(
            "trainer" if process in self.ranks else "rollout",
            exports_memory=process in self.ranks and self.plan.transport == "ipc",
            shares_device=seating.shared,
            devices=self.told(process).indices,
        )
        return options | ({"runtime_env": {"env_vars": variables}} if variables else {})

    def prove(self, process: str, holding: Holding | None) -> None:
        """Take what ``process`` reports; without devices there is no holding.

        Raises PlacementError if it holds what it was not given, or what another process must have alone.
        """
        if holding is not None:
            self._proof.add(process, self._seat(process), holding)

    def forget(self, process: str) -> None:
        """Drop the report of a process that has died."""
        self._proof.forget(process)

    def describe(self) -> str:
        """Say which devices the processes have reported."""
        return (
            f"{self._proof}; {self.plan.seating}" if has_devices(self._backend) else "all share the hosts' processors"
        )

    def close(self) -> None:
        """Give the reserved devices back."""
        if self._group is not None:
            ray.util.remove_placement_group(self._group)

    def _seat(self, process: str) -> Seat:
        return self.ranks[process] if process in self.ranks else self.replicas[process]

    def _reserve(self, resource: str, *, divided: bool, wide: bool) -> None:
        """Reserve devices together where Ray would place processes wrongly, and number those that Ray does not number.

        By itself Ray might put replicas where a rank must go, or leave a machine too few devices for a ``wide`` one.
        Devices that Ray does not number are numbered by the machine of their bundle.
        """
        seating, local = self.plan.seating, is_local()
        ray_numbers = not local and resource in ray.get(ray.remote(num_cpus=0)(_numbered_by_ray).remote())
        self._group: Any = None
        if seating.shared or wide or (divided and not local and not ray_numbers):
            self._group = place_together(seating.bundles, resource)
        self._numbers: dict[int, int] = {}
        if divided and local:
            self._numbers = {device: device for device in range(seating.devices)}
        elif divided and not ray_numbers:
            self._numbers = number_by_machine(seating.bundles, _machines(self._group))


def place_together(bundles: list[tuple[int, ...]], resource: str) -> Any:
    """Return a placement group of ``bundles``. Raises ConfigError if no machines have them."""
    group = ray.util.placement_group([{resource: len(devices)} for devices in bundles])
    if not group.wait(RESERVE_S):
        ray.util.remove_placement_group(group)
        widest = max(len(devices) for devices in bundles)
        raise ConfigError(
            "the run's processes cannot be placed",
            why=f"Ray could not reserve devices for all {len(bundles)} in {RESERVE_S:g} s; the widest needs {widest} "
            "on one machine",
            fix="set rollout.tensor_parallel to what a machine has left besides the trainer, or add machines",
        )
    return group


def _numbered_by_ray() -> list[str]:
    """Return the resources of which Ray tells each worker the numbers."""
    return list(ray.get_runtime_context().get_accelerator_ids())


def _machines(group: Any) -> list[str]:
    """Return the machine of each bundle of a placement group."""
    nodes: dict[int, str] = ray.util.placement_group_table(group)["bundles_to_node_id"]
    return [nodes[index] for index in range(len(nodes))]


def _not_counted(name: str) -> ConfigError:
    return ConfigError(
        f"the devices of backend {name!r} cannot be counted on a cluster",
        why="RAY_ADDRESS names one, and the backend's DeviceMap has no ray_resource",
        fix="give it one and start the cluster's nodes with that resource, or unset RAY_ADDRESS",
    )
