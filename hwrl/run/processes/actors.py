"""The three kinds of processes of a run. Ray makes actors of these classes.

This module imports no torch: each process first chooses the driver's backend, and imports torch after that.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from hwrl.discovery import get_backend, set_backend
from hwrl.errors import HwrlError
from hwrl.interfaces import PromptGroup, Span
from hwrl.lazy import large_imports
from hwrl.rollout import PromptLease, PromptLedger, UntrainedPrompts, has_variance
from hwrl.run.cluster.placement import (
    DeviceReport,
    ProcessDevices,
    check_devices,
    has_devices,
    make_device_report,
    make_visible,
)
from hwrl.run.config import Config
from hwrl.run.identity import RunInputs
from hwrl.run.report.records import Metrics
from hwrl.run.report.samples import Sample

if TYPE_CHECKING:
    from hwrl.rollout import Evaluation, Rollouter
    from hwrl.run.processes.handles import LedgerHandle
    from hwrl.run.processes.trainer_rank import TrainerRank
    from hwrl.weights import TransportName

LEASE_WAIT_S = 1.0
"""How long the ledger waits for free prompts before it answers a request with none."""


def end_at_sigterm() -> None:
    """Let SIGTERM end this process at once, so that the driver sees a death.

    Ray's handler ends only the main thread. A loop in another thread would continue, and the actor would answer no
    call. Ray runs the ``__init__`` of a synchronous actor in the main thread. Remove this when Ray ends such an actor.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


@dataclass(frozen=True)
class HeartbeatReply:
    """The answer to a heartbeat: the name of the process's machine, and the seconds in the present turn of its loop."""

    host: str
    turn_s: float = 0.0


@dataclass(frozen=True)
class ProcessSetup:
    """The settings that each trainer rank and each replica needs to start."""

    config: Config
    inputs: RunInputs
    backend: str
    devices: ProcessDevices
    store_address: str = field(repr=False)  # it holds the store's key


