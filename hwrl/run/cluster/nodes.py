"""Decide which node of a cluster each device of a run is on. Needs no Ray."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from hwrl.errors import ConfigError
from hwrl.run.cluster.placement import DeviceAssignment


@dataclass(frozen=True)
class ClusterNode:
    """A node of a cluster: its address, its number of free ``devices``, and the id that the cluster gave it."""

    address: str
    devices: int
    node_id: str = ""


def in_order(nodes: Sequence[ClusterNode]) -> list[ClusterNode]:
    """Return ``nodes`` sorted by address, with numbers compared as numbers: 10.0.0.9 comes before 10.0.0.10.

    >>> [node.address for node in in_order([ClusterNode("10.0.0.10", 8), ClusterNode("10.0.0.9", 8)])]
    ['10.0.0.9', '10.0.0.10']
    """

    def key(node: ClusterNode) -> tuple[list[tuple[int, str]], str]:
        parts = re.findall(r"\d+|\D+", node.address)
        return [(int(part), "") if part.isdigit() else (-1, part) for part in parts], node.node_id

    return sorted(nodes, key=key)


def place_on_nodes(
    assignment: DeviceAssignment, nodes: Sequence[ClusterNode], *, shard_ranks: int | None = None
) -> dict[int, ClusterNode]:
    """Return the node of each device of the run.

    Trainer ranks fill one node after another, in rank order and in the order of addresses. ``shard_ranks`` neighbouring
    ranks share one copy of the model (None: all ranks do), and are on the same node if one has room for them. All
    devices of a replica are on the same node. If the replicas do not fit after the ranks, they are placed first. Raises
    ConfigError with the missing devices if there are too few nodes, or if they are too small.
    """
    ordered = in_order(nodes)
    if sum(node.devices for node in ordered) < assignment.devices:
        raise _missing(assignment, ordered, f"{assignment.devices} devices are needed")
    for order in ([_place_ranks, _place_replicas], [_place_replicas, _place_ranks]):
        free = {node: node.devices for node in ordered}
        placed: dict[int, ClusterNode] = {}
        if all(place(assignment, free, placed, shard_ranks or len(assignment.ranks)) for place in order):
            return placed
    widest = max(len(reservation.devices) for reservation in assignment.replicas)
    raise _missing(assignment, ordered, f"each replica needs {widest} free devices on one node")


def _place_ranks(
    assignment: DeviceAssignment, free: dict[ClusterNode, int], placed: dict[int, ClusterNode], size: int
) -> bool:
    """Place groups of ``size`` ranks, each on the first node with room for it, or rank by rank."""
    for start in range(0, len(assignment.ranks), size):
        group = assignment.ranks[start : start + size]
        room = next((node for node, count in free.items() if count >= len(group)), None)
        for reservation in group:
            node = room or next((node for node, count in free.items() if count), None)
            if node is None:
                return False
            placed[reservation.devices[0]] = node
            free[node] -= 1
    return True


def _place_replicas(
    assignment: DeviceAssignment, free: dict[ClusterNode, int], placed: dict[int, ClusterNode], size: int
) -> bool:
    """Place each replica on the node with the fewest free devices that are enough; of equal nodes on the last one."""
    ranks = {device for reservation in assignment.ranks for device in reservation.devices}
    for devices in dict.fromkeys(reservation.devices for reservation in assignment.replicas):
        new = [device for device in devices if device not in ranks and device not in placed]
        if not new:
            continue  # it shares devices that are already placed
        enough = [(count, -index, node) for index, (node, count) in enumerate(free.items()) if count >= len(new)]
        if not enough:
            return False
        node = min(enough)[2]
        placed.update(dict.fromkeys(new, node))
        free[node] -= len(new)
    return True


def _missing(assignment: DeviceAssignment, nodes: Sequence[ClusterNode], why: str) -> ConfigError:
    width = max((len(reservation.devices) for reservation in assignment.replicas), default=1)
    wanted = f"{len(assignment.ranks)} for the trainer (train.ranks)"
    if len(assignment.ranks) < assignment.devices:
        for_replicas = assignment.devices - len(assignment.ranks)
        wanted += f" and {for_replicas} for replicas (rollout.replicas={len(assignment.replicas)}"
        wanted += f" of rollout.tensor_parallel={width})" if width > 1 else ")"
    free_devices = ", ".join(f"{node.address}: {node.devices}" for node in nodes)
    total = sum(node.devices for node in nodes)
    return ConfigError(
        "the run's processes cannot be placed on this cluster",
        why=f"{why}: {wanted}; {total} devices are free on {len(nodes)} node(s) ({free_devices})",
        fix=f"add {max(1, assignment.devices - total)} device(s), or a node with {max(1, width)} free ones; or lower "
        "train.ranks, rollout.replicas or rollout.tensor_parallel",
    )
