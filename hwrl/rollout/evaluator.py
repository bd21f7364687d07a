"""An evaluation, which runs beside the training prompts: its request, its retries, its result."""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from itertools import islice
from math import comb

from hwrl.errors import DataError, EngineError
from hwrl.rollout.data import Prompt
from hwrl.rollout.generation import PendingGroup, mean_metrics
from hwrl.rollout.reward_workers import Scorer

_ATTEMPTS = 3


@dataclass(frozen=True)
class EvaluatedPrompt:
    """A prompt of the data set ``source``, with the metrics of each sample; empty if it could not be scored."""

    source: str
    metrics: list[dict[str, float]]


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation, or of one replica's part of it.

    ``oldest_version`` is the oldest version of any token, None without a token: generation failed for all prompts. All
    tokens come from the same ``incarnation`` of the trainer. ``failure`` says why a prompt could not be scored; it is
    empty if all were.
    """

    oldest_version: int | None
    incarnation: int
    prompts: list[EvaluatedPrompt]
    failure: str = ""

    @property
    def version(self) -> int:
        """The oldest version of any token. Raises DataError without a token: no weights were evaluated."""
        if self.oldest_version is None:
            raise DataError(
                f"no response to any of {len(self.prompts)} evaluation prompts could be generated",
                why=self.failure,
                fix="fix the cause, in the workflow for example; rollout.on_failure=skip goes on without single "
                "prompts only",
            )
        return self.oldest_version

    @classmethod
    def join(cls, parts: Sequence[Evaluation]) -> Evaluation:
        """Return the whole of several parts, with the oldest version and incarnation among them."""
        versions = [part.oldest_version for part in parts if part.oldest_version is not None]
        return cls(
            min(versions, default=None),
            min(part.incarnation for part in parts),
            [prompt for part in parts for prompt in part.prompts],
            next((part.failure for part in parts if part.failure), ""),
        )

    def metrics(self, *, pass_reward: float = 1.0) -> dict[str, float]:
        """Return the mean of each metric over all samples. A named data set has its own means, as ``sums/reward``.

        With several samples of each prompt there is ``pass@k``: the unbiased estimate of the probability that at least
        one of k samples has a reward of ``pass_reward`` or more. k is each power of two up to the number of samples,
        and that number. ``unjudged`` counts the prompts that could not be scored, if there are any.
        """
        found = {}
        for source in sorted({prompt.source for prompt in self.prompts}):
            prompts = [prompt for prompt in self.prompts if prompt.source == source]
            prefix = f"{source}/" if source else ""
            found.update({f"{prefix}{name}": value for name, value in _metrics_of(prompts, pass_reward).items()})
        return found


def _metrics_of(prompts: Sequence[EvaluatedPrompt], pass_reward: float) -> dict[str, float]:
    judged = [prompt.metrics for prompt in prompts if prompt.metrics]
    metrics = mean_metrics([row for rows in judged for row in rows])
    counts = [(len(rows), sum(row["reward"] >= pass_reward for row in rows)) for rows in judged]
    fewest = min((count for count, _ in counts), default=1)
    powers = [1 << power for power in range(fewest.bit_length())]
    for k in sorted({*powers, fewest}) if fewest > 1 else ():
        metrics[f"pass@{k}"] = sum(pass_at_k(count, passed, k) for count, passed in counts) / len(counts)
    if len(judged) < len(prompts):
        metrics["unjudged"] = float(len(prompts) - len(judged))
    return metrics


def pass_at_k(n: int, passed: int, k: int) -> float:
    """Return the unbiased estimate of the probability that at least one of ``k`` samples passes.

    ``passed`` of ``n`` samples passed; ``k`` is at most ``n``. Chen et al., arXiv:2107.03374, equation 1.

    >>> pass_at_k(4, 1, 2)
    0.5
    """
    return 1.0 - comb(n - passed, k) / comb(n, k)


@dataclass
class _CurrentEvaluation:
    prompts: list[Prompt]
    answer: Future[Evaluation]
    places: int
    waiting: deque[tuple[int, int]]  # the groups to start: the prompt's index, and the number of samples
    groups: list[tuple[int, PendingGroup]] = field(default_factory=list)  # the started ones, with the prompt's index
    running: list[PendingGroup] = field(default_factory=list)  # those that are being generated
    attempt: int = 1


class Evaluator:
    """Holds at most one evaluation, of ``samples`` samples of each prompt. The rollouter calls it, from one thread:

    request()  from any thread: hand in prompts; the future gets the result
    start()    begin to generate, or go on; called when the engine has weights
    restart()  forget what was generated; called when the trainer's incarnation changes
    collect()  once all prompts are scored or have failed: score the failed ones again, or give the result
    close()    fail the present evaluation and all later requests

    A prompt's samples come in groups of at most ``group_size``. Samples above the evaluation's number of places wait. A
    prompt that cannot be scored is left out if ``skips`` is true, even if none is left; else the evaluation has failed.
    """

    def __init__(self, rewards: Scorer, *, samples: int = 1, group_size: int = 1, skips: bool = False) -> None:
        self._rewards, self._samples, self._group_size, self._skips = rewards, samples, group_size, skips
        self._lock = threading.Lock()
        self._current: _CurrentEvaluation | None = None
        self._closed = False

    @property
    def is_waiting(self) -> bool:
        """Whether samples of a requested evaluation wait for their start."""
        current = self._current
        return current is not None and bool(current.waiting)

    @property
    def running(self) -> int:
        """The number of samples that are being generated."""
        current = self._current
        if current is None:
            return 0
        current.running = [group for group in current.running if not (group.is_generated or group.is_scored)]
        return sum(group.size - len(group.samples) for group in current.running)

    @property
    def places(self) -> int:
        """The number of samples that may be generated at once. It falls to the running ones when none wait."""
        current = self._current
        return current.places if current is not None and current.waiting else self.running

    def request(self, prompts: Sequence[Prompt], *, places: int = sys.maxsize) -> Future[Evaluation]:
        """Request an evaluation of ``prompts``, with at most ``places`` samples at once. Does not block.

        The future fails with InvalidStateError if there is another evaluation, with EngineError after :meth:`close`,
        and with DataError if there are no prompts. It cannot be cancelled.
        """
        answer: Future[Evaluation] = Future()
        answer.set_running_or_notify_cancel()  # so nobody can cancel it before its result
        prompts = list(prompts)
        with self._lock:
            if self._closed:
                answer.set_exception(_no_evaluation())
            elif self._current is not None:
                answer.set_exception(InvalidStateError("an evaluation is already under way"))
            elif not prompts:
                why, fix = "the evaluation has no prompts", "give at least one prompt, or request no evaluation"
                answer.set_exception(DataError("there is nothing to evaluate", why=why, fix=fix))
            else:
                self._current = self._new(prompts, answer, places)
        return answer

    def _new(self, prompts: list[Prompt], answer: Future[Evaluation], places: int) -> _CurrentEvaluation:
        whole, rest = divmod(self._samples, size := min(self._group_size, places))
        sizes = [size] * whole + [rest] * bool(rest)
        waiting = deque((index, size) for index in range(len(prompts)) for size in sizes)
        return _CurrentEvaluation(prompts, answer, places, waiting)

    @property
    def is_active(self) -> bool:
        """Whether there is an evaluation, started or not."""
        return self._current is not None

    def start(self, generate: Callable[[PendingGroup], None], *, room: int = sys.maxsize) -> None:
        """Start waiting groups, up to ``room`` samples. ``generate(group)`` begins to generate one."""
        running = self.running
        with self._lock:
            current = self._current
            while current is not None and current.waiting:
                index, size = current.waiting[0]
                if size > min(room, current.places - running):
                    return
                current.waiting.popleft()
                group = PendingGroup(current.prompts[index], size)
                generate(group)
                current.groups.append((index, group))
                current.running.append(group)
                room, running = room - size, running + size

    def restart(self) -> None:
        """Forget the groups of the present evaluation; it waits for its start again."""
        with self._lock:
            if self._current is not None:
                self._current = self._new(self._current.prompts, self._current.answer, self._current.places)

    def collect(self, *, incarnation: int) -> list[PendingGroup]:
        """Once all prompts are scored or have failed, score the failed ones again, or give the result.

        Returns the groups in scoring again; a prompt has three attempts in all. ``incarnation`` is the trainer's
        incarnation of the engine's weights.
        """
        current = self._current
        if current is None or current.waiting or not all(group.is_scored for _, group in current.groups):
            return []
        failed = [(index, group) for index, group in current.groups if group.result().failure is not None]
        if failed and current.attempt < _ATTEMPTS:
            current.attempt += 1
            for _, group in failed:
                group.score(self._rewards)
            return [group for _, group in failed]
        # If this raises, the evaluation stays the current one, and close() fails its future.
        outcome = self._outcome(current, failed, incarnation)
        with self._lock:
            self._current = None
        if isinstance(outcome, Evaluation):
            current.answer.set_result(outcome)
        else:
            current.answer.set_exception(outcome)
        return []

    def _outcome(
        self, current: _CurrentEvaluation, failed: Sequence[tuple[int, PendingGroup]], incarnation: int
    ) -> Evaluation | DataError:
        groups = current.groups
        unjudged = {index for index, _ in failed}
        segments = [part for _, group in groups for row in group.trajectories for part in row.segments]
        versions = [int(part.versions.min()) for part in segments if part.versions is not None]
        failure = str(failed[0][1].result().failure) if failed else ""
        if failed and not self._skips:
            return DataError(
                f"{len(unjudged)} of {len(current.prompts)} evaluation prompts could not be scored",
                why=failure,
                fix="fix the reward function, or raise reward.timeout_s; reward_errors in the metrics counts such "
                "errors; with rollout.on_failure=skip the evaluation goes on without them",
            )
        metrics: list[list[dict[str, float]]] = [[] for _ in current.prompts]
        for index, group in groups:
            if index not in unjudged:
                rows = iter(group.metrics())
                metrics[index] += [mean_metrics(islice(rows, len(sample))) for sample in group.samples]
        prompts = [EvaluatedPrompt(prompt.source, rows) for prompt, rows in zip(current.prompts, metrics, strict=True)]
        return Evaluation(min(versions, default=None), incarnation, prompts, failure)

    def close(self) -> None:
        """Fail the present evaluation and all later requests with an EngineError."""
        with self._lock:
            self._closed = True
            if self._current is not None:
                self._current.answer.set_exception(_no_evaluation())
            self._current = None


def _no_evaluation() -> EngineError:
    return EngineError(
        "there is no evaluation",
        why="the rollouter has ended",
        fix="look for the reason in its log, or evaluate with another replica",
    )
