"""The process of the prompt ledger: an actor around the plain :class:`~hwrl.rollout.PromptLedger`.

This module does not import torch: a replica receives the ledger's proxy before it chooses its backend.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Concatenate, NamedTuple

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from hwrl.errors import EngineError, HwrlError
from hwrl.interfaces import PromptGroup, Span
from hwrl.rollout import PromptLease, UntrainedPrompts
from hwrl.run.config import Config
from hwrl.run.monitor import ProcessMonitor, Timeout
from hwrl.run.remote import (
    DEATH_ERRORS,
    Answer,
    HeartbeatReply,
    ParametersT,
    Remote,
    ValueT,
    is_ready,
    value_of,
    why_died,
)
from hwrl.run.settings import make_ledger

LEDGER = "the ledger"
"""The name of the ledger's process in log lines."""
POLL_S = 1.0
LEASE_WAIT_S = 1.0
"""How long the ledger waits for a prompt to lease before it answers a request with an empty list."""


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


EMPTY_LEDGER: dict[str, Any] = {"version": 0, "trained": 0, "next": 0, "owed": []}
"""The ledger's state before the first prompt. ``owed``: leased prompts that are not yet trained, filtered or failed."""


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

    async def call(self, method: str, *arguments: Any, **keywords: Any) -> Any:
        """Call a method of this class, for :class:`~hwrl.run.remote.Remote`."""
        return await getattr(self, method)(*arguments, **keywords)

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
            while self._fatal is not None or (groups := self._ledger.take(count)) is None:
                if self._fatal is not None:
                    raise self._fatal
                await self._changed.wait()
                if self._takes_abandoned != abandoned:
                    return [], None
            numbers = [group.sequence_number for group in groups]
            untrained, counts = self._ledger.take_untrained(), self._ledger.counts()
            spans = {group.sequence_number: group.spans for group in groups if group.spans}
            state = self._ledger.state_dict()
            return groups, BatchInfo(numbers, counts, dict(self._replica_totals), untrained, spans, state)

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


class RunLedger:
    """The ledger as the driver calls it: starts its process, and waits for its answers.

    Raises EngineError if the ledger has died or does not answer in time. A run cannot continue without its ledger.
    """

    def __init__(self, config: Config, *, monitor: ProcessMonitor) -> None:
        self._limits, self._monitor = config.timeouts, monitor
        self.remote = start_ledger(config)
        monitor.watch(LEDGER, self.remote)

    def ask(
        self,
        method: Callable[Concatenate[LedgerActor, ParametersT], Coroutine[Any, Any, ValueT]],
        *arguments: ParametersT.args,
        **keywords: ParametersT.kwargs,
    ) -> ValueT:
        """Call ``method`` of the ledger, and wait for its answer."""
        answer = self.remote.call(method, *arguments, **keywords)
        key = "heartbeat_s" if self._monitor.is_up(LEDGER) else "start_s"
        timeout = Timeout(getattr(self._limits, key))
        while not is_ready(answer, timeout_s=POLL_S):
            self._monitor.update()
            if timeout.is_over():
                raise ledger_died(f"it did not answer {method.__name__!r} within timeouts.{key}={timeout.limit_s:g} s")
        return self.value_of(answer)

    def value_of(self, answer: Answer[ValueT]) -> ValueT:
        """Wait for an answer of the ledger, without a time limit; return its value."""
        try:
            return value_of(answer)
        except DEATH_ERRORS as exc:
            raise ledger_died(why_died(exc)) from exc


def start_ledger(config: Config) -> Remote[LedgerActor]:
    """Start the ledger's process on the driver's machine.

    If the driver's machine is lost, the run ends anyway. On another machine, the ledger's loss would also end it.
    """
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return Remote(LedgerActor, config, num_cpus=0, scheduling_strategy=here)


def ledger_died(why: str) -> EngineError:
    """Return the error about a dead ledger."""
    return EngineError(
        "the prompt ledger died",
        why=why,
        fix="resume=true continues from the last checkpoint, if there is one",
    )


class ReplicaLedger:
    """The ledger as the rollouter of one replica calls it. The ledger itself runs in another process."""

    def __init__(self, ledger: Remote[LedgerActor], *, replica_id: str) -> None:
        self._ledger, self._replica_id = ledger, replica_id

    def lease(self, count: int) -> Future[list[PromptLease]]:
        """Request up to ``count`` leases."""
        return self._ledger.call(LedgerActor.lease, count, self._replica_id).future()

    def complete(self, groups: Sequence[PromptGroup], stats: dict[str, float]) -> None:
        """Hand in finished groups."""
        self._ledger.call(LedgerActor.complete, groups, self._replica_id, stats)

    def fail(self, lease: PromptLease, reason: str) -> None:
        """Report a failed attempt at a prompt."""
        self._ledger.call(LedgerActor.fail, lease, reason)

    def renew(self, leases: Sequence[PromptLease]) -> None:
        """Report progress on ``leases``."""
        self._ledger.call(LedgerActor.renew, leases, self._replica_id)
