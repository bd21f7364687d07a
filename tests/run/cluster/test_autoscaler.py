"""Ray's own autoscaler adds a node for a replica of ``hwrl scale``, and removes it after the replica has left.

Its nodes are those of Ray's fake provider: raylets on one host, which the autoscaler's monitor starts and ends.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from hwrl.run.demo import write_demo
from tests.faults.run_checks import check_accounts
from tests.support.host_network import PORT, RAY, HostNetwork, NetworkHost, why_unavailable
from tests.support.host_run import HostRun, command_of, stop_driver, wait_until
from tests.support.train_run import HWRL

_BATCH = 4
_HEAD = "f" * 51 + "00000"
"""The fake provider takes the head for this node."""
_OBJECTS = {"object_store_memory": 80_000_000}
_CLUSTER = {
    "cluster_name": "fake", "max_workers": 2, "upscaling_speed": 1.0, "idle_timeout_minutes": 0.5, "auth": {},
    "docker": {}, "provider": {"type": "fake_multinode", "use_node_id_as_ip": True},
    "available_node_types": {
        "ray.head.default": {"resources": {"CPU": 2}, "node_config": {}, "max_workers": 0},
        "worker": {"resources": {"CPU": 1, **_OBJECTS}, "node_config": {}, "min_workers": 0, "max_workers": 2},
    },
    "head_node_type": "ray.head.default", "file_mounts": {}, "cluster_synced_files": [], "initialization_commands": [],
    "setup_commands": [], "head_setup_commands": [], "worker_setup_commands": [], "head_start_ray_commands": [],
    "worker_start_ray_commands": [],
}  # fmt: skip

pytestmark = [
    pytest.mark.extended,
    pytest.mark.long(60),
    pytest.mark.skipif(why_unavailable() is not None, reason=why_unavailable() or ""),
]


@pytest.fixture
def cluster() -> Iterator[tuple[HostNetwork, Path]]:
    """A host whose Ray has two CPUs and an autoscaler, and a directory with the demo that the host sees."""
    with tempfile.TemporaryDirectory(prefix="h") as directory:
        work = Path(directory)
        write_demo(work, seed=1, prompts=600)
        (work / "cluster.json").write_text(json.dumps(_CLUSTER))
        with HostNetwork(work / "hosts", count=1, shared=[work]) as hosts:
            head = hosts.hosts[0]
            head.run(
                *RAY, "start", "--head", f"--port={PORT}", "--include-dashboard=false", "--disable-usage-stats",
                f"--node-ip-address={head.address}", "--num-cpus=2",
                f"--object-store-memory={_OBJECTS['object_store_memory']}",
                f"--autoscaling-config={work / 'cluster.json'}",
                timeout_s=900.0,
                env={
                    **hosts.environment, "RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1",
                    "RAY_OVERRIDE_NODE_ID_FOR_TESTING": _HEAD,
                },
            )  # fmt: skip
            yield hosts, work


def _nodes(host: NetworkHost) -> int:
    return sum("raylet/raylet " in command_of(pid) for pid in host.processes())


def test_a_replica_gets_a_node_from_the_autoscaler_and_gives_it_back(cluster: tuple[HostNetwork, Path]) -> None:
    network, work = cluster
    [host] = network.hosts
    words = [
        "goals={}", "train.steps=20000", f"train.batch_groups={_BATCH}", "rollout.n=4", "rollout.max_running=16",
        "eval.every_steps=0", "checkpoint.save_every_steps=0",
    ]  # fmt: skip
    run = HostRun(host, work, *words, **network.environment)
    try:
        run.wait_for_step(3)
        assert _nodes(host) == 1
        assert "until Ray has devices" in host.run(HWRL, "scale", str(run.directory), "--replicas", "2")
        run.wait_for_output("rollout replica-1 joined")
        assert _nodes(host) == 2, "the autoscaler has added one"
        run.wait_for_step(int(run.metrics()[-1]["step"]) + 5)
        assert run.metrics()[-1]["sync/receivers"] == 2.0
        host.run(HWRL, "scale", str(run.directory), "--replicas", "1")
        run.wait_for_output(" left (")
        wait_until(lambda: _nodes(host) == 1, timeout_s=1200.0, otherwise=lambda: "the idle node is still there")
        run.wait_for_step(int(run.metrics()[-1]["step"]) + 5)
        stop_driver(network)
        assert run.wait() == 130
    except BaseException:
        print(run.output())
        raise
    finally:
        run.close()
    check_accounts(run.directory, steps=len(run.metrics()), batch=_BATCH, max_staleness=2, under_way=8 * _BATCH)
