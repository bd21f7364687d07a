"""Reservations of devices on a real Ray cluster of several machines."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import ray
from ray.cluster_utils import Cluster

from hwrl.discovery import get_backend
from hwrl.errors import ConfigError
from hwrl.run.cluster.devices import RunDevices, free_nodes, reserve_together
from hwrl.run.cluster.nodes import in_order, place_on_nodes
from hwrl.run.cluster.placement import assign_devices
from tests.support.run_config import config_of

pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own warnings


@pytest.fixture(scope="module")
def two_machines() -> Iterator[Cluster]:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "include_dashboard": False})
    cluster.add_node(num_cpus=4)
    ray.init(address=cluster.address, log_to_driver=False, configure_logging=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def test_ranks_and_replicas_are_reserved_on_the_nodes_of_their_plan(two_machines: Cluster) -> None:
    found = in_order(free_nodes("CPU"))
    assert [node.devices for node in found] == [4, 4]
    assignment = assign_devices(devices=8, ranks=4, replicas=1, tensor_parallel=4, may_share=True)
    nodes = place_on_nodes(assignment, found)
    group = reserve_together(assignment.bundles, "CPU", nodes)
    held = ray.util.placement_group_table(group)["bundles_to_node_id"]
    assert [held[bundle] for bundle in range(5)] == [found[0].node_id] * 4 + [found[1].node_id]
    assert free_nodes("CPU") == [], "all devices are reserved"
    ray.util.remove_placement_group(group)


def test_a_wide_replica_has_its_devices_on_one_machine_or_is_refused(
    two_machines: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = reserve_together([(0,), (1,), (2,), (3,), (4, 5, 6, 7)], "CPU", {})
    ray.util.remove_placement_group(group)
    monkeypatch.setattr("hwrl.run.cluster.devices.RESERVE_TIMEOUT_S", 5.0)
    with pytest.raises(ConfigError, match="the largest needs 5 on one machine"):
        reserve_together([(0,), (1, 2, 3, 4, 5)], "CPU", {})
    group = reserve_together([(0, 1, 2, 3), (4, 5, 6, 7)], "CPU", {})  # the refused group holds nothing
    ray.util.remove_placement_group(group)


def test_a_run_waits_for_the_devices_that_an_ended_one_gives_back(
    two_machines: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", two_machines.address)
    config = config_of(train={"ranks": 6}, rollout={"engine": "other"})
    group = reserve_together([(0,), (1,), (2,), (3,), (4, 5)], "CPU", {})
    while sum(node.devices for node in free_nodes("CPU")) != 2:  # Ray shows it a moment later
        time.sleep(0.05)
    end = threading.Timer(1.0, ray.util.remove_placement_group, [group])
    end.start()
    try:
        devices = RunDevices(config, get_backend())
    finally:
        end.join()
    assert len(devices.ranks) == 6
    devices.close()


def test_a_process_of_a_lost_node_gets_free_devices_of_another(
    two_machines: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last test here: it ends the second node."""
    monkeypatch.setenv("RAY_ADDRESS", two_machines.address)
    config = config_of(rollout={"engine": "other", "replicas": 3, "tensor_parallel": 2})
    while ray.available_resources().get("CPU", 0) < 8:  # Ray frees the groups of the other tests a moment later
        time.sleep(0.05)
    devices = RunDevices(config, get_backend())
    before = [devices.ray_options(f"replica-{index}") for index in range(3)]
    assert all(options["num_cpus"] == 2 and "scheduling_strategy" in options for options in before)
    while ray.available_resources().get("CPU", 0) >= 2:  # it also shows a reservation a moment later
        time.sleep(0.05)
    devices.add_replica("replica-3")
    assert [devices.may_wait(f"replica-{index}") for index in range(4)] == [False, False, False, True]
    assert devices.count_waiting(["replica-0", "replica-3"]) == 1, "replica-0 has its reservation"
    two_machines.remove_node(two_machines.list_all_nodes()[1], allow_graceful=False)
    while sum(node["Alive"] for node in ray.nodes()) > 1:  # Ray notices it a moment later
        time.sleep(0.05)
    after = [devices.ray_options(f"replica-{index}") for index in range(3)]
    moved = [options for options in after if "scheduling_strategy" not in options]
    assert moved in ([{"num_cpus": 2}], [{"num_cpus": 2}] * 2), "one replica was on it, or two: the nodes have no order"
    assert [devices.may_wait(f"replica-{index}") for index in range(3)] == [one in moved for one in after]
    devices.close()
