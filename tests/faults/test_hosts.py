"""Runs on several hosts learn; one host is cut off, comes back, and dies: it is named, and no prompt is lost."""

from __future__ import annotations

import re
import statistics
import time

import pytest

from tests.faults.run_checks import check_accounts, name_end
from tests.support.host_network import HostNetwork, why_unavailable
from tests.support.host_run import (
    HostRun,
    actors_on,
    command_of,
    finish,
    ray_hosts,
    return_to_cluster,
    wait_until,
    wait_until_no_actors,
)
from tests.support.speed import slow

BATCH, CPUS, HEARTBEAT_S = 4, 3, slow(6)
WORDS = [
    "goals={}",
    f"train.batch_groups={BATCH}",
    "train.ranks=2",
    "train.max_restarts=6",
    "rollout.replicas=2",
    "rollout.max_restarts=12",
    "rollout.n=4",
    "rollout.max_running=16",
    f"rollout.group_timeout_s={slow(15)}",
    "async_training.staleness_threshold=1",
    f"weights.timeout_s={slow(5)}",
    "checkpoint.save_every_steps=4",
    "eval.every_steps=0",
    "eval.prompts=8",
    f"timeouts.heartbeat_s={HEARTBEAT_S}",
    f"timeouts.start_s={slow(60)}",
    f"timeouts.trainer_s={slow(30)}",
    f"timeouts.evaluation_s={slow(30)}",
]
DETECTED_S = slow(25.0)
"""The limit for the log line about a lost host: the heartbeats' time and Ray's, and two slow processors."""
CONTINUED_S = 900.0
LEARNING_STEPS = 100

pytestmark = [
    pytest.mark.extended,
    pytest.mark.long(120),
    pytest.mark.skipif(why_unavailable() is not None, reason=why_unavailable() or ""),
]


def test_a_run_on_two_hosts_loses_one_and_no_prompt() -> None:
    with ray_hosts(count=2, cpus=CPUS, prompts=600) as (network, work):
        run = HostRun(network.hosts[0], work, *WORDS, "train.steps=20000", **network.environment)
        try:
            run.wait_for_step(3)
            output = run.output()
            assert "weights travel by device" in output and "has no authentication" not in output
            assert all(actors_on(host) for host in network.hosts)
            assert any("ray::LedgerActor" in command_of(pid) for pid in actors_on(network.hosts[0]))
            _cut_for_a_moment(network, run)
            _cut_until_lost(network, run)
            _lose(network, run)
            again = finish(network, work, run, WORDS)
            assert name_end(130, run.output()) == "interrupted"
        except BaseException:
            print(run.output())
            raise
        finally:
            run.close()
        check_accounts(again.directory, steps=len(again.metrics()), batch=BATCH, max_staleness=1)
        wait_until_no_actors(network)


def _cut_for_a_moment(network: HostNetwork, run: HostRun) -> None:
    """Less than any limit: no process is replaced."""
    length = len(run.output())
    network.cut(network.hosts[1])
    time.sleep(2.0)  # the length of the fault
    network.join(network.hosts[1])
    _steps_follow(run)
    since = run.output()[length:]
    assert " ended (" not in since and "a trainer died" not in since


def _cut_until_lost(network: HostNetwork, run: HostRun) -> None:
    length = len(run.output())
    network.cut(network.hosts[1])
    took_s = _wait_for_loss(run, length)
    network.join(network.hosts[1])
    # Ray has given the node up meanwhile, or not yet: then it takes it back.
    return_to_cluster(network, network.hosts[1], cpus=CPUS)
    print(f"cut: detected after {took_s:.1f} s, next steps {_steps_follow(run):.1f} s after the return")


def _lose(network: HostNetwork, run: HostRun) -> None:
    wait_until(lambda: bool(actors_on(network.hosts[1])), timeout_s=600.0, otherwise=lambda: "host1 stays empty")
    length = len(run.output())
    network.hosts[1].halt()
    took_s = _wait_for_loss(run, length)
    return_to_cluster(network, network.hosts[1], cpus=CPUS)
    print(f"killed: detected after {took_s:.1f} s, next steps {_steps_follow(run):.1f} s after the return")


def _wait_for_loss(run: HostRun, length: int) -> float:
    """Wait until a log line names a process of host1 and its loss; return the seconds."""
    lost = re.compile(r"rollout replica-\d on host1 ended \(.+\)|a trainer died \(trainer rank \d on host1: .+\)")
    return wait_until(
        lambda: lost.search(run.output()[length:]) is not None,
        timeout_s=DETECTED_S,
        otherwise=lambda: f"host1 is not named:\n{run.output()[length:]}",
    )


def _steps_follow(run: HostRun) -> float:
    """Wait until a step has begun and ended; return the seconds."""
    step = int(run.metrics()[-1]["step"])
    return wait_until(
        lambda: bool(run.metrics()) and run.metrics()[-1]["step"] >= step + 2,
        timeout_s=CONTINUED_S,
        otherwise=lambda: "no step follows",
    )


@pytest.mark.parametrize("count", [2, 3])
def test_the_demo_learns_across_hosts(count: int) -> None:
    """With the demo's own settings but for the processes, which no single host has room for."""
    words = ["goals={}", "rollout.replicas=2", f"train.ranks={count}", f"train.steps={LEARNING_STEPS}"]
    quiet = ["eval.every_steps=0", "checkpoint.save_every_steps=0"]
    with ray_hosts(count=count, cpus=2, prompts=4096) as (network, work):
        run = HostRun(network.hosts[0], work, *words, *quiet, **network.environment)
        try:
            run.wait_for_step(1)
            assert all(actors_on(host) for host in network.hosts)
            assert run.wait(timeout_s=3000.0) == 0, run.output()
            assert "weights travel by device" in run.output()
        finally:
            run.close()
        rewards = [line["reward/mean"] for line in run.metrics()]
        assert len(rewards) == LEARNING_STEPS
        first, last = statistics.mean(rewards[:10]), statistics.mean(rewards[-10:])
        assert last > first + 0.15, f"the reward went from {first:.3f} to {last:.3f}"
        wait_until_no_actors(network)


def test_weights_in_host_memory_cannot_cross_hosts() -> None:
    with ray_hosts(count=2, cpus=2, prompts=64) as (network, work):
        run = HostRun(
            network.hosts[0], work, *WORDS, "train.steps=2", "weights.bypass_cpu=false", **network.environment
        )
        try:
            assert name_end(run.wait(timeout_s=600.0), run.output()) == "error"
            assert "weights cannot reach the other machines of this cluster" in run.output()
        finally:
            run.close()
