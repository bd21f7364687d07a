"""The rollouter: leases prompts, generates, judges, and takes new weights between two tokens."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from hwrl.clock import ActivityClock
from hwrl.errors import EngineError
from hwrl.interfaces import Completion, GenerationRequest, PromptGroup, Response, RolloutEngine, Sampling
from hwrl.rollout.data import Prompt
from hwrl.rollout.ledger import PromptLease
from hwrl.rollout.reward_workers import RewardWorkers, Scores, unscored
from hwrl.rollout.sleeper import Sleeper
from hwrl.rollout.weight_updater import WeightUpdater

_EVALUATION_TRIES = 3
_ASK_AGAIN_S = 1.0
"""How long a rollouter that has no weights waits before it asks for them again, if those that it asked for failed."""


class LedgerClient(Protocol):
    """What a rollouter needs of the ledger, wherever that lives. Calls do not block; ``lease`` answers later."""

    def lease(self, count: int) -> Future[list[PromptLease]]:
        """Ask for up to ``count`` prompts; the answer comes when there is at least one, or is empty after a while."""
        ...

    def complete(self, groups: Sequence[PromptGroup], stats: dict[str, float]) -> None:
        """Hand in finished groups, with the rollouter's running totals."""
        ...

    def fail(self, lease: PromptLease, reason: str) -> None:
        """Report that a prompt could not be served."""
        ...


