"""Typed handles of a run's actors: one class per actor, one method per remote call.

Each method sends a call and returns an :class:`~hwrl.run.processes.answers.Answer` at once. An answer may be an
argument of another call: Ray then moves the value between the processes without the driver.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from hwrl.interfaces import PromptGroup
from hwrl.rollout import PromptLease
from hwrl.run.cluster.placement import DeviceReport
from hwrl.run.config import Config
from hwrl.run.processes.actors import (
    BatchInfo,
    ForgottenReplica,
    HeartbeatReply,
    LedgerActor,
    ProcessSetup,
    RestoredRun,
    RolloutActor,
    StepOutcome,
    TrainActor,
)
from hwrl.run.processes.answers import Answer
from hwrl.run.report.records import Metrics

if TYPE_CHECKING:
    from hwrl.rollout import Evaluation
    from hwrl.weights import TransportName

_HEARTBEAT_GROUP = "heartbeat"
"""A concurrency group of Ray with its own thread: an actor answers ``ping`` while another call runs."""


class ActorHandle:
    """The handle of one actor: creating it starts the actor's process. ``options`` are Ray's options for the actor."""

    def __init__(self, actor_class: type, *arguments: Any, **options: Any) -> None:
        remote_class = ray.remote(concurrency_groups={_HEARTBEAT_GROUP: 1})(actor_class)
        self._actor: Any = remote_class.options(**options).remote(*arguments)

    def ping(self) -> Answer[HeartbeatReply]:
        """Send a heartbeat."""
        return _send(self._actor.ping.options(concurrency_group=_HEARTBEAT_GROUP))

    def pid(self) -> Answer[int]:
        """Return the process id of the actor on its machine."""
        return _send(self._actor.__ray_call__, _pid)

    def kill(self) -> None:
        """Kill the process. If it is frozen, Ray takes a few seconds."""
        ray.kill(self._actor)


class TrainerHandle(ActorHandle):
    """The handle of one trainer rank: see :class:`~hwrl.run.processes.actors.TrainActor`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(TrainActor, **options)

    def set_up(
        self, setup: ProcessSetup, *, rank: int, incarnation: int, transport: TransportName, senders: int
    ) -> Answer[DeviceReport | None]:
        """Build the rank; the answer reports the device that it really uses."""
        sending = {"transport": transport, "senders": senders}
        return _send(self._actor.set_up, setup, rank=rank, incarnation=incarnation, **sending)

    def restore(self) -> Answer[RestoredRun | None]:
        """Load the newest checkpoint; the answer is None if there is none."""
        return _send(self._actor.restore)

    def send_weights(self) -> Answer[None]:
        """Send the current weights to the replicas."""
        return _send(self._actor.send_weights)

    def publish_last_weights(self) -> Answer[None]:
        """Send the current weights as a further version, after the last step."""
        return _send(self._actor.publish_last_weights)

    def new_receivers(self) -> Answer[tuple[str, ...]]:
        """Return the replicas that connected after the newest weights were sent. Call it on rank 0 only."""
        return _send(self._actor.new_receivers)

    def step(self, groups: Answer[list[PromptGroup]]) -> Answer[StepOutcome]:
        """Train one step and send the weights if they are due."""
        return _send(self._actor.step, groups)

    def finished_step(self) -> Answer[int | None]:
        """Return the step whose result the rank has; None if it has changed its models only in part since then."""
        return _send(self._actor.finished_step)

    def finish_profile(self) -> Answer[str | None]:
        """Write the profile if steps are recorded; the answer is a message for the log, or None."""
        return _send(self._actor.finish_profile)

    def save(self, ledger: dict[str, Any]) -> Answer[Metrics]:
        """Save a checkpoint with the ledger's state; the answer has the seconds that the trainer waited for it."""
        return _send(self._actor.save, ledger)

    def export_model(self) -> Answer[None]:
        """Write the trained model to the run directory."""
        return _send(self._actor.export_model)

    def close(self) -> Answer[None]:
        """Wait for a save in the background and close all connections."""
        return _send(self._actor.close)


