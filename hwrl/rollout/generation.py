"""Prompts become requests to the engine, and its completions become groups again."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

import numpy as np

from hwrl.interfaces import Completion, GenerationRequest, PromptGroup, Response, RolloutEngine, Sampling
from hwrl.rollout.data import Prompt
from hwrl.rollout.ledger import PromptLease
from hwrl.rollout.reward_workers import Scores


@dataclass(eq=False)
class PendingGroup:
    """A prompt with its responses, from the first request to the last score.

    The prompts of an evaluation have no ``lease``. ``scores`` is None until all ``size`` responses are generated.
    """

    prompt: Prompt
    size: int
    lease: PromptLease | None = None
    scores: Future[Scores] | None = None
    _finished: dict[int, Response] = field(default_factory=dict)

    @property
    def responses(self) -> list[Response]:
        """The generated responses, in the order of their requests."""
        return [self._finished[index] for index in sorted(self._finished)]

    @property
    def is_generated(self) -> bool:
        """Whether all responses are there."""
        return len(self._finished) == self.size

    @property
    def is_scored(self) -> bool:
        """Whether the reward workers have answered."""
        return self.scores is not None and self.scores.done()

    def result(self) -> Scores:
        """Return the scores of a group that is scored."""
        assert self.is_scored and self.scores is not None, "ask is_scored first"
        return self.scores.result()

    def cancel(self) -> None:
        """Let the reward workers skip this group."""
        if self.scores is not None:
            self.scores.cancel()

    def add(self, index: int, response: Response) -> None:
        """Take the response to request ``index`` of this group."""
        self._finished[index] = response

    def to_prompt_group(self, lease: PromptLease) -> PromptGroup:
        """Return the scored group as the ledger takes it."""
        metrics = self.result().metrics
        return PromptGroup.join(
            self.responses,
            sequence_number=lease.sequence_number,
            lease_id=lease.lease_id,
            incarnation=lease.incarnation,
            prompt_ids=self.prompt.token_ids,
            rewards=[row["reward"] for row in metrics],
            metrics=mean_metrics(metrics),
        )


class GroupGenerator:
    """Generates groups of at most ``group_size`` responses on ``engine``, as many groups at once as it is given."""

    def __init__(self, engine: RolloutEngine, *, group_size: int) -> None:
        self._engine, self._group_size = engine, group_size
        self._groups: dict[int, PendingGroup] = {}
        self._next_number = 0
        self.tokens = 0
        """Tokens of all responses so far."""

    def room(self) -> int:
        """Return how many whole groups the engine can run beside the present ones."""
        return self._engine.capacity() // self._group_size

    def start(self, prompt: Prompt, sampling: Sampling, *, size: int, lease: PromptLease | None = None) -> PendingGroup:
        """Submit ``size`` requests for ``prompt``; its own limit on new tokens lowers the one of ``sampling``."""
        number, self._next_number = self._next_number, self._next_number + 1
        group = self._groups[number] = PendingGroup(prompt, size, lease)
        if prompt.max_new_tokens is not None:
            sampling = replace(sampling, max_new_tokens=min(prompt.max_new_tokens, sampling.max_new_tokens))
        first = number * self._group_size
        self._engine.submit([GenerationRequest(first + i, prompt.token_ids, sampling) for i in range(size)])
        return group

    def step(self) -> list[PendingGroup]:
        """Advance the engine by one step; return the groups whose last response is finished. Blocks for the step."""
        return [group for completion in self._engine.step() if (group := self._add(completion)).is_generated]

    def leases(self) -> list[PromptLease]:
        """Return the leases of the present groups."""
        return [group.lease for group in self._groups.values() if group.lease is not None]

    def drop(self) -> None:
        """Abort all groups."""
        self._engine.abort()
        self._groups.clear()

    def _add(self, completion: Completion) -> PendingGroup:
        number, index = divmod(completion.request_id, self._group_size)
        group = self._groups[number]
        group.add(index, completion.response)
        self.tokens += len(completion.response.token_ids)
        if group.is_generated:
            del self._groups[number]
        return group


def mean_metrics(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the mean of each metric over the rows that have it."""
    names = sorted(set().union(*rows)) if rows else []
    return {name: float(np.mean([row[name] for row in rows if name in row])) for name in names}
