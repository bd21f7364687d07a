"""The classes of a run's Ray actors: the prompt ledger, the rollout replicas and the trainer ranks.

A run also has the driver, Ray's processes, the reward processes of each replica and, with some engines, further
workers of a replica.

This module does not import torch: each process first chooses the driver's backend, and imports torch after that.
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

from hwrl.checkpoint import share_lock
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
from hwrl.run.processes.worker_log import keep_warnings, take_warnings
from hwrl.run.report.records import Metrics
from hwrl.run.report.samples import Sample

if TYPE_CHECKING:
    from hwrl.rollout import Evaluation, Rollouter
    from hwrl.run.processes.handles import LedgerHandle
    from hwrl.run.processes.trainer_rank import TrainerRank
    from hwrl.weights import TransportName

LEASE_WAIT_S = 1.0
"""How long the ledger waits for a prompt to lease before it answers a request with an empty list."""


def end_at_sigterm() -> None:
    """Let SIGTERM end this process at once, so that the driver sees its death.

    Ray's handler ends only the main thread. A loop in another thread would continue, but the actor would no longer
    answer calls. Call this in ``__init__``: Ray runs it in the main thread. Remove this when Ray ends such actors.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


@dataclass(frozen=True)
class HeartbeatReply:
    """The answer to a heartbeat.

    It has the process's machine, the seconds that its loop has spent in the current turn, whether it is saving a
    checkpoint in the background, and the warnings that it has logged since the last answer.
    """

    host: str
    turn_s: float = 0.0
    is_saving: bool = False
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class ProcessSetup:
    """What each trainer rank and each replica needs to start."""

    config: Config
    inputs: RunInputs
    backend: str
    devices: ProcessDevices
    store_address: str = field(repr=False)  # it contains the store's secret key
    lock: bytes | None = None
    """The content of the lock file in the run directory. A trainer changes nothing there without it."""


@dataclass(frozen=True)
class BatchInfo:
    """The description of a batch: its prompts, the ledger's counts, and the running totals of each replica.

    ``untrained`` has the prompts that were filtered or failed since the previous batch. ``spans`` has the spans of each
    traced prompt, by sequence number. ``ledger`` is the ledger's state with this batch trained: the state for a
    checkpoint of the step that trains on it.
    """

    sequence_numbers: list[int]
    counts: dict[str, int]
    replicas: dict[str, dict[str, float]]
    untrained: UntrainedPrompts = field(default_factory=UntrainedPrompts)
    spans: dict[int, tuple[Span, ...]] = field(default_factory=dict)
    ledger: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class StepOutcome:
    """The result of a training step: its metrics, and a few of its trajectories as text (only from rank 0)."""

    metrics: Metrics
    samples: list[Sample]


@dataclass(frozen=True)
class RestoredRun:
    """The driver's part of a loaded checkpoint.

    ``ledger`` is the ledger's state. ``skipped`` has the path of each unusable newer checkpoint, with the reason.
    ``changed`` has a sentence for each input file that has changed since the checkpoint and may change.
    """

    step: int
    ledger: dict[str, Any]
    skipped: list[tuple[str, str]]
    changed: list[str]


# -- the ledger -----------------------------------------------------------------------------------------------------


EMPTY_LEDGER: dict[str, Any] = {"version": 0, "trained": 0, "next": 0, "owed": []}
"""The ledger's state before the first prompt. ``owed``: leased prompts that are not yet trained, filtered or failed."""


def make_ledger(config: Config) -> PromptLedger:
    """Return the empty prompt ledger of a run."""
    return PromptLedger(
        groups_per_version=config.groups_per_version,
        max_staleness=config.async_training.staleness_threshold,
        total_groups=config.train.steps * config.train.batch_groups,
        lead_groups=config.lead_groups,
        group_timeout_s=config.rollout.group_timeout_s,
        max_attempts=config.rollout.max_attempts,
        max_skipped_in_a_row=config.rollout.max_skipped_in_a_row if config.rollout.on_failure == "skip" else 0,
        teaches=has_variance if config.algorithm.filter_groups else None,
        max_filtered_in_a_row=config.algorithm.max_filtered_in_a_row,
    )


