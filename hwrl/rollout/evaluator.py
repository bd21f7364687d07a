"""An evaluation beside the training prompts: its request, its retries, its answer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass

from hwrl.errors import DataError, EngineError
from hwrl.rollout.data import Prompt
from hwrl.rollout.generation import PendingGroup, mean_metrics
from hwrl.rollout.reward_workers import Scorer

_ATTEMPTS = 3


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation: ``metrics`` are means over the prompts.

    ``version`` is the oldest version of any token. ``incarnation`` is the trainer's, for all tokens.
    """

    version: int
    incarnation: int
    metrics: dict[str, float]


@dataclass
class _CurrentEvaluation:
    prompts: list[Prompt]
    answer: Future[Evaluation]
    groups: list[PendingGroup] | None = None  # None: not started
    attempt: int = 1


class Evaluator:
    """Holds at most one evaluation. The rollouter drives it from its thread:

    request()  from any thread: hand in prompts; the future has the result
    start()    generate the prompts; called when the engine has weights
    restart()  forget what was generated; called when the trainer's incarnation changes
    collect()  when all prompts are scored: score failed ones again, or answer
    close()    fail the present evaluation and all later requests
    """

    def __init__(self, rewards: Scorer) -> None:
        self._rewards = rewards
        self._lock = threading.Lock()
        self._current: _CurrentEvaluation | None = None
        self._closed = False

    @property
    def is_waiting(self) -> bool:
        """Whether an evaluation is requested and not started."""
        current = self._current
        return current is not None and current.groups is None

    def request(self, prompts: Sequence[Prompt]) -> Future[Evaluation]:
        """Request an evaluation of ``prompts``. Does not block.

        The future has an InvalidStateError if another evaluation is under way, an EngineError after :meth:`close`, and
        a DataError if there are no prompts. It cannot be cancelled.
        """
        answer: Future[Evaluation] = Future()
        answer.set_running_or_notify_cancel()  # the rollouter's thread must be able to answer
        prompts = list(prompts)
        with self._lock:
            if self._closed:
                answer.set_exception(_no_evaluation())
            elif self._current is not None:
                answer.set_exception(InvalidStateError("an evaluation is already under way"))
            elif not prompts:
                answer.set_exception(_no_prompts())
            else:
                self._current = _CurrentEvaluation(prompts, answer)
        return answer

    def start(self, generate: Callable[[Prompt], PendingGroup]) -> None:
        """Call ``generate`` for each prompt of the waiting evaluation, if there is one."""
        with self._lock:
            if self._current is not None and self._current.groups is None:
                self._current.groups = [generate(prompt) for prompt in self._current.prompts]

    def restart(self) -> None:
        """Let a started evaluation wait for its start again, with the same prompts."""
        with self._lock:
            if self._current is not None:
                self._current = _CurrentEvaluation(self._current.prompts, self._current.answer)

    def collect(self, *, incarnation: int) -> list[PendingGroup]:
        """Answer the evaluation if all its prompts are scored. Return the failed groups that are scored once more.

        ``incarnation`` is the trainer's that published the engine's weights.
        """
        current = self._current
        if current is None or current.groups is None or not all(group.is_scored for group in current.groups):
            return []
        failed = [group for group in current.groups if group.result().failure is not None]
        if failed and current.attempt < _ATTEMPTS:
            current.attempt += 1
            for group in failed:
                group.score(self._rewards)
            return failed
        # If this raises, the evaluation is still the current one, and close() answers it.
        outcome = _error_of(current.groups) if failed else _evaluation_of(current.groups, incarnation=incarnation)
        with self._lock:
            self._current = None
        if isinstance(outcome, Evaluation):
            current.answer.set_result(outcome)
        else:
            current.answer.set_exception(outcome)
        return []

    def close(self) -> None:
        """Fail the present evaluation and all later requests with an EngineError."""
        with self._lock:
            self._closed = True
            if self._current is not None:
                self._current.answer.set_exception(_no_evaluation())
            self._current = None


def _evaluation_of(groups: Sequence[PendingGroup], *, incarnation: int) -> Evaluation:
    rows = [row for group in groups for row in group.trajectories]
    version = min(int(part.versions.min()) for row in rows for part in row.segments if part.versions is not None)
    metrics = mean_metrics([row for group in groups for row in group.metrics()])
    return Evaluation(version, incarnation, metrics)


def _error_of(groups: Sequence[PendingGroup]) -> DataError:
    failures = [reason for group in groups if (reason := group.result().failure) is not None]
    return DataError(
        f"{len(failures)} of {len(groups)} evaluation prompts could not be scored",
        why=failures[0],
        fix="fix the reward function, or raise reward.timeout_s; reward_errors in the metrics counts such errors",
    )


def _no_prompts() -> DataError:
    return DataError(
        "there is nothing to evaluate",
        why="the evaluation has no prompts",
        fix="give at least one prompt, or request no evaluation",
    )


def _no_evaluation() -> EngineError:
    return EngineError(
        "there is no evaluation",
        why="the rollouter has ended",
        fix="look for the reason in its log, or evaluate with another replica",
    )
