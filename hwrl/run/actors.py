"""The three kinds of processes of a run, as classes that Ray makes actors of. They hold the parts and add nothing.

Every process chooses the driver's backend by name before it imports anything of torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from hwrl.discovery import get_backend, set_backend
from hwrl.errors import EngineError
from hwrl.interfaces import PromptGroup
from hwrl.rollout.ledger import PromptLease, PromptLedger
from hwrl.run.config import Config
from hwrl.run.identity import RunInputs
from hwrl.run.placement import Assignment, Holding, check_devices, has_devices, held_devices, show_devices

if TYPE_CHECKING:
    from hwrl.rollout.rollouter import Rollouter
    from hwrl.weights import TransportName

LEASE_WAIT_S = 1.0
"""How long the ledger keeps a rollouter's question for prompts open before it answers with none."""


def end_at_sigterm() -> None:
    """Let SIGTERM end this process at once, so that the driver sees a death.

    Ray's own handler ends the main thread only: a loop in another thread goes on, and the actor answers nothing.
    May go when Ray ends such an actor. The ``__init__`` of an actor that is not asynchronous runs in the main thread.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


@dataclass(frozen=True)
class Taken:
    """What came with a batch: its prompts' numbers, the ledger's counts, and each replica's running totals."""

    sequence_numbers: list[int]
    counts: dict[str, int]
    replicas: dict[str, dict[str, float]]


class LedgerActor:
    """The prompt ledger, served to rollouters and the driver; questions wait until they can be answered.

    ``replica`` names one incarnation of a replica: once forgotten, it gets nothing and hands nothing in any more.
    """

    def __init__(self, config: Config) -> None:
        self._ledger = PromptLedger(
            groups_per_version=config.groups_per_version,
            max_staleness=config.async_training.staleness_threshold,
            total_groups=config.train.steps * config.train.batch_groups,
            group_timeout_s=config.rollout.group_timeout_s,
            max_attempts=config.rollout.max_attempts,
        )
        self._replicas: dict[str, dict[str, float]] = {}
        self._gone: set[str] = set()
        self._takes = 0
        self._fatal: EngineError | None = None
        self._changed = asyncio.Condition()

    async def alive(self) -> None:
        """Answer a heartbeat."""

    async def lease(self, count: int, replica: str) -> list[PromptLease]:
        """Give ``replica`` up to ``count`` prompts; wait a while until there is one."""
        async with self._changed:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait_for(self._ledger.capacity), LEASE_WAIT_S)
            if replica in self._gone:
                return []
            return self._ledger.lease(count, replica=replica, now_s=time.monotonic())

    async def complete(self, groups: Sequence[PromptGroup], replica: str, stats: dict[str, float]) -> None:
        """Take finished groups."""
        async with self._changed:
            if replica in self._gone:
                return
            self._replicas[replica] = stats
            for group in groups:
                with self._fatal_errors():
                    self._ledger.complete(group)
            self._changed.notify_all()

    async def fail(self, lease: PromptLease, reason: str) -> None:
        """Put a prompt back; after too many tries the next ``take`` raises."""
        async with self._changed:
            with self._fatal_errors():
                self._ledger.fail(lease, reason=reason)
            self._changed.notify_all()

    @contextlib.contextmanager
    def _fatal_errors(self) -> Iterator[None]:
        try:
            yield
        except EngineError as exc:
            self._fatal = exc

    async def forget(self, replica: str) -> int:
        """Put back what a lost replica held, for good."""
        async with self._changed:
            self._gone.add(replica)
            lost = self._ledger.forget_replica(replica)
            self._replicas.pop(replica, None)
            self._changed.notify_all()
            return lost

    async def overdue(self) -> list[str]:
        """Put back what was not finished by its deadline; return the replicas that held it."""
        async with self._changed:
            late = self._ledger.expire(time.monotonic())
            self._changed.notify_all()
            return late

    async def take(self, count: int, version: int) -> tuple[list[PromptGroup], Taken | None]:
        """Note that ``version`` is published; return the next batch as soon as the staleness rules allow one.

        A ``take`` that was abandoned meanwhile returns nothing, and has taken nothing.
        """
        async with self._changed:
            self._ledger.advance(version)
            self._changed.notify_all()
            mine = self._takes
            while (groups := self._take_now(count)) is None:
                await self._changed.wait()
                if self._takes != mine:
                    return [], None
            numbers = [group.sequence_number for group in groups]
            return groups, Taken(numbers, asdict(self._ledger.counts()), dict(self._replicas))

    def _take_now(self, count: int) -> list[PromptGroup] | None:
        if self._fatal is not None:
            raise self._fatal
        return self._ledger.take(count)

    async def abandon_take(self) -> None:
        """Let a ``take`` that waits return with nothing. (Ray cannot cancel a call, only forget its answer.)"""
        async with self._changed:
            self._takes += 1
            self._changed.notify_all()

    async def state_dict(self) -> dict[str, Any]:
        """Return the ledger's state for a checkpoint."""
        return self._ledger.state_dict()

    async def load_state_dict(self, state: dict[str, Any], incarnation: int) -> None:
        """Continue from a checkpoint with that incarnation of the trainer.

        Every lease of before is over, and a waiting ``take`` too.
        """
        async with self._changed:
            self._takes += 1
            self._ledger.load_state_dict(state, incarnation=incarnation)
            self._changed.notify_all()


