"""Decide which node of a cluster each device of a run is on. Needs no Ray."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from hwrl.errors import ConfigError
from hwrl.run.cluster.placement import DeviceAssignment, Reservation


@dataclass(frozen=True)
class ClusterNode:
    """A node of a cluster, with its ``address`` and so many free ``devices``. ``number`` is the cluster's own."""

    address: str
    devices: int
    node_id: str = ""


def in_order(nodes: Sequence[ClusterNode]) -> list[ClusterNode]:
    """Return ``nodes`` sorted by address, so that neighbours stay neighbours: 10.0.0.9 before 10.0.0.10.

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

    Trainer ranks are packed node by node, in rank order and in the order of addresses. The ``shard_ranks`` neighbours
    that share one copy of the model (None: all ranks) have one node if it has room for them. All devices of a replica
    are on one node. Replicas get their nodes before the ranks if they do not fit after them. Raises ConfigError, with
    the missing devices, if the nodes are too few or too small.
    """
    ordered = in_order(nodes)
    if sum(node.devices for node in ordered) < assignment.devices:
        raise _missing(assignment, ordered, f"{assignment.devices} devices are needed")
    for wide_first in (False, True):
        free = _FreeDevices(ordered)
        placed: dict[int, ClusterNode] = {}
        ranks = functools.partial(_place_ranks, assignment, free, placed, shard_ranks)
        replicas = functools.partial(_place_replicas, assignment, free, placed)
        if all(place() for place in ([replicas, ranks] if wide_first else [ranks, replicas])):
            return placed
    widest = max(len(one.devices) for one in assignment.replicas)
    raise _missing(assignment, ordered, f"each replica needs {widest} free devices on one node")


class _FreeDevices:
    """The free devices of each node."""

    def __init__(self, nodes: Sequence[ClusterNode]) -> None:
        self._left = {node: node.devices for node in nodes}

    def first(self, count: int) -> ClusterNode | None:
        """Return the first node with room for ``count`` devices."""
        return next((node for node, left in self._left.items() if left >= count), None)

    def tightest(self, count: int) -> ClusterNode | None:
        """Return the node with the least room that is enough, the last of several."""
        enough = [(left, -index, node) for index, (node, left) in enumerate(self._left.items()) if left >= count]
        return min(enough)[2] if enough else None

    def take(self, node: ClusterNode, count: int) -> None:
        """Use ``count`` devices of ``node``."""
        self._left[node] -= count


def _place_ranks(
    assignment: DeviceAssignment, free: _FreeDevices, placed: dict[int, ClusterNode], shard_ranks: int | None
) -> bool:
    ranks = assignment.ranks
    size = shard_ranks or len(ranks)
    for start in range(0, len(ranks), size):
        group = ranks[start : start + size]
        node = free.first(len(group))
        for one in group:
            own = node or free.first(1)
            if own is None:
                return False
            placed[one.devices[0]] = own
            free.take(own, 1)
    return True


def _place_replicas(assignment: DeviceAssignment, free: _FreeDevices, placed: dict[int, ClusterNode]) -> bool:
    ranks = {device for one in assignment.ranks for device in one.devices}
    for devices in dict.fromkeys(one.devices for one in assignment.replicas):
        new = [device for device in devices if device not in ranks and device not in placed]
        if not new:
            continue  # it shares devices that have their nodes
        node = free.tightest(len(new))
        if node is None:
            return False
        placed.update(dict.fromkeys(new, node))
        free.take(node, len(new))
    return True


def _missing(assignment: DeviceAssignment, nodes: Sequence[ClusterNode], why: str) -> ConfigError:
    width = _width(assignment.replicas)
    wanted = f"{len(assignment.ranks)} of the trainer (train.ranks)"
    if len(assignment.ranks) < assignment.devices:
        beside = assignment.devices - len(assignment.ranks)
        wanted += f" and {beside} of replicas (rollout.replicas={len(assignment.replicas)}"
        wanted += f" of rollout.tensor_parallel={width})" if width > 1 else ")"
    free = ", ".join(f"{node.address}: {node.devices}" for node in nodes)
    total = sum(node.devices for node in nodes)
    return ConfigError(
        "the run's processes cannot be placed on this cluster",
        why=f"{why}: {wanted}; {total} devices are free on {len(nodes)} node(s) ({free})",
        fix=f"add {max(1, assignment.devices - total)} device(s), or a node with {max(1, width)} free ones; or lower "
        "train.ranks, rollout.replicas or rollout.tensor_parallel",
    )


def _width(reservations: Sequence[Reservation]) -> int:
    return max((len(one.devices) for one in reservations), default=1)
