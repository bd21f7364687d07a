"""Reservations of devices on a real Ray cluster of several machines."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import ray
from ray.cluster_utils import Cluster

from hwrl.errors import ConfigError
from hwrl.run.cluster.devices import reserve_together


@pytest.fixture
def two_machines() -> Iterator[None]:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "include_dashboard": False})
    cluster.add_node(num_cpus=4)
    ray.init(address=cluster.address, log_to_driver=False, configure_logging=False)
    yield
    ray.shutdown()
    cluster.shutdown()


@pytest.mark.filterwarnings("ignore")  # Ray's own warnings
def test_a_wide_replica_has_its_devices_on_one_machine_or_is_refused(two_machines: None) -> None:
    group = reserve_together([(0,), (1,), (2,), (3,), (4, 5, 6, 7)], "CPU")
    ray.util.remove_placement_group(group)
    with pytest.raises(ConfigError, match="the widest needs 5 on one machine"):
        reserve_together([(0,), (1, 2, 3, 4, 5)], "CPU", timeout_s=5.0)
    group = reserve_together([(0, 1, 2, 3), (4, 5, 6, 7)], "CPU")  # the refused group holds nothing
    ray.util.remove_placement_group(group)