class RemoteLedger:
    """The ledger as a rollouter sees it, through a Ray handle."""

    def __init__(self, handle: Any, *, replica: str) -> None:
        self._handle, self._replica = handle, replica

    def lease(self, count: int) -> Future[list[PromptLease]]:
        """Ask for prompts."""
        future: Future[list[PromptLease]] = self._handle.lease.remote(count, self._replica).future()
        return future

    def complete(self, groups: Sequence[PromptGroup], stats: dict[str, float]) -> None:
        """Hand in groups."""
        self._handle.complete.remote(groups, self._replica, stats)

    def fail(self, lease: PromptLease, reason: str) -> None:
        """Report a failed prompt."""
        self._handle.fail.remote(lease, reason)


def _take_devices(backend: str, told: Assignment, *, threads: int) -> tuple[int, ...]:
    """Choose the driver's backend and take the devices that this process is told; return their indices in it."""
    set_backend(backend)
    own = show_devices(told, get_backend().devices, os.environ)  # read once, when the device is first used
    from hwrl.run.build import prepare_process

    check_devices(told, own, get_backend(), os.environ)
    prepare_process(threads=threads, device=own[0])
    return own


def _held(devices: Sequence[int]) -> Holding | None:
    return held_devices(devices, get_backend()) if has_devices(get_backend()) else None


class RolloutActor:
    """One rollout replica: ``set_up``, then ``run``, which occupies a thread of its own until ``stop``."""

    def __init__(self) -> None:
        end_at_sigterm()
        self._stop = threading.Event()
        self._rollouter: Rollouter | None = None

    def alive(self) -> float:
        """Answer a heartbeat: for how many seconds the present step of the rollouter's loop has lasted."""
        return 0.0 if self._rollouter is None else self._rollouter.step_s()

    def set_up(
        self,
        config: Config,
        *,
        inputs: RunInputs,
        backend: str,
        told: Assignment,
        replica: str,
        incarnation: str,
        seed: int,
        store_address: str,
        ledger: Any,
    ) -> Holding | None:
        """Build the replica, which then waits for weights; return the devices that it holds.

        (Errors of an actor's ``__init__`` come out worse.)
        """
        self._devices = _take_devices(backend, told, threads=config.rollout.threads)
        from hwrl.run.build import build_rollouter, evaluation_prompts

        with inputs.unchanged("rollout"), get_backend().allocating("the rollout engine"):
            self._rollouter = build_rollouter(
                config,
                inputs=inputs,
                replica=replica,
                seed=seed,
                store_address=store_address,
                ledger=RemoteLedger(ledger, replica=incarnation),
            )
            self._evaluation_prompts = evaluation_prompts(config, inputs)
        return _held(self._devices)

    def run(self) -> None:
        """Roll out until ``stop``."""
        assert self._rollouter is not None, "set_up comes first"
        get_backend().set_device(self._devices[0])  # of this thread, which is not that of ``set_up``
        with get_backend().allocating("generating responses"):
            self._rollouter.run(self._stop)

    def evaluate(self) -> Any:
        """Return an :class:`~hwrl.rollout.evaluator.Evaluation` with the weights that are there when it begins."""
        assert self._rollouter is not None, "set_up comes first"
        return self._rollouter.evaluate(self._evaluation_prompts).result()

    def stop(self) -> None:
        """Make ``run`` return."""
        self._stop.set()


class TrainActor:
    """One rank of the trainer: ``set_up``, then calls of :class:`~hwrl.run.build.TrainerParts`."""

    def __init__(self) -> None:
        end_at_sigterm()

    def alive(self) -> float:
        """Answer a heartbeat. A call that hangs is bounded by ``timeouts.trainer_s``."""
        return 0.0

    def set_up(
        self,
        config: Config,
        *,
        inputs: RunInputs,
        backend: str,
        told: Assignment,
        rank: int,
        store_address: str,
        incarnation: int,
        transport: TransportName,
    ) -> Holding | None:
        """Build this rank and return the device that it holds; on several ranks, all are set up at the same time."""
        devices = _take_devices(backend, told, threads=config.train.threads)
        from hwrl.run.build import TrainerParts

        with inputs.unchanged("trainer"), get_backend().allocating("the trainer"):
            self._parts = TrainerParts(
                config,
                inputs=inputs,
                rank=rank,
                store_address=store_address,
                incarnation=incarnation,
                transport=transport,
            )
        return _held(devices)

    def call(self, method: str, *args: Any) -> Any:
        """Call ``method`` of this rank's parts."""
        with get_backend().allocating(f"the trainer's {method!r}"):
            return getattr(self._parts, method)(*args)
