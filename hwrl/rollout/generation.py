"""Turn prompts into requests to the engine, and its completions into groups of trajectories."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

import numpy as np

from hwrl.interfaces import Completion, GenerationRequest, Ints, PromptGroup, RolloutEngine, Sampling, Trajectory
from hwrl.rollout.data import Prompt
from hwrl.rollout.ledger import PromptLease
from hwrl.rollout.reward import Scores
from hwrl.rollout.reward_workers import Scorer
from hwrl.rollout.tracing import SpanLog


@dataclass(eq=False)
class PendingGroup:
    """A prompt with its samples, from the first request to the last score.

    An evaluation's prompt has no ``lease``. A prompt without a trace has no ``spans``. ``scores`` is None until
    scoring begins, or until the group has failed.
    """

    prompt: Prompt
    size: int
    lease: PromptLease | None = None
    scores: Future[Scores] | None = None
    spans: SpanLog | None = None
    _scoring_unix_s: float | None = None
    _samples: dict[int, Sequence[Trajectory]] = field(default_factory=dict)

    @property
    def samples(self) -> list[Sequence[Trajectory]]:
        """The generated samples in order, each with its trajectories."""
        return [self._samples[index] for index in sorted(self._samples)]

    @property
    def trajectories(self) -> list[Trajectory]:
        """The trajectories of all generated samples, in order."""
        return [trajectory for sample in self.samples for trajectory in sample]

    @property
    def is_generated(self) -> bool:
        """Whether all samples are generated."""
        return len(self._samples) == self.size

    @property
    def is_scored(self) -> bool:
        """Whether the group has its scores, or has failed."""
        return self.scores is not None and self.scores.done()

    def result(self) -> Scores:
        """Return the scores. Call it only if :attr:`is_scored`."""
        assert self.is_scored and self.scores is not None, "ask is_scored first"
        return self.scores.result()

    def metrics(self) -> list[dict[str, float]]:
        """Return the metrics of each trajectory: its own and the reward's. Call it only if :attr:`is_scored`."""
        scored = zip(self.trajectories, self.result().metrics, strict=True)
        return [{**row.metrics, **metrics} for row, metrics in scored]

    def cancel(self) -> None:
        """Tell the reward workers to skip this group."""
        if self.scores is not None:
            self.scores.cancel()

    def add(self, index: int, sample: Sequence[Trajectory]) -> None:
        """Add the generated sample ``index`` with its trajectories."""
        self._samples[index] = sample

    def score(self, scorer: Scorer) -> None:
        """Take the trajectories' own rewards as scores; without any, let ``scorer`` begin. Does not block.

        A group that failed in generation stays failed.
        """
        if not self.is_generated:
            return
        rows = self.trajectories
        own = [row.reward for row in rows if row.reward is not None]
        if not own:
            self._scoring_unix_s = time.time()
            self.scores = scorer.score(self.prompt, [row.response_ids for row in rows])
        elif len(own) < len(rows):
            self.fail(f"{len(own)} of {len(rows)} trajectories have a reward; the workflow must reward all or none")
        else:
            self.scores = _done(Scores([{"reward": reward} for reward in own]))

    def fail(self, reason: str) -> None:
        """Let the group fail: it counts as scored, with ``reason`` as its failure."""
        self.scores = _done(Scores(failure=reason))

    def to_prompt_group(self, lease: PromptLease) -> PromptGroup:
        """Return the scored group in the form for the ledger; ``lease`` is its lease."""
        metrics = self.metrics()
        if self.spans is not None and self._scoring_unix_s is not None:
            self.spans.add("reward", {"mean": mean_metrics(metrics)["reward"]}, begin_unix_s=self._scoring_unix_s)
        return PromptGroup.of_samples(
            self.samples,
            sequence_number=lease.sequence_number,
            lease_id=lease.lease_id,
            incarnation=lease.incarnation,
            rewards=[row["reward"] for row in metrics],
            metrics=mean_metrics(metrics),
            spans=() if self.spans is None else self.spans.spans(),
        )


