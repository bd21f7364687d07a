"""The devices of a run: reserve them in Ray, tell each process which to use, and check the processes' reports.

On one machine hwrl itself numbers the devices, and Ray only counts them. On a cluster Ray numbers the devices if it
knows their kind. Otherwise a placement group fixes the machine of each process, and hwrl numbers the devices there.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Mapping
from typing import Any

import ray
from ray._private.state import available_resources_per_node  # Ray has no public function for it
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from hwrl.discovery import process_env
from hwrl.errors import ConfigError
from hwrl.interfaces import Backend
from hwrl.run.cluster.nodes import ClusterNode, place_on_nodes
from hwrl.run.cluster.placement import (
    DeviceCounts,
    DeviceReport,
    DeviceReports,
    Machines,
    PlacementPlan,
    ProcessDevices,
    Reservation,
    choose_senders,
    has_devices,
    machine_devices,
    number_devices_by_machine,
    plan_placement,
    transport_facts,
)
from hwrl.run.cluster.ray_session import local_devices
from hwrl.run.config import Config
from hwrl.run.inputs import is_local

RESERVE_TIMEOUT_S = 60.0
_RELEASE_S = 10.0
_NODE_LABEL = "ray.io/node-id"
"""Ray's label with the id of a node."""


class RunDevices:
    """Reserves the devices of a run, and knows which process uses which devices.

    :attr:`ranks` and :attr:`replicas` map the names of the processes to their reservations. :attr:`senders` is the
    number of ranks that send the weights, and :attr:`why_senders` is the reason. The constructor may reserve devices in
    Ray; :meth:`close` returns them. It raises ConfigError if there are too few devices, or if weights cannot reach
    every process.
    """

    def __init__(self, config: Config, backend: Backend) -> None:
        self._backend, devices = backend, backend.devices
        resource, divided = devices.ray_resource or "CPU", has_devices(backend)
        if divided and devices.ray_resource is None and not is_local():
            raise ConfigError(
                f"the devices of backend {backend.info.name!r} cannot be counted on a cluster",
                why="RAY_ADDRESS names a cluster, and the backend's DeviceMap has no ray_resource",
                fix="set ray_resource and start the cluster's nodes with that resource, or unset RAY_ADDRESS",
            )
        nodes = list[ClusterNode]()
        if is_local():
            self.plan = plan_placement(config, backend, devices=local_devices(config), one_machine=True)
        else:
            nodes, self.plan = _plan_on_cluster(config, backend, resource)
        one_machine = is_local() or len(nodes) == 1
        assignment = self.plan.assignment
        self.ranks = {f"trainer rank {rank}": reservation for rank, reservation in enumerate(assignment.ranks)}
        self.replicas = {f"replica-{index}": reservation for index, reservation in enumerate(assignment.replicas)}
        self._resource, self._divided = resource, divided
        self._initial_replicas = dict(self.replicas)  # Ray reserves their devices until the end of the run
        self._only_node = nodes[0].node_id if len(nodes) == 1 else None
        self._reports = DeviceReports([*self.ranks, *self.replicas])
        self._driver_env = {name: value for name, value in os.environ.items() if name == devices.visible_variable}
        self._opens: tuple[int, ...] = ()
        self._transport = transport_facts(self.plan.transport)
        if self._transport.lends_device_memory:
            self._opens = machine_devices(os.environ, devices, count=backend.device_count())
        # On several machines, a placement group fixes the machine of each process.
        together = config.rollout.tensor_parallel > 1 or (divided and not one_machine)
        self._nodes: dict[int, ClusterNode] = {}
        if nodes and (divided or together):
            self._nodes = place_on_nodes(assignment, nodes, shard_ranks=config.train.shard_ranks)
        self._reserve(resource, divided=divided, together=together)
        self.senders, self.why_senders = choose_senders(
            config.weights.senders,
            transport=self.plan.transport,
            ranks=config.train.ranks,
            machines=self._find_machines(one_machine=one_machine),
            own_devices=divided,
        )

    # -- replicas that join and leave --------------------------------------------------------------------------------

    def add_replica(self, name: str) -> None:
        """Reserve devices for a replica that joins the run. An initial replica that returns gets its devices again.

        On one machine this raises ConfigError if too few devices are free. On a cluster the replica's process requests
        devices from Ray when it starts, and waits for them, so that Ray's autoscaler sees the demand.
        """
        known, width = self._initial_replicas.get(name), self._width
        if known is not None:
            self.replicas[name] = known
            return
        used = {
            device
            for reservation in (*self._initial_replicas.values(), *self.ranks.values(), *self.replicas.values())
            for device in reservation.devices
        }
        if not (self._divided and is_local()):
            begin = max(used) + 1
            self.replicas[name] = Reservation(tuple(range(begin, begin + width)), 1.0)
            return
        free = [device for device in range(self._backend.device_count()) if device not in used]
        if len(free) < width:
            raise ConfigError(
                f"there are not enough devices for {name}",
                why=f"it needs {width}, and {len(free)} of this machine's {self._backend.device_count()} are free",
                fix="request fewer replicas, or join a larger cluster with RAY_ADDRESS",
            )
        self.replicas[name] = Reservation(tuple(free[:width]), 1.0)
        self._numbers |= {device: device for device in free[:width]}

    def remove_replica(self, name: str) -> None:
        """Make the devices of the replica ``name`` free for other replicas."""
        self.replicas.pop(name, None)

    def check_growth(self) -> None:
        """Raise ConfigError if no replica can join, because hwrl has numbered the cluster's devices at the start."""
        if not is_local() and self._numbers:
            raise ConfigError(
                "no replica can join this run",
                why=f"Ray does not number the devices of {self._resource!r}, so hwrl numbered them at the start",
                fix="end the run, and resume it with a different rollout.replicas",
            )

    def may_wait(self, name: str) -> bool:
        """Return whether the replica ``name`` may have to wait until Ray has free devices for it."""
        return not is_local() and self._bundle_of(name) is None

    def count_waiting(self, names: Collection[str]) -> int:
        """Return how many of the replicas ``names``, which are about to start, must wait until Ray has free devices."""
        waiting = sum(map(self.may_wait, names))
        return waiting and max(0, waiting - sum(node.devices // self._width for node in free_nodes(self._resource)))

    @property
    def counts(self) -> DeviceCounts:
        """The number of devices of the current replicas, and of the run."""
        return DeviceCounts.of(self.ranks.values(), self.replicas.values())

    @property
    def _width(self) -> int:
        return max(len(reservation.devices) for reservation in self._initial_replicas.values())

    # -- one process -------------------------------------------------------------------------------------------------

    def devices_of(self, process: str) -> ProcessDevices:
        """Return the devices that ``process`` must use."""
        devices = self._reservation(process).devices
        return ProcessDevices(
            count=len(devices),
            indices=tuple(self._numbers[device] for device in devices) if self._numbers else (),
            env=self._driver_env if is_local() else None,
            opens=self._opens if process in self.replicas else (),
        )

    def ray_options(self, process: str) -> dict[str, Any]:
        """Return Ray's options for the actor of ``process``: its devices and its backend's environment variables."""
        reservation, bundle = self._reservation(process), self._bundle_of(process)
        options = self._backend.devices.ray_options(reservation.share * len(reservation.devices))
        if self._joined_later(process):
            options = self._options_of_a_later_replica(options)
        elif bundle is not None:
            strategy = PlacementGroupSchedulingStrategy(self._group, bundle)
            options = {"num_cpus": 0, **options, "scheduling_strategy": strategy}
        variables = process_env(
            "trainer" if process in self.ranks else "rollout",
            exports_memory=process in self.ranks and self._transport.lends_device_memory,
            shares_device=self.plan.assignment.shared,
            devices=self.devices_of(process).indices,
        )
        return options | ({"runtime_env": {"env_vars": variables}} if variables else {})

    def _joined_later(self, process: str) -> bool:
        """Return whether ``process`` is a replica that joined later: it has no place in the placement group."""
        return process not in self.ranks and process not in self._initial_replicas

    def _bundle_of(self, process: str) -> int | None:
        """Return the bundle that Ray has reserved for ``process``; None if Ray must find other devices for it."""
        if self._group is None or self._joined_later(process):
            return None
        reservation = self._reservation(process)
        return None if self._is_on_lost_node(reservation) else self.plan.assignment.bundles.index(reservation.devices)

    def _options_of_a_later_replica(self, options: dict[str, Any]) -> dict[str, Any]:
        """Return Ray's options for a replica that joined later."""
        if is_local():
            return options if self._divided else {"num_cpus": 0}  # the host's cores serve all processes
        if self._transport.across_machines or self._only_node is None:
            return options
        return options | {"scheduling_strategy": NodeAffinitySchedulingStrategy(self._only_node, soft=False)}

    def _is_on_lost_node(self, reservation: Reservation) -> bool:
        """Return whether the node of this reservation is lost, and the process can use devices of another node.

        Ray never moves a reservation, because we have bound each one to a node. So Ray must find devices outside of the
        reservations. That is possible only if Ray numbers the devices, and no process shares its device.
        """
        node = self._nodes.get(reservation.devices[0])
        if node is None or self._numbers or self.plan.assignment.shared:
            return False
        return node.node_id not in {known["NodeID"] for known in ray.nodes() if known["Alive"]}

    def check_report(self, process: str, report: DeviceReport | None) -> None:
        """Add the report of ``process``; it is None if the backend has no devices to divide.

        Raises PlacementError if another process uses the same device, and the plan does not let them share it.
        """
        if report is not None:
            self._reports.add(process, self._reservation(process), report)

    def forget(self, process: str) -> None:
        """Remove the report of a dead process."""
        self._reports.remove(process)

    def describe(self) -> str:
        """Return a text with the devices that the processes have reported."""
        if not has_devices(self._backend):
            return "all share the hosts' processors"
        return f"{self._reports}; {self.plan.assignment}"

    def close(self) -> None:
        """Return the reserved devices to Ray."""
        if self._group is not None:
            ray.util.remove_placement_group(self._group)

    def _reservation(self, process: str) -> Reservation:
        return self.ranks[process] if process in self.ranks else self.replicas[process]

    def _find_machines(self, *, one_machine: bool) -> Machines | None:
        """Return the machines of the processes; None if Ray chooses a machine for each process."""
        of_device: dict[int, str] = {}
        if self._group is not None:
            bundles = zip(self.plan.assignment.bundles, _machines(self._group), strict=True)
            of_device = {device: machine for devices, machine in bundles for device in devices}
        elif not one_machine:
            return None
        ranks, receivers = (
            [of_device.get(device, "") for reservation in processes.values() for device in reservation.devices]
            for processes in (self.ranks, self.replicas)
        )
        return Machines(ranks, receivers)

    def _reserve(self, resource: str, *, divided: bool, together: bool) -> None:
        """Reserve a placement group if the run needs one, and number the devices if Ray does not.

        Without a group, Ray might place replicas on the device of a rank. ``together`` says that it might also leave no
        machine with enough free devices for a replica of several devices.
        """
        assignment, local = self.plan.assignment, is_local()
        ray_numbers = not local and resource in ray.get(ray.remote(num_cpus=0)(_numbered_resources).remote())
        self._group: Any = None
        if assignment.shared or together or (divided and not local and not ray_numbers):
            self._group = reserve_together(assignment.bundles, resource, self._nodes)
        self._numbers: dict[int, int] = {}
        if divided and local:
            self._numbers = {device: device for device in range(assignment.devices)}
        elif divided and not ray_numbers:
            self._numbers = number_devices_by_machine(assignment.bundles, _machines(self._group))


def _plan_on_cluster(config: Config, backend: Backend, resource: str) -> tuple[list[ClusterNode], PlacementPlan]:
    """Return the nodes with free devices, and the plan on them.

    While too few are free but the cluster has more, it waits for ``_RELEASE_S`` at most: Ray frees the devices of an
    ended run a moment after its end. Raises ConfigError.
    """
    deadline_s = time.monotonic() + _RELEASE_S
    while True:
        nodes = free_nodes(resource)
        free = sum(node.devices for node in nodes)
        try:
            return nodes, plan_placement(config, backend, devices=free, one_machine=len(nodes) == 1)
        except ConfigError:
            existing = sum(int(node["Resources"].get(resource, 0)) for node in ray.nodes() if node["Alive"])
            if free >= existing or time.monotonic() > deadline_s:
                raise
        time.sleep(0.2)


def free_nodes(resource: str) -> list[ClusterNode]:
    """Return the cluster's nodes with free devices of the kind ``resource``."""
    free = available_resources_per_node()
    alive = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    nodes = [ClusterNode(address, int(free.get(key, {}).get(resource, 0)), key) for key, address in alive.items()]
    return [node for node in nodes if node.devices]


def reserve_together(bundles: list[tuple[int, ...]], resource: str, nodes: Mapping[int, ClusterNode]) -> Any:
    """Return a placement group of ``bundles``. Blocks until Ray has reserved it.

    Each bundle is on the node of its first device; without ``nodes`` anywhere. Raises ConfigError if Ray cannot reserve
    the group within ``RESERVE_TIMEOUT_S``.
    """
    on_nodes = [{_NODE_LABEL: nodes[devices[0]].node_id} for devices in bundles] if nodes else None
    group = ray.util.placement_group([{resource: len(devices)} for devices in bundles], bundle_label_selector=on_nodes)
    if not group.wait(RESERVE_TIMEOUT_S):
        ray.util.remove_placement_group(group)
        widest = max(len(devices) for devices in bundles)
        raise ConfigError(
            "the run's processes cannot be placed",
            why=f"Ray could not reserve devices for all {len(bundles)} in {RESERVE_TIMEOUT_S:g} s; the largest needs "
            f"{widest} on one machine",
            fix="reduce rollout.tensor_parallel to the number of free devices of one machine, or add machines",
        )
    return group


def _numbered_resources() -> list[str]:
    """Return the names of the resources for which Ray tells each worker the numbers of its devices."""
    return list(ray.get_runtime_context().get_accelerator_ids())


def _machines(group: Any) -> list[str]:
    """Return the machine of each bundle of a placement group."""
    nodes: dict[int, str] = ray.util.placement_group_table(group)["bundles_to_node_id"]
    return [nodes[index] for index in range(len(nodes))]
