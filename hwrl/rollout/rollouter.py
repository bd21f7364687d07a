"""The rollouter's loop: update weights, start prompts, generate, score, hand in groups, sleep."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

from hwrl.clock import ActivityClock
from hwrl.errors import DataError
from hwrl.interfaces import MEMORY_TAGS, PromptGroup, RolloutEngine, Sampling
from hwrl.interfaces.tracing import Attribute
from hwrl.rollout.data import Prompt
from hwrl.rollout.evaluator import Evaluation, Evaluator
from hwrl.rollout.generation import GroupGenerator, PendingGroup, SampleGenerator
from hwrl.rollout.leases import LeaseQueue, LedgerClient
from hwrl.rollout.ledger import PromptLease
from hwrl.rollout.prompt_order import PromptStream
from hwrl.rollout.reward_workers import Scorer
from hwrl.rollout.tracing import SpanLog
from hwrl.rollout.weight_updater import WeightUpdater

_RETRY_S = 1.0
"""The wait between a failed transfer of requested weights and the next request."""
SLEEPS_AFTER_S = 0.2
"""Idle time before an engine sleeps. A sleep and a wake together take about as long."""


@dataclass(frozen=True, kw_only=True)
class LoopSettings:
    """How a rollouter generates.

    ``group_size`` is the number of responses to each training prompt. With ``partial_rollout`` the engine takes new
    weights between two tokens, and unfinished responses continue with them. Without it, a waiting update keeps new
    prompts from starting, and is taken when the running ones are finished. With ``sleep_level`` the engine sleeps while
    it is idle (:meth:`~hwrl.interfaces.rollout.RolloutEngine.sleep`); with None it never does.
    Prompts start in every ``starts_every``-th round of the loop: a step of the engine that also reads prompts takes
    several times as long as one that only generates, so few such steps are faster than many with few prompts each.
    Evaluations have ``eval_temperature`` (0: greedy) and ``eval_samples`` responses to each prompt. Beside training
    prompts they use the share ``eval_share`` of the places for samples, at least one, and leave a group's places to
    training. With ``skips_failures`` an evaluation leaves out the prompts that cannot be scored; otherwise it fails.

    One prompt in ``trace_every`` is traced: those with a sequence number that is a multiple of it. With 0 none is.
    ``replica`` is this rollouter's name in traces.
    """

    sampling: Sampling
    group_size: int
    starts_every: int = 4
    eval_temperature: float = 0.0
    eval_samples: int = 1
    eval_share: float = 0.25
    skips_failures: bool = False
    partial_rollout: bool = True
    sleep_level: int | None = None
    trace_every: int = 0
    replica: str = ""


class Rollouter:
    """Drives one engine. :meth:`step` is one round of the loop; :meth:`run` repeats it until it is told to stop.

    A prompt starts when the engine has the weights that its lease asks for. One that cannot be read has failed.
    Weights of a new incarnation of the trainer end all unfinished work: leased prompts are dropped, an evaluation
    starts again. ``rewards`` scores finished groups, and ``generator`` makes them on ``engine`` (default: single
    turns); :meth:`run` closes both. Progress on the leases is reported to the ledger every ``report_interval_s``.

    One thread calls ``step``, ``run`` and ``stats``; any thread may call ``evaluate``, ``leave`` and ``step_s``.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        *,
        weights: WeightUpdater,
        ledger: LedgerClient,
        prompts: PromptStream,
        rewards: Scorer,
        settings: LoopSettings,
        generator: SampleGenerator | None = None,
        report_interval_s: float = 1.0,
    ) -> None:
        self.engine = engine
        self._weights, self._ledger, self._prompts, self._rewards = weights, ledger, prompts, rewards
        self._settings = settings
        self._generator = generator or GroupGenerator(engine, group_size=settings.group_size)
        self._spare_places = max(0, self._generator.room() - settings.group_size)  # beside a training group
        self._leases = LeaseQueue(ledger)
        self._report_interval_s, self._report_due_s = report_interval_s, 0.0
        self._rounds_since_start = 0
        self._has_generated = False  # since the last report of progress
        self._evaluator = Evaluator(
            rewards, samples=settings.eval_samples, group_size=settings.group_size, skips=settings.skips_failures
        )
        self._asleep, self._idle_since_s = False, math.inf  # on the monotonic clock
        self._clock = ActivityClock("idle")
        self._totals = {"groups": 0.0, "updates": 0.0, "reward_errors": 0.0}
        if settings.sleep_level is not None:
            self._totals |= {"sleeps": 0.0, "freed_nbytes": 0.0}
        self._scoring: list[PendingGroup] = []
        self._incarnation = weights.incarnation  # of the engine's weights
        self._had_weights = False
        # When to request weights, on the monotonic clock. None: a request is open, and no transfer has ended since.
        self._next_request_s: float | None = 0.0
        self._step_began_s: float | None = None  # None: outside of run
        self._leaving = threading.Event()

    # -- calls from other threads -------------------------------------------------------------------------------

    def evaluate(self, prompts: Sequence[Prompt], *, alone: bool = False) -> Future[Evaluation]:
        """Evaluate ``prompts`` beside the training prompts, or ``alone``, with all places. Does not block.

        Weight updates continue meanwhile. One evaluation at a time; the future has an EngineError if :meth:`run` ends
        first.
        """
        places = self._spare_places + self._settings.group_size
        if not alone:
            places = min(int(places * self._settings.eval_share), self._spare_places)
        return self._evaluator.request(prompts, places=max(1, places))

    def leave(self) -> None:
        """Let :meth:`run` return when its leased prompts are finished; lease no more of them. Does not block."""
        self._leaving.set()

    def step_s(self) -> float:
        """Return the seconds since the present step of :meth:`run` began; 0.0 outside of it. Does not block."""
        began_s = self._step_began_s
        return 0.0 if began_s is None else time.monotonic() - began_s

    # -- the loop -----------------------------------------------------------------------------------------------

    def run(self, stop: threading.Event) -> None:
        """Step until ``stop`` is set, or until all work is done after :meth:`leave`.

        Unfinished prompts are dropped; the ledger gives their leases to others.
        """
        try:
            while not stop.is_set() and not self._is_done_leaving():
                self._step_began_s = time.monotonic()
                if not self.step():
                    stop.wait(0.002)
        finally:
            self._step_began_s = None
            self._evaluator.close()
            self._rewards.close()
            self._generator.close()

    def step(self) -> bool:
        """Do one round of the loop: at most one step of the engine. Return False if nothing was generated."""
        update_waits = self._weights.poll()
        if update_waits and (self._settings.partial_rollout or not self._generator.pending()):
            self._update_weights()
            update_waits = False
        self._rounds_since_start += 1
        if not update_waits and (
            self._rounds_since_start >= self._settings.starts_every or not self._generator.pending()
        ):
            self._rounds_since_start = 0
            self._start_prompts()
        generated = self._generate()
        self._hand_in(self._collect_scored())
        self._has_generated |= generated
        if time.monotonic() >= self._report_due_s:
            self._report_progress()
        self._sleep_if_idle()
        return generated

    def _is_done_leaving(self) -> bool:
        """Return whether :meth:`leave` was called, and no work is left."""
        busy = self._generator.pending() or self._scoring or self._evaluator.is_active
        return self._leaving.is_set() and self._leases.is_empty and not busy

    def stats(self) -> dict[str, float]:
        """Return running totals of tokens, groups, transfers, sleeps and errors, and the seconds of each activity."""
        seconds = {f"{activity}_s": value for activity, value in self._clock.seconds().items()}
        totals = {"tokens": float(self._generator.tokens), **self._totals}
        return {
            **totals,
            **self._weights.totals(),
            **seconds,
            "version": float(self.engine.version),
        }

    # -- weights ------------------------------------------------------------------------------------------------

    def _update_weights(self) -> None:
        with self._clock.during("update"):
            self._wake({"weights"})
            updated = self._weights.update()
            self._wake()
        self._totals["updates"] += updated
        if updated:
            self._next_request_s = 0.0
            if self._weights.incarnation != self._incarnation:
                self._start_over()
        elif self._next_request_s is None:
            self._next_request_s = time.monotonic() + _RETRY_S

    def _start_over(self) -> None:
        """Drop all work of the last incarnation: its leases are over, and an evaluation must not mix two."""
        self._incarnation = self._weights.incarnation
        self._generator.drop()
        for group in self._scoring:
            group.cancel()
        self._scoring = []
        self._leases.drop_older(incarnation=self._incarnation)
        self._evaluator.restart()

    def _request_weights(self) -> None:
        """Request weights if the engine has none and no request is open."""
        due = self._next_request_s is not None and time.monotonic() >= self._next_request_s
        if self.engine.version < 0 and due:
            self._weights.request()
            self._next_request_s = None

    # -- generation ---------------------------------------------------------------------------------------------

    def _start_prompts(self) -> None:
        """Start the waiting prompts that the engine has the weights for; wake it and request weights if need be."""
        self._had_weights |= self.engine.version >= 0
        if not self._had_weights:
            return
        self._leases.refill(room=0 if self._leaving.is_set() else self._room_for_groups())
        if self._leases or self._evaluator.is_waiting or self._generator.pending():
            if self._asleep:
                with self._clock.during("sleep"):
                    self._wake()
            self._request_weights()
        if self.engine.version >= 0:
            self._start_evaluation()
            self._start_leased()

    def _room_for_groups(self) -> int:
        """Return how many training groups can start now. An evaluation's places count as taken, but for one group's."""
        room = self._generator.room() + self._evaluator.running - min(self._evaluator.places, self._spare_places)
        return room // self._settings.group_size

    def _start_evaluation(self) -> None:
        sampling = replace(self._settings.sampling, temperature=self._settings.eval_temperature)
        room = self._generator.room() - self._leases.promised * self._settings.group_size
        room += max(0, self._evaluator.places - self._spare_places)  # these may be above the limit
        self._evaluator.start(lambda group: self._generator.start(group, sampling), room=room)

    def _start_leased(self) -> None:
        settings = self._settings
        for lease in self._leases.pop_ready(version=self.engine.version, incarnation=self._incarnation):
            try:
                prompt = self._prompts[lease.sequence_number]
            except DataError as exc:
                self._ledger.fail(lease, f"{exc.what}: {exc.why}")
                continue
            group = PendingGroup(prompt, settings.group_size, lease, spans=self._trace(lease))
            self._generator.start(group, settings.sampling)

    def _trace(self, lease: PromptLease) -> SpanLog | None:
        """Return the log of a prompt that starts now; None if it is not traced. Its first span is the lease's wait."""
        every = self._settings.trace_every
        if not every or lease.sequence_number % every:
            return None
        log, waited_from_s = SpanLog(), self._leases.leased_unix_s
        given: dict[str, Attribute] = {"replica": self._settings.replica, "version": lease.version}
        log.add("lease", given, begin_unix_s=waited_from_s, end_unix_s=log.began_unix_s)
        return log

    def _generate(self) -> bool:
        if self.engine.version < 0 or not self._generator.has_work():
            return False
        with self._clock.during("generate"):
            groups = self._generator.step()
        for group in groups:
            group.score(self._rewards)
        self._scoring += groups
        return True

    # -- after generation ---------------------------------------------------------------------------------------

    def _collect_scored(self) -> list[PromptGroup]:
        """Return the groups that are scored since the last call; report failed ones, and answer an evaluation."""
        groups, self._scoring = self._scoring, []
        finished = []
        for group in groups:
            if not group.is_scored:
                self._scoring.append(group)
                continue
            scores = group.result()
            self._totals["reward_errors"] += scores.errors
            if group.lease is not None and scores.failure is not None:
                self._ledger.fail(group.lease, scores.failure)
            elif group.lease is not None:
                finished.append(group.to_prompt_group(group.lease))
        self._scoring += self._evaluator.collect(incarnation=self._incarnation)
        return finished

    def _hand_in(self, groups: Sequence[PromptGroup]) -> None:
        if groups:
            self._totals["groups"] += len(groups)
            self._ledger.complete(groups, self.stats())

    def _report_progress(self) -> None:
        """Report the leases with progress to the ledger. Without progress a replica counts as hung.

        Leases in generation, and those that wait for it, have progress while the generator has. A group that is being
        scored always has progress: the calls of the reward function have a time limit of their own.
        """
        leases = [group.lease for group in self._scoring if group.lease is not None]
        if self._generator.has_progress(generated=self._has_generated):
            leases += [*self._generator.leases(), *self._leases]
        self._has_generated, self._report_due_s = False, time.monotonic() + self._report_interval_s
        if leases:
            self._ledger.renew(leases)

    def _sleep_if_idle(self) -> None:
        level, now_s = self._settings.sleep_level, time.monotonic()
        idle = self._had_weights and not (self._generator.pending() or self._leases or self._evaluator.is_waiting)
        self._idle_since_s = min(self._idle_since_s, now_s) if idle and not self._asleep else math.inf
        if level is not None and now_s - self._idle_since_s >= SLEEPS_AFTER_S:
            with self._clock.during("sleep"):
                self._totals["freed_nbytes"] += self.engine.sleep(level=level)
                self._totals["sleeps"] += 1
                self._asleep, self._idle_since_s = True, math.inf
                self._weights.release()

    def _wake(self, tags: Collection[str] = MEMORY_TAGS) -> None:
        """Wake the parts ``tags`` of the engine if it sleeps. Blocks."""
        if self._asleep:
            self.engine.wake(tags)
            self._asleep = tags != MEMORY_TAGS