class ReplicaHandle(ActorHandle):
    """The handle of one rollout replica: see :class:`~hwrl.run.processes.actors.RolloutActor`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(RolloutActor, max_concurrency=4, **options)

    def set_up(
        self, setup: ProcessSetup, *, replica: str, replica_id: str, seed: int, ledger: LedgerHandle
    ) -> Answer[DeviceReport | None]:
        """Build the replica; the answer reports the devices that it really uses."""
        return _send(self._actor.set_up, setup, replica=replica, replica_id=replica_id, seed=seed, ledger=ledger)

    def run(self) -> Answer[None]:
        """Roll out until :meth:`stop` or the end of :meth:`leave`. The answer is ready when the replica has ended."""
        return _send(self._actor.run)

    def evaluate(self, part: int, parts: int, *, alone: bool) -> Answer[Evaluation | None]:
        """Evaluate on part ``part`` of ``parts`` parts of the prompts; the answer is None if the part is empty."""
        return _send(self._actor.evaluate, part, parts, alone=alone)

    def leave(self) -> Answer[None]:
        """Make :meth:`run` end when all leased prompts are finished."""
        return _send(self._actor.leave)

    def stop(self) -> Answer[None]:
        """Make :meth:`run` end after its current turn."""
        return _send(self._actor.stop)


class LedgerHandle(ActorHandle):
    """The handle of the ledger: see :class:`~hwrl.run.processes.actors.LedgerActor`. Replicas use it as well.

    The ledger runs on the driver's machine. A ``replica_id`` names one process of a replica; its replacement has
    another id.
    """

    def __init__(self, config: Config) -> None:
        # If the driver's machine is lost, the run ends anyway. On another machine, the ledger's loss would also end it.
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        super().__init__(LedgerActor, config, num_cpus=0, scheduling_strategy=here)

    def lease(self, count: int, replica_id: str) -> Answer[list[PromptLease]]:
        """Request leases of up to ``count`` sequence numbers for a replica."""
        return _send(self._actor.lease, count, replica_id)

    def complete(self, groups: Sequence[PromptGroup], replica_id: str, stats: dict[str, float]) -> Answer[None]:
        """Hand in a replica's finished groups and its running totals."""
        return _send(self._actor.complete, groups, replica_id, stats)

    def fail(self, lease: PromptLease, reason: str) -> Answer[None]:
        """Report a failed attempt at a prompt."""
        return _send(self._actor.fail, lease, reason)

    def renew(self, leases: Sequence[PromptLease], replica_id: str) -> Answer[None]:
        """Report a replica's progress on ``leases``."""
        return _send(self._actor.renew, leases, replica_id)

    def forget(self, replica_id: str) -> Answer[ForgottenReplica]:
        """Make all prompts of a dead replica free for others."""
        return _send(self._actor.forget, replica_id)

    def expire_overdue(self) -> Answer[list[str]]:
        """Make prompts without progress free for others; the answer has the ids of the replicas that had them."""
        return _send(self._actor.expire_overdue)

    def advance_and_take(self, count: int, version: int) -> tuple[Answer[list[PromptGroup]], Answer[BatchInfo | None]]:
        """Tell the ledger the newest published ``version``, and request a batch of ``count`` groups.

        The two answers are the groups and their description. The driver reads only the second one.
        """
        groups, info = self._actor.advance_and_take.options(num_returns=2).remote(count, version)
        return groups, info

    def abandon_take(self) -> Answer[None]:
        """End a waiting :meth:`advance_and_take`. Its description is then None."""
        return _send(self._actor.abandon_take)

    def load_state_dict(self, state: dict[str, Any], incarnation: int) -> Answer[None]:
        """Restore the state of a checkpoint, for a new incarnation of the trainer."""
        return _send(self._actor.load_state_dict, state, incarnation)


def _pid(actor: object) -> int:
    return os.getpid()


def _send(method: Any, *arguments: Any, **keywords: Any) -> Answer[Any]:
    answer: Answer[Any] = method.remote(*arguments, **keywords)
    return answer