class NoRewards:
    """The scorer of a run without a reward function: its workflow must reward each trajectory, or the group fails."""

    def score(self, prompt: Prompt, responses: Sequence[Ints]) -> Future[Scores]:
        return _done(Scores(failure="the workflow gave no reward, and reward.function is not set"))

    def wait_until_ready(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class SampleGenerator(ABC):
    """Generates the samples of groups on an engine. One thread calls it."""

    tokens: int = 0
    """Tokens of all responses so far."""

    @abstractmethod
    def room(self) -> int:
        """Return how many more samples can start now; 0 or less if samples already wait."""

    @abstractmethod
    def pending(self) -> int:
        """Return the number of unfinished groups."""

    @abstractmethod
    def has_work(self) -> bool:
        """Return whether :meth:`step` would do something now."""

    @abstractmethod
    def start(self, group: PendingGroup, sampling: Sampling) -> None:
        """Begin to generate the samples of ``group``. Does not block.

        The prompt's own limit on new tokens applies if it is lower than the limit of ``sampling``. The spans of a
        traced prompt go into ``group.spans``.
        """

    @abstractmethod
    def step(self) -> list[PendingGroup]:
        """Do one step of the engine; return the groups that became complete or failed. Blocks until the step ends."""

    @abstractmethod
    def leases(self) -> list[PromptLease]:
        """Return the leases of the unfinished groups."""

    def has_progress(self, *, generated: bool) -> bool:
        """Return whether the groups made progress since the last call. A replica without progress counts as hung.

        ``generated`` says whether :meth:`step` returned since then. It returns with a new token, so that is progress.
        """
        return generated

    @abstractmethod
    def drop(self) -> None:
        """Abort all groups."""

    @abstractmethod
    def close(self) -> None:
        """Abort all groups, and end the generator's threads and servers."""


class GroupGenerator(SampleGenerator):
    """The generator of single turns: a sample is one response. A group has at most ``group_size`` samples.

    Sample ``i`` of the group with number ``n`` is the engine's request ``n * group_size + i``.
    """

    def __init__(self, engine: RolloutEngine, *, group_size: int) -> None:
        self._engine, self._group_size = engine, group_size
        self._groups: dict[int, PendingGroup] = {}
        self._next_number = 0

    def room(self) -> int:
        return self._engine.capacity()

    def pending(self) -> int:
        return len(self._groups)

    def has_work(self) -> bool:
        return self._engine.pending() > 0

    def start(self, group: PendingGroup, sampling: Sampling) -> None:
        number, self._next_number = self._next_number, self._next_number + 1
        self._groups[number] = group
        prompt, sampling = group.prompt, limited(sampling, group.prompt)
        first = number * self._group_size
        self._engine.submit([GenerationRequest(first + i, prompt.token_ids, sampling) for i in range(group.size)])

    def step(self) -> list[PendingGroup]:
        return [group for completion in self._engine.step() if (group := self._add(completion)).is_generated]

    def leases(self) -> list[PromptLease]:
        return [group.lease for group in self._groups.values() if group.lease is not None]

    def drop(self) -> None:
        self._engine.abort()
        self._groups.clear()

    def close(self) -> None:
        self.drop()

    def _add(self, completion: Completion) -> PendingGroup:
        number, index = divmod(completion.request_id, self._group_size)
        group = self._groups[number]
        group.add(index, (Trajectory.single_turn(group.prompt.token_ids, completion.response),))
        self.tokens += len(completion.response.token_ids)
        if group.spans is not None:
            group.spans.of_sample(index).add_generation(completion.response, group.spans.began_unix_s)
        if group.is_generated:
            del self._groups[number]
        return group


def limited(sampling: Sampling, prompt: Prompt) -> Sampling:
    """Return ``sampling`` with ``prompt``'s own limit on new tokens, if that is lower."""
    if prompt.max_new_tokens is None or prompt.max_new_tokens >= sampling.max_new_tokens:
        return sampling
    return replace(sampling, max_new_tokens=prompt.max_new_tokens)


def mean_metrics(rows: Iterable[dict[str, float]]) -> dict[str, float]:
    """Return the mean of each metric over the rows that have it."""
    rows = list(rows)
    names = sorted(set().union(*rows)) if rows else []
    return {name: float(np.mean([row[name] for row in rows if name in row])) for name in names}


def _done(scores: Scores) -> Future[Scores]:
    future: Future[Scores] = Future()
    future.set_result(scores)
    return future