class ForgottenReplica(NamedTuple):
    """The account of a dead replica: how many prompts go to others, whether it had finished any, and its updates."""

    lost: int
    had_finished: bool
    updates: int = 0


class LedgerActor:
    """Serves the prompt ledger to the replicas and the driver.

    The ledger leases the sequence numbers of prompts. It does not hold the prompts: each replica loads all of them.

    A ``replica_id`` like ``replica-0#3`` names one process of a replica. A replacement has the same name and another
    id. After ``forget``, the ledger ignores calls with the old id.
    """

    def __init__(self, config: Config) -> None:
        self._ledger = make_ledger(config)
        self._replica_totals: dict[str, dict[str, float]] = {}
        self._forgotten: set[str] = set()
        self._takes_abandoned = 0
        self._fatal: HwrlError | None = None
        self._changed = asyncio.Condition()

    async def ping(self) -> HeartbeatReply:
        """Answer a heartbeat."""
        return HeartbeatReply(socket.gethostname())

    async def lease(self, count: int, replica_id: str) -> list[PromptLease]:
        """Lease up to ``count`` sequence numbers to a replica. Waits up to ``LEASE_WAIT_S`` for the first one."""
        async with self._changed:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait_for(self._ledger.capacity), LEASE_WAIT_S)
            if replica_id in self._forgotten:
                return []
            return self._ledger.lease(count, replica=replica_id, now_s=time.monotonic())

    async def complete(self, groups: Sequence[PromptGroup], replica_id: str, stats: dict[str, float]) -> None:
        """Accept the finished groups of a replica, and its running totals."""
        async with self._changed:
            if replica_id in self._forgotten:
                return
            self._replica_totals[replica_id] = stats
            for group in groups:
                with self._fatal_errors():
                    self._ledger.complete(group)
            self._changed.notify_all()

    async def fail(self, lease: PromptLease, reason: str) -> None:
        """Count a failed attempt: lease the prompt again, or give it up.

        If ``rollout.on_failure`` forbids to give it up, the next :meth:`advance_and_take` raises an error.
        """
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
        """Extend ``leases``, because their replica has made progress on them."""
        if replica_id not in self._forgotten:
            self._ledger.renew(leases, now_s=time.monotonic())

    async def forget(self, replica_id: str) -> ForgottenReplica:
        """Make all prompts of a dead replica free for others, and ignore the replica from now on."""
        async with self._changed:
            self._forgotten.add(replica_id)
            lost = self._ledger.forget_replica(replica_id)
            totals = self._replica_totals.pop(replica_id, None)
            self._changed.notify_all()
            return ForgottenReplica(lost, totals is not None, int((totals or {}).get("updates", 0)))

    async def expire_overdue(self) -> list[str]:
        """Make the prompts without progress free for others; return the ids of the replicas that had leased them."""
        async with self._changed:
            replica_ids = self._ledger.expire(time.monotonic())
            self._changed.notify_all()
            return replica_ids

    async def advance_and_take(self, count: int, version: int) -> tuple[list[PromptGroup], BatchInfo | None]:
        """Advance the ledger to ``version``, the newest published one. Then wait for a batch of ``count`` groups.

        Advancing admits more prompts. The batch is returned as soon as the staleness rules allow one, and its groups
        count as trained from then on. :meth:`abandon_take` ends the wait: the call then returns no groups and None, and
        the ledger keeps its groups.
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
            state = self._ledger.state_dict()
            return groups, BatchInfo(numbers, counts, dict(self._replica_totals), untrained, spans, state)

    def _take_now(self, count: int) -> list[PromptGroup] | None:
        if self._fatal is not None:
            raise self._fatal
        return self._ledger.take(count)

    async def abandon_take(self) -> None:
        """End a waiting :meth:`advance_and_take` without a batch. Ray has no way to cancel the call."""
        async with self._changed:
            self._takes_abandoned += 1
            self._changed.notify_all()

    async def load_state_dict(self, state: dict[str, Any], incarnation: int) -> None:
        """Continue from a checkpoint with this incarnation of the trainer. Ends all leases and a waiting take.

        Forgets an error that was to end the run: it belongs to prompts that are now owed again.
        """
        async with self._changed:
            self._takes_abandoned += 1
            self._fatal = None
            self._ledger.load_state_dict(state, incarnation=incarnation)
            self._changed.notify_all()


class ReplicaLedger:
    """The ledger as the rollouter of one replica calls it. The ledger itself runs in another process."""

    def __init__(self, ledger: LedgerHandle, *, replica_id: str) -> None:
        self._ledger, self._replica_id = ledger, replica_id

    def lease(self, count: int) -> Future[list[PromptLease]]:
        """Request up to ``count`` leases."""
        return self._ledger.lease(count, self._replica_id).future()

    def complete(self, groups: Sequence[PromptGroup], stats: dict[str, float]) -> None:
        """Hand in finished groups."""
        self._ledger.complete(groups, self._replica_id, stats)

    def fail(self, lease: PromptLease, reason: str) -> None:
        """Report a failed attempt at a prompt."""
        self._ledger.fail(lease, reason)

    def renew(self, leases: Sequence[PromptLease]) -> None:
        """Report progress on ``leases``."""
        self._ledger.renew(leases, self._replica_id)


# -- devices of a process -------------------------------------------------------------------------------------------


def _use_devices(setup: ProcessSetup, *, threads: int) -> tuple[int, ...]:
    """Choose the driver's backend and make this process use its devices; return their indices in this process."""
    set_backend(setup.backend)
    own = make_visible(setup.devices, get_backend().devices, os.environ)  # before vendors' libraries read the variable
    from hwrl.run.processes.build import prepare_process

    check_devices(setup.devices, own, get_backend(), os.environ)
    prepare_process(threads=threads, device=own[0])
    return own


