"""Each device of a run gets its node before anything starts."""

from __future__ import annotations

import pytest

from hwrl.errors import ConfigError
from hwrl.run.cluster.nodes import ClusterNode, in_order, place_on_nodes
from hwrl.run.cluster.placement import assign_devices


def placed(nodes: list[ClusterNode], *, shard_ranks: int | None = None, **wanted: int) -> list[str]:
    assignment = assign_devices(devices=sum(node.devices for node in nodes), may_share=True, **wanted)
    found = place_on_nodes(assignment, nodes, shard_ranks=shard_ranks)
    assert sorted(found) == list(range(assignment.devices))
    return [found[device].address for device in range(assignment.devices)]


def nodes(*devices: int) -> list[ClusterNode]:
    return [ClusterNode(f"10.0.0.{number}", count) for number, count in enumerate(devices)]


def test_nodes_are_sorted_by_address_as_numbers() -> None:
    addresses = ["10.0.0.10", "10.0.0.9", "node2", "10.0.0.9"]
    found = in_order([ClusterNode(address, 1, str(number)) for number, address in enumerate(addresses)])
    assert [node.address for node in found] == ["node2", "10.0.0.9", "10.0.0.9", "10.0.0.10"]
    assert [node.node_id for node in found[1:3]] == ["1", "3"]


def test_ranks_are_packed_node_by_node_and_replicas_follow() -> None:
    found = placed(nodes(2, 2, 2), ranks=3, replicas=3, tensor_parallel=1)
    assert found[:3] == ["10.0.0.0", "10.0.0.0", "10.0.0.1"]
    assert sorted(found[3:]) == ["10.0.0.1", "10.0.0.2", "10.0.0.2"]


def test_a_wide_replica_is_on_one_node() -> None:
    assert placed(nodes(8, 8), ranks=8, replicas=2, tensor_parallel=4) == ["10.0.0.0"] * 8 + ["10.0.0.1"] * 8
    assert placed(nodes(2, 4), ranks=2, replicas=1, tensor_parallel=4) == ["10.0.0.0"] * 2 + ["10.0.0.1"] * 4


def test_replicas_that_do_not_fit_after_the_ranks_come_first() -> None:
    found = placed(nodes(8, 8), ranks=4, replicas=2, tensor_parallel=6)
    assert found[:4] == ["10.0.0.0"] * 2 + ["10.0.0.1"] * 2, "the ranks take what is left, in order"
    assert len(set(found[4:10])) == len(set(found[10:])) == 1


def test_ranks_that_share_a_copy_of_the_model_are_on_one_node_if_one_has_room() -> None:
    found = placed(nodes(3, 4, 5), ranks=8, replicas=1, tensor_parallel=1, shard_ranks=4)
    assert found[:4] == ["10.0.0.1"] * 4 and found[4:8] == ["10.0.0.2"] * 4
    found = placed(nodes(3, 3), ranks=4, replicas=1, tensor_parallel=1, shard_ranks=4)
    assert found[:4] == ["10.0.0.0"] * 3 + ["10.0.0.1"], "no node has room for four"


def test_replicas_on_the_trainers_devices_need_no_further_ones() -> None:
    assert placed(nodes(1, 1), ranks=2, replicas=4, tensor_parallel=1) == ["10.0.0.0", "10.0.0.1"]


def test_a_cluster_of_the_wrong_shape_says_what_is_missing() -> None:
    with pytest.raises(ConfigError) as caught:
        placed(nodes(6, 6), ranks=4, replicas=1, tensor_parallel=8)
    said = str(caught.value)
    assert "each replica needs 8 free devices on one node" in said
    assert "12 devices are free on 2 node(s) (10.0.0.0: 6, 10.0.0.1: 6)" in said and "a node with 8 free ones" in said


def test_a_cluster_that_is_too_small_says_how_many_devices_are_missing() -> None:
    assignment = assign_devices(devices=8, ranks=4, replicas=2, tensor_parallel=2, may_share=True)
    with pytest.raises(ConfigError, match=r"(?s)8 devices are needed.*5 devices are free on 1 node.*add 3 device"):
        place_on_nodes(assignment, nodes(5))