@dataclass(frozen=True)
class BatchInfo:
    """The description of a batch: its prompts, the ledger's counts, and the running totals of each replica.

    ``untrained`` has the prompts that were filtered or have failed since the batch before. ``spans`` has
    those of each traced prompt by its sequence number.
    """

    sequence_numbers: list[int]
    counts: dict[str, int]
    replicas: dict[str, dict[str, float]]
    untrained: UntrainedPrompts = field(default_factory=UntrainedPrompts)
    spans: dict[int, tuple[Span, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class StepOutcome:
    """A training step: its metrics, and from rank 0 a few of its trajectories as text."""

    metrics: Metrics
    samples: list[Sample]


@dataclass(frozen=True)
class RestoredRun:
    """The contents of a checkpoint for the driver.

    ``skipped`` has the path of each damaged checkpoint with the reason, ``changed`` a sentence for each changed input.
    """

    step: int
    ledger: dict[str, Any]
    skipped: list[tuple[str, str]]
    changed: list[str]


# -- the ledger -----------------------------------------------------------------------------------------------------


EMPTY_LEDGER: dict[str, Any] = {"version": 0, "trained": 0, "next": 0, "owed": []}
"""The ledger's state before the first prompt."""


def make_ledger(config: Config) -> PromptLedger:
    """Return the prompt ledger of a run."""
    return PromptLedger(
        groups_per_version=config.groups_per_version,
        max_staleness=config.async_training.staleness_threshold,
        total_groups=config.train.steps * config.train.batch_groups,
        group_timeout_s=config.rollout.group_timeout_s,
        max_attempts=config.rollout.max_attempts,
        max_skipped_in_a_row=config.rollout.max_skipped_in_a_row if config.rollout.on_failure == "skip" else 0,
        teaches=has_variance if config.algorithm.filter_groups else None,
        max_filtered_in_a_row=config.algorithm.max_filtered_in_a_row,
    )


class ForgottenReplica(NamedTuple):
    """A dead replica: the number of its prompts that go to others, and whether it had handed in a prompt."""

    lost: int
    had_finished: bool


class LedgerActor:
    """Serves the prompt ledger to the replicas and the driver. A request waits until the ledger can answer it.

    A ``replica_id`` names one life of a replica, like ``replica-0#3``; its replacement has another one. After
    ``forget``, the ledger ignores it.
    """

    def __init__(self, config: Config) -> None:
        self._ledger = make_ledger(config)
        self._replica_totals: dict[str, dict[str, float]] = {}
        self._forgotten: set[str] = set()
        self._asleep: frozenset[str] = frozenset()
        self._takes_abandoned = 0
        self._fatal: HwrlError | None = None
        self._changed = asyncio.Condition()

    async def ping(self) -> HeartbeatReply:
        """Answer a heartbeat."""
        return HeartbeatReply(socket.gethostname())

    async def lease(self, count: int, replica_id: str) -> list[PromptLease]:
        """Lend up to ``count`` prompts to a replica. Waits up to ``LEASE_WAIT_S`` for the first one."""
        async with self._changed:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait_for(lambda: self._may_lease(replica_id)), LEASE_WAIT_S)
            if replica_id in self._forgotten or replica_id in self._asleep:
                return []
            return self._ledger.lease(count, replica=replica_id, now_s=time.monotonic())

    def _may_lease(self, replica_id: str) -> bool:
        return replica_id not in self._asleep and bool(self._ledger.capacity())

    async def set_throttle(self, lead_groups: int | None, asleep: Sequence[str]) -> None:
        """Admit at most ``lead_groups`` groups beyond the present version's, and lease none to ``asleep`` replicas."""
        async with self._changed:
            self._ledger.lead_groups, self._asleep = lead_groups, frozenset(asleep)
            self._changed.notify_all()

    async def complete(self, groups: Sequence[PromptGroup], replica_id: str, stats: dict[str, float]) -> None:
        """Accept finished groups, and the running totals of their replica."""
        async with self._changed:
            if replica_id in self._forgotten:
                return
            self._replica_totals[replica_id] = stats
            for group in groups:
                with self._fatal_errors():
                    self._ledger.complete(group)
            self._changed.notify_all()

    async def fail(self, lease: PromptLease, reason: str) -> None:
        """Put a prompt back, or give it up. If it may not be given up, the next ``take`` raises."""
        async with self._changed:
            with self._fatal_errors():
                self._ledger.fail(lease, reason=reason)
            self._changed.notify_all()

    @contextlib.contextmanager
    def _fatal_errors(self) -> Iterator[None]:
        try:
            yield
        except HwrlError as exc:
            self._fatal = exc

    async def renew(self, leases: Sequence[PromptLease], replica_id: str) -> None:
        """Note that a replica has made progress on ``leases``."""
        if replica_id not in self._forgotten:
            self._ledger.renew(leases, now_s=time.monotonic())

    async def forget(self, replica_id: str) -> ForgottenReplica:
        """Put back all prompts of a dead replica."""
        async with self._changed:
            self._forgotten.add(replica_id)
            lost = self._ledger.forget_replica(replica_id)
            totals = self._replica_totals.pop(replica_id, None)
            self._changed.notify_all()
            return ForgottenReplica(lost, had_finished=totals is not None)

    async def expire_overdue(self) -> list[str]:
        """Put back the prompts without progress; return the ids of the replicas that held them."""
        async with self._changed:
            replica_ids = self._ledger.expire(time.monotonic())
            self._changed.notify_all()
            return replica_ids

    async def advance_and_take(self, count: int, version: int) -> tuple[list[PromptGroup], BatchInfo | None]:
        """Note that ``version`` is published. Then return a batch as soon as the staleness rules allow one.

        After ``abandon_take`` a waiting call returns nothing, and the ledger keeps its groups.
        """
        async with self._changed:
            self._ledger.advance(version)
            self._changed.notify_all()
            abandoned = self._takes_abandoned
            while (groups := self._take_now(count)) is None:
                await self._changed.wait()
                if self._takes_abandoned != abandoned:
                    return [], None
            numbers = [group.sequence_number for group in groups]
            untrained, counts = self._ledger.take_untrained(), asdict(self._ledger.counts())
            spans = {group.sequence_number: group.spans for group in groups if group.spans}
            return groups, BatchInfo(numbers, counts, dict(self._replica_totals), untrained, spans)

    def _take_now(self, count: int) -> list[PromptGroup] | None:
        if self._fatal is not None:
            raise self._fatal
        return self._ledger.take(count)

    async def abandon_take(self) -> None:
        """End a waiting ``take`` with nothing. (Ray cannot cancel a call; it can only forget its answer.)"""
        async with self._changed:
            self._takes_abandoned += 1
            self._changed.notify_all()

    async def state_dict(self) -> dict[str, Any]:
        """Return the ledger's state for a checkpoint."""
        return self._ledger.state_dict()

    async def load_state_dict(self, state: dict[str, Any], incarnation: int) -> None:
        """Continue from a checkpoint with this incarnation of the trainer. Ends all leases, and a waiting ``take``."""
        async with self._changed:
            self._takes_abandoned += 1
            self._ledger.load_state_dict(state, incarnation=incarnation)
            self._changed.notify_all()


class ReplicaLedger:
    """The ledger for the rollouter of one replica, in another process."""

    def __init__(self, ledger: LedgerHandle, *, replica_id: str) -> None:
        self._ledger, self._replica_id = ledger, replica_id

    def lease(self, count: int) -> Future[list[PromptLease]]:
        """Request prompts."""
        return self._ledger.lease(count, self._replica_id).future()

    def complete(self, groups: Sequence[PromptGroup], stats: dict[str, float]) -> None:
        """Hand in finished groups."""
        self._ledger.complete(groups, self._replica_id, stats)

    def fail(self, lease: PromptLease, reason: str) -> None:
        """Report a failed prompt."""
        self._ledger.fail(lease, reason)

    def renew(self, leases: Sequence[PromptLease]) -> None:
        """Report progress."""
        self._ledger.renew(leases, self._replica_id)


# -- devices of a process -------------------------------------------------------------------------------------------


def _use_devices(setup: ProcessSetup, *, threads: int) -> tuple[int, ...]:
    """Choose the driver's backend, and make this process use its devices; return their indices in this process."""
    set_backend(setup.backend)
    own = make_visible(setup.devices, get_backend().devices, os.environ)  # vendors' libraries read it on first use
    from hwrl.run.processes.build import prepare_process

    check_devices(setup.devices, own, get_backend(), os.environ)
    prepare_process(threads=threads, device=own[0])
    return own


def _report_devices(devices: Sequence[int]) -> DeviceReport | None:
    return make_device_report(devices, get_backend()) if has_devices(get_backend()) else None


# -- a replica ------------------------------------------------------------------------------------------------------


class RolloutActor:
    """One rollout replica: ``set_up``, then ``run``, which needs its own thread until ``stop``."""

    def __init__(self) -> None:
        end_at_sigterm()
        self._stop = threading.Event()
        self._rollouter: Rollouter | None = None

    def ping(self) -> HeartbeatReply:
        """Answer a heartbeat."""
        return HeartbeatReply(socket.gethostname(), 0.0 if self._rollouter is None else self._rollouter.step_s())

    def set_up(
        self, setup: ProcessSetup, *, replica: str, replica_id: str, seed: int, ledger: LedgerHandle
    ) -> DeviceReport | None:
        """Build the replica, which then waits for weights; return its devices.

        ``replica`` is its name, which a replacement gets too. The ledger knows it by ``replica_id``.

        This is no part of ``__init__``, because Ray reports errors of an actor's ``__init__`` poorly.
        """
        with large_imports():
            self._devices = _use_devices(setup, threads=setup.config.rollout.threads)
            from hwrl.run.processes.build import build_rollouter
            from hwrl.run.processes.prompts import evaluation_prompts

        with setup.inputs.unchanged("rollout"), get_backend().allocating("the rollout engine"):
            self._evaluation_prompts = evaluation_prompts(setup.config, setup.inputs)
            self._rollouter = build_rollouter(
                setup.config,
                inputs=setup.inputs,
                replica=replica,
                seed=seed,
                store_address=setup.store_address,
                ledger=ReplicaLedger(ledger, replica_id=replica_id),
            )  # last: it joins the link of weights, and then a sender waits for `run`
        return _report_devices(self._devices)

    def run(self) -> None:
        """Roll out until ``stop``."""
        assert self._rollouter is not None, "set_up comes first"
        get_backend().set_device(self._devices[0])  # per thread, and set_up ran in another one
        with get_backend().allocating("generating responses"):
            self._rollouter.run(self._stop)

    def evaluate(self, part: int, parts: int) -> Evaluation | None:
        """Evaluate the weights of the moment in which the evaluation begins, on one of ``parts`` parts of the prompts.

        Returns None if the part has no prompts.
        """
        assert self._rollouter is not None, "set_up comes first"
        prompts = self._evaluation_prompts[part::parts]
        return self._rollouter.evaluate(prompts).result() if prompts else None

    def leave(self) -> None:
        """Make ``run`` return when the leased prompts are finished."""
        assert self._rollouter is not None, "set_up comes first"
        self._rollouter.leave()

    def stop(self) -> None:
        """Make ``run`` return."""
        self._stop.set()


# -- a trainer rank -------------------------------------------------------------------------------------------------


class TrainActor:
    """One trainer rank: ``set_up``, then calls of :class:`~hwrl.run.processes.trainer_rank.TrainerRank`."""

    def __init__(self) -> None:
        end_at_sigterm()

    def ping(self) -> HeartbeatReply:
        """Answer a heartbeat. It does not measure calls: ``timeouts.trainer_s`` limits them."""
        return HeartbeatReply(socket.gethostname())

    def set_up(
        self, setup: ProcessSetup, *, rank: int, incarnation: int, transport: TransportName, senders: int = 1
    ) -> DeviceReport | None:
        """Build this rank and return its device. The ranks wait for each other."""
        with large_imports():
            devices = _use_devices(setup, threads=setup.config.train.threads)
            from hwrl.run.processes.trainer_rank import TrainerRank

        with setup.inputs.unchanged("trainer"), get_backend().allocating("the trainer"):
            self._rank: TrainerRank = TrainerRank(
                setup.config,
                inputs=setup.inputs,
                rank=rank,
                store_address=setup.store_address,
                incarnation=incarnation,
                transport=transport,
                senders=senders,
            )
        return _report_devices(devices)

    def restore(self) -> RestoredRun | None:
        """Load the newest complete checkpoint; return None if there is none."""
        with get_backend().allocating("the checkpoint"):
            return self._rank.restore()

    def send_weights(self) -> None:
        """Send the current weights to the replicas."""
        with get_backend().allocating("the transfer of weights"):
            self._rank.send_weights()

    def publish_last_weights(self) -> None:
        """Send the current weights as a further version, after the last step."""
        with get_backend().allocating("the transfer of weights"):
            self._rank.publish_last_weights()

    def new_receivers(self) -> tuple[str, ...]:
        """Return the replicas that connected after the newest weights were sent."""
        return self._rank.new_receivers()

    def step(self, groups: Sequence[PromptGroup]) -> StepOutcome:
        """Train one step."""
        with get_backend().allocating("a training step"):
            return self._rank.step(groups)

    def finish_profile(self) -> str | None:
        """Write a profile of steps if there is one to write; return a sentence about it."""
        return self._rank.finish_profile()

    def save(self, ledger: dict[str, Any]) -> Metrics:
        """Save a checkpoint with the ledger's state; return how long it took."""
        with get_backend().allocating("the copy for a checkpoint"):
            return self._rank.save(ledger)

    def export_model(self) -> None:
        """Write the model to the run directory."""
        with get_backend().allocating("the export of the model"):
            self._rank.export_model()

    def close(self) -> None:
        """Finish a save in the background and close all connections."""
        with get_backend().allocating("the end of the trainer"):
            self._rank.close()
