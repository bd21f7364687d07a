"""Reservations of devices on a real Ray cluster of several machines."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import ray
from ray.cluster_utils import Cluster

from hwrl.errors import ConfigError
from hwrl.run.cluster.devices import free_nodes, reserve_together
from hwrl.run.cluster.nodes import in_order, place_on_nodes
from hwrl.run.cluster.placement import assign_devices


@pytest.fixture(scope="module")
def two_machines() -> Iterator[None]:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "include_dashboard": False})
    cluster.add_node(num_cpus=4)
    ray.init(address=cluster.address, log_to_driver=False, configure_logging=False)
    yield
    ray.shutdown()
    cluster.shutdown()


@pytest.mark.filterwarnings("ignore")  # Ray's own warnings
def test_ranks_and_replicas_are_reserved_on_the_nodes_of_their_plan(two_machines: None) -> None:
    found = in_order(free_nodes("CPU"))
    assert [node.devices for node in found] == [4, 4]
    assignment = assign_devices(devices=8, ranks=4, replicas=1, width=4, may_share=True)
    nodes = place_on_nodes(assignment, found)
    group = reserve_together(assignment.bundles, "CPU", nodes=nodes)
    held = ray.util.placement_group_table(group)["bundles_to_node_id"]
    assert [held[bundle] for bundle in range(5)] == [found[0].number] * 4 + [found[1].number]
    assert free_nodes("CPU") == [], "all devices are reserved"
    ray.util.remove_placement_group(group)


@pytest.mark.filterwarnings("ignore")  # Ray's own warnings
def test_a_wide_replica_has_its_devices_on_one_machine_or_is_refused(two_machines: None) -> None:
    group = reserve_together([(0,), (1,), (2,), (3,), (4, 5, 6, 7)], "CPU")
    ray.util.remove_placement_group(group)
    with pytest.raises(ConfigError, match="the widest needs 5 on one machine"):
        reserve_together([(0,), (1, 2, 3, 4, 5)], "CPU", timeout_s=5.0)
    group = reserve_together([(0, 1, 2, 3), (4, 5, 6, 7)], "CPU")  # the refused group holds nothing
    ray.util.remove_placement_group(group)