def _report_devices(devices: Sequence[int]) -> DeviceReport | None:
    return make_device_report(devices, get_backend()) if has_devices(get_backend()) else None


# -- a replica ------------------------------------------------------------------------------------------------------


class RolloutActor:
    """One rollout replica. Call ``set_up``, then ``run``: it occupies a thread until ``leave`` or ``stop``."""

    def __init__(self) -> None:
        end_at_sigterm()
        keep_warnings()
        self._stop = threading.Event()
        self._rollouter: Rollouter | None = None

    def ping(self) -> HeartbeatReply:
        """Answer a heartbeat, in a thread of its own. The seconds are those of the rollouter's current turn."""
        turn_s = 0.0 if self._rollouter is None else self._rollouter.step_s()
        return HeartbeatReply(socket.gethostname(), turn_s, warnings=take_warnings())

    def set_up(
        self, setup: ProcessSetup, *, replica: str, replica_id: str, seed: int, ledger: LedgerHandle
    ) -> DeviceReport | None:
        """Build the replica, which then waits for weights; return the devices that it really uses.

        ``replica`` is its name, and its replacement gets the same name. ``replica_id`` is unique to this process.

        This is not done in ``__init__``, because Ray reports errors of an actor's ``__init__`` poorly.
        """
        with large_imports():
            self._devices = _use_devices(setup, threads=setup.config.rollout.threads)
            from hwrl.run.processes.build import build_rollouter
            from hwrl.run.processes.prompts import EvaluationPrompts, run_tokenizer

        is_first = replica_id.endswith("#0")  # of the run: one process checks all prompts
        with setup.inputs.unchanged("rollout"), get_backend().allocating("the rollout engine"):
            tokenizer = run_tokenizer(setup.config, setup.inputs)
            self._evaluation_prompts = EvaluationPrompts(setup.config, setup.inputs, tokenizer, check=is_first)
            self._rollouter = build_rollouter(
                setup.config,
                inputs=setup.inputs,
                replica=replica,
                seed=seed,
                store_address=setup.store_address,
                ledger=ReplicaLedger(ledger, replica_id=replica_id),
                tokenizer=tokenizer,
                check_prompts=is_first,
            )  # last, because it joins the weight link: from then on a sender waits for `run`
        return _report_devices(self._devices)

    def run(self) -> None:
        """Roll out until :meth:`stop`, or until all leased prompts are finished after :meth:`leave`."""
        assert self._rollouter is not None, "set_up comes first"
        get_backend().set_device(self._devices[0])  # it is set per thread, and set_up ran in another thread
        with get_backend().allocating("generating responses"):
            self._rollouter.run(self._stop)

    def evaluate(self, part: int, parts: int, *, alone: bool) -> Evaluation | None:
        """Evaluate on part number ``part`` of ``parts`` equal parts of the prompts. Blocks until the part is scored.

        Uses the weights that the engine has, and newer ones that arrive meanwhile. ``alone``: no training goes on.
        Returns None if the part is empty.
        """
        assert self._rollouter is not None, "set_up comes first"
        prompts = self._evaluation_prompts.part(part, parts)
        return self._rollouter.evaluate(prompts, alone=alone).result() if prompts else None

    def leave(self) -> None:
        """Make :meth:`run` return when all leased prompts are finished. Takes no more leases."""
        assert self._rollouter is not None, "set_up comes first"
        self._rollouter.leave()

    def stop(self) -> None:
        """Make :meth:`run` return after its current turn. Unfinished prompts are lost."""
        self._stop.set()


