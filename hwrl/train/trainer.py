"""The asynchronous trainer: consumes prompt groups, steps, and publishes weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from hwrl.clock import ActivityClock
from hwrl.errors import EngineError
from hwrl.interfaces import Batch, Moved, PromptGroup, TrainEngine
from hwrl.train.choices import AdvantageName
from hwrl.train.losses import PolicyLoss, group_advantages
from hwrl.train.padding import collate

Publish = Callable[[int, TrainEngine], Mapping[str, float]]
"""``publish(version, engine)``: send the engine's weights, on all ranks together; return figures of the transfer."""


@dataclass(frozen=True)
class Algorithm:
    """How a batch becomes optimizer steps: ``ppo_epochs`` passes over it, each in ``mini_batches`` parts."""

    loss: PolicyLoss
    advantage: AdvantageName = "grpo"
    ppo_epochs: int = 1
    mini_batches: int = 1


class AsyncTrainer:
    """One rank of the trainer; knows nothing of processes.

    ``step(groups)`` trains on a batch that the ledger has released and, every ``trigger_parameter_sync_step`` steps,
    publishes the weights as the next version. ``max_staleness`` is enforced here once more: a group raises if it is
    older when it is consumed, if a token is of a version that does not exist yet, or if another ``incarnation`` of the
    trainer published its weights. All ranks call ``step`` with the same groups and train on their shares.
    """

    def __init__(
        self,
        engine: TrainEngine,
        *,
        algorithm: Algorithm,
        publish: Publish,
        max_staleness: int,
        trigger_parameter_sync_step: int = 1,
        incarnation: int = 0,
    ) -> None:
        self.engine = engine
        self._incarnation = incarnation
        self._algorithm, self._publish = algorithm, publish
        self._max_staleness = max_staleness
        self._trigger_parameter_sync_step = trigger_parameter_sync_step
        self._clock = ActivityClock("wait")
        self._last_seconds: dict[str, float] = {}
        self.steps_done = 0

    @property
    def version(self) -> int:
        """The version of the newest published weights."""
        return self.steps_done // self._trigger_parameter_sync_step

    def publish(self) -> dict[str, float]:
        """Publish the current weights as :attr:`version`; return the figures of that. At the start, after a resume."""
        with self.engine.on_device(optimizer=False) as moved, self._clock.during("sync"):
            figures = dict(self._publish(self.version, self.engine))
        return {**figures, **_move_figures(moved)}

    def step(self, groups: Sequence[PromptGroup]) -> dict[str, float]:
        """Train on ``groups`` and return the figures of the step; ``steps_done`` and perhaps ``version`` go up."""
        consumed = self._consumed_figures(groups)
        self._require_rows(groups)
        with self._clock.during("train"), self.engine.on_device(optimizer=True) as moved:
            trained = self._train(groups[self.engine.data_parallel_rank :: self.engine.data_parallel_size])
            self.steps_done += 1
            synced = self.publish() if self.steps_done % self._trigger_parameter_sync_step == 0 else {}
        weights = {**_move_figures(moved), "weights/version": float(self.version)}
        return {**consumed, **trained, **synced, **weights, **self._seconds_since_last()}

    def saving(self) -> AbstractContextManager[None]:
        """Account the time inside to ``timing_s/save`` of the next step: the trainer does not wait meanwhile."""
        return self._clock.during("save")

    def state_dict(self) -> dict[str, Any]:
        """Return the trainer's own state; the engine's is apart, because it holds tensors."""
        return {"steps_done": self.steps_done}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self.steps_done = int(state["steps_done"])

    def _seconds_since_last(self) -> dict[str, float]:
        """Return what each activity took since this was last asked: with the waiting before the step, all the time."""
        seconds = self._clock.seconds()
        last, self._last_seconds = self._last_seconds, seconds
        return {f"timing_s/{name}": value - last.get(name, 0.0) for name, value in seconds.items()}

    # -- one step -----------------------------------------------------------------------------------------------

    def _train(self, groups: Sequence[PromptGroup]) -> dict[str, float]:
        advantages = group_advantages(groups, estimator=self._algorithm.advantage)
        batch = collate(groups, advantages=advantages)
        loss = self._algorithm.loss
        if loss.needs_proximal:
            batch = replace(batch, proximal_logprobs=self.engine.logprobs(batch))
        figures = [
            self.engine.train_batch(part, loss=loss)
            for _ in range(self._algorithm.ppo_epochs)
            for part in self._mini_batches(batch)
        ]
        return {f"actor/{name}": float(np.mean([row[name] for row in figures])) for name in figures[0]}

    def _mini_batches(self, batch: Batch) -> list[Batch]:
        if self._algorithm.mini_batches == 1:
            return [batch]
        parts = torch.arange(batch.rows).tensor_split(self._algorithm.mini_batches)
        return [batch.select(rows) for rows in parts]

    def _require_rows(self, groups: Sequence[PromptGroup]) -> None:
        """Raise, on all ranks alike, if a rank has fewer rows than mini-batches: its collectives would be missing."""
        shares = self.engine.data_parallel_size
        rows = [sum(group.size for group in groups[share::shares]) for share in range(shares)]
        if min(rows) < self._algorithm.mini_batches:
            raise EngineError(
                f"rank {rows.index(min(rows))} of the trainer has too few responses for the step: {min(rows)}",
                why=f"{len(groups)} prompt groups go to {shares} ranks, and each needs a response for each of "
                f"{self._algorithm.mini_batches} mini-batches",
                fix="lower algorithm.mini_batches, train on fewer ranks or with more prompts a step",
            )

    def _require_own(self, groups: Sequence[PromptGroup]) -> None:
        """Raise unless this incarnation has published the weights of every token: no age is below 0."""
        for group in groups:
            if group.incarnation != self._incarnation or group.newest_version > self.version:
                raise EngineError(
                    f"this trainer never published the weights that generated prompt group {group.sequence_number}",
                    why=f"its newest token is of version {group.newest_version}, incarnation {group.incarnation}; the "
                    f"trainer is at version {self.version}, incarnation {self._incarnation}",
                    fix="take groups from a PromptLedger that is restored with the trainer",
                )

    def _consumed_figures(self, groups: Sequence[PromptGroup]) -> dict[str, float]:
        self._require_own(groups)
        ages = [self.version - group.oldest_version for group in groups]
        if max(ages) > self._max_staleness:
            raise EngineError(
                f"a prompt group of age {max(ages)} reached the trainer",
                why=f"the weights are at version {self.version} and staleness_threshold is {self._max_staleness}",
                fix="take groups from a PromptLedger with the same max_staleness",
            )
        rewards = np.concatenate([group.rewards for group in groups])
        lengths = np.concatenate([group.lengths for group in groups])
        spans = [group.newest_version - group.oldest_version for group in groups]
        extra = {name for group in groups for name in group.metrics} - {"reward"}
        return {
            "reward/mean": float(rewards.mean()),
            "reward/std": float(rewards.std()),
            **{
                f"reward/{name}": _mean([group.metrics[name] for group in groups if name in group.metrics])
                for name in sorted(extra)
            },
            "groups/zero_variance_ratio": _mean([float(group.rewards.std() == 0) for group in groups]),
            "response/length_mean": float(lengths.mean()),
            "response/length_max": float(lengths.max()),
            "response/truncated_ratio": float(np.concatenate([group.truncated for group in groups]).mean()),
            "response/tokens": float(lengths.sum()),
            "staleness/mean": _mean(ages),
            "staleness/max": float(max(ages)),
            "staleness/min": float(min(self.version - group.newest_version for group in groups)),
            "partial/ratio": _mean([float(span > 0) for span in spans]),
            "partial/max_span": float(max(spans)),
        }


def _move_figures(moved: Moved) -> dict[str, float]:
    return {"weights/load_s": moved.load.seconds, "weights/offload_s": moved.offload.seconds}


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values))
