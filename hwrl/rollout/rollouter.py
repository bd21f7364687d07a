"""The rollouter: leases prompts, generates, judges, and takes new weights between two tokens."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from hwrl.clock import ActivityClock
from hwrl.errors import DataError, EngineError
from hwrl.rollout.data import Prompt
from hwrl.rollout.engine import Completion, GenerationRequest, RolloutEngine, Sampling
from hwrl.rollout.groups import PromptGroup, Response
from hwrl.rollout.inlet import WeightsInlet
from hwrl.rollout.ledger import Lease
from hwrl.rollout.reward import Reward, judge
from hwrl.rollout.sleeper import Sleeper

_ASK_AGAIN_S = 1.0
"""How long a rollouter that has no weights waits before it asks for them again, if those that it asked for failed."""


class LedgerClient(Protocol):
    """What a rollouter needs of the ledger, wherever that lives. Calls do not block; ``lease`` answers later."""

    def lease(self, count: int) -> Future[list[Lease]]:
        """Ask for up to ``count`` prompts; the answer comes when there is at least one, or is empty after a while."""
        ...

    def complete(self, groups: Sequence[PromptGroup], stats: dict[str, float]) -> None:
        """Hand in finished groups, with the rollouter's running totals."""
        ...

    def fail(self, lease: Lease, reason: str) -> None:
        """Report that a prompt could not be served."""
        ...


class PromptSource(Protocol):
    """Prompts by sequence number."""

    def __getitem__(self, sequence_number: int) -> Prompt: ...


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation: mean figures over the prompts; ``version`` is the oldest of any token's."""

    version: int
    figures: dict[str, float]


@dataclass(eq=False)
class _Work:
    prompt: Prompt
    responses: list[Response | None]
    lease: Lease | None = None  # None: it is part of the evaluation
    figures: list[dict[str, float]] = field(default_factory=list)
    errors: int = 0
    judging: Future[str | None] | None = None

    def whole(self) -> list[Response]:
        return [response for response in self.responses if response is not None]


@dataclass
class _Examination:
    """An evaluation under way."""

    works: list[_Work]
    answer: Future[Evaluation]