class PromptSource(Protocol):
    """Prompts by sequence number."""

    def __getitem__(self, sequence_number: int) -> Prompt: ...


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation: mean metrics over the prompts.

    ``version`` is the oldest of any token's, and ``incarnation`` the trainer's that published the weights.
    """

    version: int
    incarnation: int
    metrics: dict[str, float]


@dataclass(eq=False)
class _Work:
    prompt: Prompt
    responses: list[Response | None]
    lease: PromptLease | None = None  # None: it is part of the evaluation
    scores: Future[Scores] | None = None
    tries: int = 1

    def whole(self) -> list[Response]:
        return [response for response in self.responses if response is not None]


@dataclass
class _Examination:
    """An evaluation under way."""

    prompts: list[Prompt]
    works: list[_Work]
    answer: Future[Evaluation]


class Rollouter:
    """Drives one engine: one call of :meth:`step` is one step of it; :meth:`run` turns until told to stop.

    ``group_size`` responses are generated for each prompt. With ``partial_rollout`` new weights are taken at once,
    between two tokens, and unfinished responses go on with them; without it, no prompt is begun while an update
    waits, and the update is taken when the running ones are finished. A prompt begins when the engine has the weights
    that its lease asks for, not before. Weights of a new incarnation of the trainer end everything that those of the
    last one began: leased prompts are dropped, an evaluation starts again. ``rewards`` scores finished responses;
    the rollouter closes it. With ``sleep_level`` the engine sleeps while it has nothing to do, and wakes when weights
    or prompts come.

    One thread calls ``step``, ``run`` and ``stats``; ``evaluate`` and ``step_s`` may be called from others.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        *,
        ledger: LedgerClient,
        prompts: PromptSource,
        rewards: RewardWorkers,
        sampling: Sampling,
        group_size: int,
        weights: WeightUpdater,
        partial_rollout: bool = True,
        sleep_level: int | None = None,
    ) -> None:
        self.engine = engine
        self._ledger, self._prompts, self._rewards = ledger, prompts, rewards
        self._sampling, self._group_size = sampling, group_size
        self._weights, self._partial_rollout = weights, partial_rollout
        self._sleeper = Sleeper(engine, level=sleep_level)
        self._has_served = False
        self._ask_from_s: float | None = 0.0  # None: weights were asked for, and did not come yet
        self._clock = ActivityClock("idle")
        self._totals = {"tokens": 0.0, "groups": 0.0, "updates": 0.0, "reward_errors": 0.0}
        self._work: dict[int, _Work] = {}
        self._judged: list[_Work] = []
        self._held: list[PromptLease] = []
        self._next_work = 0
        self._asked: Future[list[PromptLease]] | None = None
        self._evaluation: tuple[list[Prompt], Future[Evaluation]] | None = None
        self._examination: _Examination | None = None
        self._done: list[PromptGroup] = []
        self._ended = False
        self._incarnation = weights.incarnation  # of the trainer that published the engine's weights
        self._step_began_s: float | None = None  # None: run has not begun, or is over
        self._guard = threading.Lock()

    # -- what others may call -----------------------------------------------------------------------------------

    def evaluate(self, prompts: Sequence[Prompt]) -> Future[Evaluation]:
        """Generate greedily for ``prompts``, soon, beside the training prompts; the answer comes in the future.

        New weights are taken meanwhile as ever. One evaluation at a time. If :meth:`run` ends before, or has ended, the
        future has an EngineError.
        """
        future: Future[Evaluation] = Future()
        with self._guard:
            if self._ended:
                future.set_exception(_no_evaluation())
            elif self._evaluation is not None or self._examination is not None:
                future.set_exception(InvalidStateError("an evaluation is already under way"))
            else:
                self._evaluation = (list(prompts), future)
        return future

    def stats(self) -> dict[str, float]:
        """Return running totals: tokens, groups, what came and was freed, errors, and the seconds of each activity."""
        seconds = {f"{activity}_s": value for activity, value in self._clock.seconds().items()}
        totals = {**self._totals, **self._weights.totals(), **self._sleeper.totals()}
        return {**totals, **seconds, "version": float(self.engine.version)}

    def step_s(self) -> float:
        """Return for how many seconds the present turn of :meth:`run` has lasted; 0.0 outside of it. Does not block."""
        began_s = self._step_began_s
        return 0.0 if began_s is None else time.monotonic() - began_s

    def run(self, stop: threading.Event) -> None:
        """Turn until ``stop`` is set; then drop what is unfinished, whose leases the ledger gives to others."""
        try:
            while not stop.is_set():
                self._step_began_s = time.monotonic()
                if not self.step():
                    stop.wait(0.002)
        finally:
            self._step_began_s = None
            self._refuse_evaluations()
            self._rewards.close()
            self.engine.abort()
            self._work.clear()

    # -- one turn -----------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Take weights if they wait, begin prompts if there is room, generate a token; False if nothing was there."""
        update_waits = self._weights.poll()
        if update_waits and (self._partial_rollout or not self.engine.pending()):
            self._take_weights()
            update_waits = False
        if not update_waits:
            self._begin_work()
        generated = self._generate()
        self._collect_judged()
        self._hand_in()
        self._rest()
        return generated

    def _generate(self) -> bool:
        if not self.engine.pending():
            return False
        with self._clock.during("generate"):
            completions = self.engine.step()
        for completion in completions:
            self._finish(completion)
        return True

    def _hand_in(self) -> None:
        if self._done:
            self._ledger.complete(self._done, self.stats())
            self._done = []

    def _take_weights(self) -> None:
        with self._clock.during("update"):
            self._sleeper.wake(cache=False)
            updated = self._weights.update()
            self._sleeper.wake()
        self._totals["updates"] += updated
        if updated:
            self._ask_from_s = 0.0
            if self._weights.incarnation != self._incarnation:
                self._begin_anew()
        elif self._ask_from_s is None:
            self._ask_from_s = time.monotonic() + _ASK_AGAIN_S

    def _begin_anew(self) -> None:
        """Drop what weights of another incarnation began: its leases are over, and an evaluation must not mix both."""
        self._incarnation = self._weights.incarnation
        self.engine.abort()
        self._work.clear()
        self._judged, self._done = [], []
        self._held = [lease for lease in self._held if lease.incarnation == self._incarnation]
        with self._guard:
            if self._examination is not None:
                self._evaluation = (self._examination.prompts, self._examination.answer)
                self._examination = None

    def _rest(self) -> None:
        """Let the engine sleep if nothing is to be done, and nothing was for a while."""
        idle = self._has_served and not (self.engine.pending() or self._held or self._evaluation)
        if self._sleeper.is_due(idle=idle):
            with self._clock.during("sleep"):
                self._sleeper.sleep()
                self._weights.release()

    def _begin_work(self) -> None:
        """Begin what waits, as far as the engine has the weights for it; wake it, and ask for those, if it has not."""
        self._has_served |= self.engine.version >= 0
        if not self._has_served:
            return
        self._ask_for_prompts()
        if self._held or self._evaluation is not None:
            if self._sleeper.asleep:
                with self._clock.during("sleep"):
                    self._sleeper.wake()
            if self.engine.version < 0 and self._ask_from_s is not None and time.monotonic() >= self._ask_from_s:
                self._weights.request()
                self._ask_from_s = None
        if self.engine.version >= 0:
            self._begin_evaluation()
            self._begin_prompts()

    def _ask_for_prompts(self) -> None:
        if self._asked is None and not self._held:
            room = self.engine.capacity() // self._group_size
            if room > 0:
                self._asked = self._ledger.lease(room)
        if self._asked is not None and self._asked.done():
            self._held, self._asked = self._asked.result(), None

    def _begin_prompts(self) -> None:
        begun = [lease for lease in self._held if self._has_weights_for(lease)]
        self._held = [lease for lease in self._held if lease not in begun and lease.incarnation >= self._incarnation]
        for lease in begun:
            self._begin(self._prompts[lease.sequence_number], self._sampling, size=self._group_size, lease=lease)

    def _has_weights_for(self, lease: PromptLease) -> bool:
        return lease.incarnation == self._incarnation and lease.version <= self.engine.version

    def _begin(self, prompt: Prompt, sampling: Sampling, *, size: int, lease: PromptLease | None = None) -> _Work:
        work, self._next_work = self._next_work, self._next_work + 1
        begun = self._work[work] = _Work(prompt, [None] * size, lease)
        first = work * self._group_size
        if prompt.max_new_tokens is not None:
            sampling = replace(sampling, max_new_tokens=min(prompt.max_new_tokens, sampling.max_new_tokens))
        self.engine.submit([GenerationRequest(first + i, prompt.token_ids, sampling) for i in range(size)])
        return begun

    def _finish(self, completion: Completion) -> None:
        number, place = divmod(completion.request_id, self._group_size)
        work = self._work[number]
        work.responses[place] = completion.response
        self._totals["tokens"] += len(completion.response.token_ids)
        if len(work.whole()) < len(work.responses):
            return
        del self._work[number]
        work.scores = self._rewards.score(work.prompt, work.whole())
        self._judged.append(work)

    def _collect_judged(self) -> None:
        """Put scored groups on the pile for the ledger, report failed ones, end an evaluation that is complete."""
        self._rewards.expire()
        done = [work for work in self._judged if _is_judged(work)]
        self._judged = [work for work in self._judged if work not in done]
        for work in done:
            scores = _scores(work)
            self._totals["reward_errors"] += scores.errors
            if work.lease is not None and scores.failure is not None:
                self._ledger.fail(work.lease, scores.failure)
            elif work.lease is not None:
                self._totals["groups"] += 1
                self._done.append(_group(work, work.lease, scores))
        self._end_evaluation()

    # -- evaluation ---------------------------------------------------------------------------------------------

    def _begin_evaluation(self) -> None:
        if self._evaluation is None:
            return
        greedy = replace(self._sampling, temperature=0.0)
        with self._guard:
            (prompts, answer), self._evaluation = self._evaluation, None
            self._examination = _Examination(prompts, [], answer)  # first: who waits is told if the engine fails
            self._examination.works.extend(self._begin(prompt, greedy, size=1) for prompt in prompts)

    def _refuse_evaluations(self) -> None:
        """Tell who waits for an evaluation, and who asks for one from now on, that none will come."""
        with self._guard:
            self._ended = True
            if self._evaluation is not None:
                self._evaluation[1].set_exception(_no_evaluation())
            if self._examination is not None:
                self._examination.answer.set_exception(_no_evaluation())
            self._evaluation = self._examination = None

    def _end_evaluation(self) -> None:
        """Answer the evaluation if all of it is judged."""
        if self._examination is None or not all(_is_judged(work) for work in self._examination.works):
            return
        works, answer = self._examination.works, self._examination.answer
        if self._score_again(works):
            return
        with self._guard:
            self._examination = None
        scores = [_scores(work) for work in works]
        if any(one.failure is not None for one in scores):
            answer.set_exception(unscored(scores))
        else:
            answer.set_result(self._evaluation_of(works, scores))

    def _score_again(self, works: Sequence[_Work]) -> bool:
        """Score the prompts of an evaluation again that failed, a few times; False if none is left to try."""
        again = [work for work in works if _scores(work).failure is not None and work.tries < _EVALUATION_TRIES]
        for work in again:
            work.tries += 1
            work.scores = self._rewards.score(work.prompt, work.whole())
        self._judged += again
        return bool(again)

    def _evaluation_of(self, works: Sequence[_Work], scores: Sequence[Scores]) -> Evaluation:
        version = min(int(response.versions.min()) for work in works for response in work.whole())
        return Evaluation(version, self._incarnation, _means([metrics for one in scores for metrics in one.metrics]))


def _no_evaluation() -> EngineError:
    return EngineError(
        "there is no evaluation", why="the rollouter has ended", fix="look why, or evaluate with another replica"
    )


def _is_judged(work: _Work) -> bool:
    return work.scores is not None and work.scores.done()


def _scores(work: _Work) -> Scores:
    assert work.scores is not None, "only what is judged is looked at"
    return work.scores.result()


def _group(work: _Work, lease: PromptLease, scores: Scores) -> PromptGroup:
    return PromptGroup.join(
        work.whole(),
        sequence_number=lease.sequence_number,
        lease_id=lease.lease_id,
        incarnation=lease.incarnation,
        prompt_ids=work.prompt.token_ids,
        rewards=[metrics["reward"] for metrics in scores.metrics],
        metrics=_means(scores.metrics),
    )


def _means(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    names = sorted(set().union(*rows)) if rows else []
    return {name: float(np.mean([row[name] for row in rows if name in row])) for name in names}