# -- a trainer rank -------------------------------------------------------------------------------------------------


class TrainActor:
    """One trainer rank. Call ``set_up``; then the other methods call :class:`TrainerRank` in ``trainer_rank.py``."""

    def __init__(self) -> None:
        end_at_sigterm()
        keep_warnings()

    def ping(self) -> HeartbeatReply:
        """Answer a heartbeat, in a thread of its own. A rank that hangs in another call still answers.

        ``timeouts.trainer_s`` limits the other calls.
        """
        is_saving = hasattr(self, "_rank") and self._rank.is_saving
        return HeartbeatReply(socket.gethostname(), is_saving=is_saving, warnings=take_warnings())

    def set_up(
        self, setup: ProcessSetup, *, rank: int, incarnation: int, transport: TransportName, senders: int = 1
    ) -> DeviceReport | None:
        """Build this rank and return the device that it really uses. The ranks wait for each other."""
        with large_imports():
            devices = _use_devices(setup, threads=setup.config.train.threads)
            from hwrl.run.processes.trainer_rank import TrainerRank

        if setup.lock is not None:
            share_lock(setup.config.dir, setup.lock)
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
        """Return the replicas that connected after the newest weights were sent. Only rank 0 knows them."""
        return self._rank.new_receivers()

    def step(self, groups: Sequence[PromptGroup]) -> StepOutcome:
        """Train one step on ``groups``, and send the weights if they are due."""
        with get_backend().allocating("a training step"):
            return self._rank.step(groups)

    def finished_step(self) -> int | None:
        """Return the step whose result this rank has; None if it has changed its models only in part since then."""
        return self._rank.finished_step

    def finish_profile(self) -> str | None:
        """Write the profile if steps are recorded; return a message for the log, None if there is nothing to say."""
        return self._rank.finish_profile()

    def save(self, ledger: dict[str, Any]) -> Metrics:
        """Save a checkpoint with the ledger's state; return the seconds that the trainer waited for it."""
        with get_backend().allocating("the copy for a checkpoint"):
            return self._rank.save(ledger)

    def export_model(self) -> None:
        """Write the trained model to the run directory."""
        with get_backend().allocating("the export of the model"):
            self._rank.export_model()

    def close(self) -> None:
        """Wait for a save in the background and close all connections."""
        with get_backend().allocating("the end of the trainer"):
            self._rank.close()