class Rollouter:
    """Drives one engine: one call of :meth:`turn` is one step of it; :meth:`run` turns until told to stop.

    ``group_size`` responses are generated for each prompt. With ``partial_rollout`` new weights are taken at once,
    between two tokens, and unfinished responses go on with them; without it, no prompt is begun while an update
    waits, and the update is taken when the running ones are finished. A prompt begins when the engine has the weights
    that its lease asks for, not before. ``decode`` turns token ids into the text that ``reward`` judges, in one of
    ``reward_threads`` threads, so that generation and weight updates never wait for it; a reward function that raises
    is tried ``reward_attempts`` times, then the prompt has failed. With ``sleep_level`` the engine sleeps while it has
    nothing to do, and wakes when weights or prompts come.

    One thread calls ``turn``, ``run`` and ``stats``; ``evaluate`` may be called from others.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        *,
        ledger: LedgerClient,
        prompts: PromptSource,
        reward: Reward,
        decode: Callable[[Sequence[int]], str],
        sampling: Sampling,
        group_size: int,
        weights: WeightsInlet,
        partial_rollout: bool = True,
        sleep_level: int | None = None,
        reward_attempts: int = 3,
        reward_threads: int = 4,
    ) -> None:
        self.engine = engine
        self._ledger, self._prompts, self._reward, self._decode = ledger, prompts, reward, decode
        self._sampling, self._group_size = sampling, group_size
        self._weights, self._partial_rollout = weights, partial_rollout
        self._sleeper = Sleeper(engine, level=sleep_level)
        self._has_served = False
        self._ask_from_s: float | None = 0.0  # None: weights were asked for, and did not come yet
        self._reward_attempts = reward_attempts
        self._clock = ActivityClock("idle")
        self._totals = {"tokens": 0.0, "groups": 0.0, "updates": 0.0, "reward_errors": 0.0}
        self._judges = ThreadPoolExecutor(reward_threads, thread_name_prefix="reward")
        self._work: dict[int, _Work] = {}
        self._judged: list[_Work] = []
        self._held: list[Lease] = []
        self._next_work = 0
        self._asked: Future[list[Lease]] | None = None
        self._evaluation: tuple[list[Prompt], Future[Evaluation]] | None = None
        self._examination: _Examination | None = None
        self._done: list[PromptGroup] = []
        self._ended = False
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

    def run(self, stop: threading.Event) -> None:
        """Turn until ``stop`` is set; then drop what is unfinished, whose leases the ledger gives to others."""
        try:
            while not stop.is_set():
                if not self.turn():
                    stop.wait(0.002)
        finally:
            self._refuse_evaluations()
            self._judges.shutdown(wait=False, cancel_futures=True)
            self.engine.abort()
            self._work.clear()

    # -- one turn -----------------------------------------------------------------------------------------------

    def turn(self) -> bool:
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
        elif self._ask_from_s is None:
            self._ask_from_s = time.monotonic() + _ASK_AGAIN_S

    def _rest(self) -> None:
        """Let the engine sleep if nothing is to be done, and nothing was for a while."""
        idle = self._has_served and not (self.engine.pending() or self._held or self._evaluation)
        if self._sleeper.is_due(idle=idle):
            with self._clock.during("sleep"):
                self._sleeper.sleep()
                self._weights.rest()

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
                self._weights.ask()
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
        begun = [lease for lease in self._held if lease.version <= self.engine.version]
        self._held = [lease for lease in self._held if lease.version > self.engine.version]
        for lease in begun:
            self._begin(self._prompts[lease.sequence_number], self._sampling, size=self._group_size, lease=lease)

    def _begin(self, prompt: Prompt, sampling: Sampling, *, size: int, lease: Lease | None = None) -> _Work:
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
        work.judging = self._judges.submit(self._judge, work)
        self._judged.append(work)

    def _collect_judged(self) -> None:
        """Put finished groups on the pile for the ledger, report failed ones, end an evaluation that is complete."""
        done = [work for work in self._judged if work.judging is not None and work.judging.done()]
        self._judged = [work for work in self._judged if work not in done]
        for work in done:
            assert work.judging is not None  # only those were chosen
            reason = work.judging.result()
            self._totals["reward_errors"] += work.errors
            if work.lease is not None and reason is not None:
                self._ledger.fail(work.lease, reason)
            elif work.lease is not None:
                self._totals["groups"] += 1
                self._done.append(_group(work, work.lease))
        self._end_evaluation()

    def _judge(self, work: _Work) -> str | None:
        """Fill in the figures of all responses; return why that failed, or None. Runs in a thread of its own."""
        for response in work.whole():
            reason = self._judge_one(work, self._decode(response.token_ids.tolist()))
            if reason is not None:
                return reason
        return None

    def _judge_one(self, work: _Work, text: str) -> str | None:
        reason = None
        for _ in range(self._reward_attempts):
            try:
                work.figures.append(
                    judge(self._reward, prompt=work.prompt.text, response=text, answer=work.prompt.answer)
                )
            except (Exception, SystemExit) as exc:  # noqa: BLE001 - the user's code may do anything; it is reported
                work.errors += 1
                reason = f"the reward function raised {exc!r} for the response {text!r}"
            else:
                return None
        return reason

    # -- evaluation ---------------------------------------------------------------------------------------------

    def _begin_evaluation(self) -> None:
        if self._evaluation is None:
            return
        greedy = replace(self._sampling, temperature=0.0)
        with self._guard:
            (prompts, answer), self._evaluation = self._evaluation, None
            self._examination = _Examination([], answer)  # first: who waits is told if the engine fails
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
        unjudged = sum(not work.figures for work in works)
        evaluation = None if unjudged else _evaluation_of(works)
        with self._guard:
            self._examination = None
        if evaluation is not None:
            answer.set_result(evaluation)
            return
        answer.set_exception(
            DataError(
                f"{unjudged} of {len(works)} evaluation prompts could not be judged",
                why="the reward function raised",
                fix="mend the reward function; reward_errors in the metrics counts such errors",
            )
        )


def _evaluation_of(works: Sequence[_Work]) -> Evaluation:
    version = min(int(response.versions.min()) for work in works for response in work.whole())
    return Evaluation(version, _means([figures for work in works for figures in work.figures]))


def _no_evaluation() -> EngineError:
    return EngineError(
        "there is no evaluation", why="the rollouter has ended", fix="look why, or evaluate with another replica"
    )


def _is_judged(work: _Work) -> bool:
    return work.judging is not None and work.judging.done()


def _group(work: _Work, lease: Lease) -> PromptGroup:
    return PromptGroup.join(
        work.whole(),
        sequence_number=lease.sequence_number,
        lease_id=lease.lease_id,
        prompt_ids=work.prompt.token_ids,
        rewards=[figures["reward"] for figures in work.figures],
        metrics=_means(work.figures),
    )


def _means(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    names = sorted(set().union(*rows)) if rows else []
    return {name: float(np.mean([row[name] for row in rows if name in row])) for name in names}
