"""The asynchronous trainer: turns prompt groups into optimizer steps, within the age limit."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from hwrl.clock import ActivityClock
from hwrl.errors import EngineError, NonFiniteGradientError
from hwrl.interfaces import Batch, Moved, PromptGroup, TrainEngine
from hwrl.train.advantages import group_advantages
from hwrl.train.algorithm import Algorithm
from hwrl.train.batches import collate, divide_rows, imbalance, row_weights, token_rewards

if TYPE_CHECKING:
    from hwrl.train.critic import CriticEngine
    from hwrl.train.flops import ModelFlops

_log = logging.getLogger(__name__)
_HIGHEST_MISMATCH = 0.2
"""In nats a token. On one H200, right engines in bfloat16 were below 0.04 with ages up to 2, wrong ones above 0.49."""


@dataclass(frozen=True)
class TrainedStep:
    """A finished training step. If ``publishes``, the caller now sends the weights, as the trainer's new version.

    ``tokens`` counts the tokens of prompts and responses that the policy trained on: on all ranks, and once for each
    epoch. ``flops`` are the floating-point operations of the policy and of its reference, on all ranks; None if the
    trainer does not know its model's. A critic's work counts in neither: while it warms up, ``tokens`` is 0.
    """

    metrics: dict[str, float]
    publishes: bool
    tokens: int
    flops: float | None

    def speed(self, *, seconds: float, devices: int, peak_flops: float | None) -> dict[str, float]:
        """Return metrics of the speed of a step of ``seconds`` on ``devices`` devices.

        A device computes at most ``peak_flops`` FLOPs per second. If it is None, unknown, ``perf/mfu`` is absent. There
        are no metrics if ``seconds`` is 0, as on a coarse clock.
        """
        device_s = seconds * devices
        if not device_s:
            return {}
        metrics = {"perf/train_tokens_per_s_per_device": self.tokens / device_s}
        if self.flops is not None:
            metrics["perf/train_flops_per_s_per_device"] = self.flops / device_s
            if peak_flops is not None:
                metrics["perf/mfu"] = self.flops / device_s / peak_flops
        return metrics


class AsyncTrainer:
    """One rank of the trainer, without processes or transfers.

    ``step(groups)`` trains on a batch from the ledger. After every ``trigger_parameter_sync_step`` steps it returns
    ``publishes=True``: the weights are a new version, and the caller sends them. All ranks call ``step`` with the same
    groups, and each trains on its share of the rows. The shares cost about the same FLOPs, or the same tokens without
    ``flops``. A share may have only some rows of a group, so every rank computes the advantages of all groups.

    ``step`` enforces ``max_staleness`` once more. It raises EngineError for a group that is too old, that has a token
    of a future version, or whose weights came from another ``incarnation`` of the trainer.

    A step with its transfer looks like this. Offloaded parameters move to the device and back only once::

        with trainer.stepping() as moved:
            trained = trainer.step(groups)
            if trained.publishes:
                with trainer.sending():
                    ...  # send the engine's weights as version trainer.version
        critic = trainer.train_critic()
        metrics = {**trained.metrics, **critic, **move_metrics(moved), **trainer.timing()}

    The advantages come from the rewards of a trajectory's group, or from the ``critic`` if there is one (PPO). The
    critic trains after the policy, and after the transfer. So the replicas do not wait for it, and the two models take
    turns on the device.

    An update whose gradients are not finite is skipped, and counted in ``skipped_steps``. After more than
    ``max_skipped_in_a_row`` of them without another update in between, the next ``step`` raises EngineError.
    """

    def __init__(
        self,
        engine: TrainEngine,
        *,
        algorithm: Algorithm,
        max_staleness: int,
        trigger_parameter_sync_step: int = 1,
        incarnation: int = 0,
        flops: ModelFlops | None = None,
        critic: CriticEngine | None = None,
        max_skipped_in_a_row: int = 0,
    ) -> None:
        self.engine, self._critic = engine, critic
        self._for_critic: list[Batch] = []
        self._max_skipped_in_a_row = max_skipped_in_a_row
        self._skipped: dict[str, list[NonFiniteGradientError]] = {"actor": [], "critic": []}  # in a row
        self._flops = flops
        self._incarnation, self._algorithm = incarnation, algorithm
        self._max_staleness = max_staleness
        self._trigger_parameter_sync_step = trigger_parameter_sync_step
        self._clock = ActivityClock("wait")
        self._reported_seconds: dict[str, float] = {}
        self._mismatch_is_told = False
        self._updates_before: list[int | None] | None = None  # of the engines, at the start of an unfinished step
        self.steps_done = 0

    @property
    def version(self) -> int:
        """The newest version of the weights. It goes up in :meth:`step`, before the caller sends them."""
        return self.steps_done // self._trigger_parameter_sync_step

    def step(self, groups: Sequence[PromptGroup]) -> TrainedStep:
        """Train on ``groups``, and count the step in ``steps_done``. Then :attr:`version` may be a new one.

        With a critic, :meth:`train_critic` must follow before anything else.
        """
        self._updates_before = self._updates()
        self._check_skipped()
        consumed = self._consumed_metrics(groups)
        overlong = self._algorithm.overlong
        groups, shaped = (groups, {}) if overlong is None else overlong.apply(groups)
        lengths, responses = _row_lengths(groups)
        work = lengths if self._flops is None else self._flops.training(lengths, responses=responses)
        costs: list[int] = work.clip(min=1).tolist()
        division = divide_rows(costs, mini_batches=self._algorithm.mini_batches, shares=self.engine.data_parallel_size)
        epochs, flops = self._algorithm.ppo_epochs * self._trains_policy, None
        if self._flops is not None:
            forward = sum(self._flops.forward(lengths, responses=responses).tolist())
            flops = float(sum(costs) * epochs + forward * (self._needs_proximal + self._needs_reference))
        with self.stepping():
            trained = self._train(groups, division)
        self.steps_done += 1
        self._tell_mismatch(trained.get("actor/mismatch_kl", 0.0))
        if self._critic is None:
            self._updates_before = None
        balance = {"perf/imbalance": imbalance(division, costs), "weights/version": float(self.version)}
        return TrainedStep(
            {**consumed, **shaped, **trained, **balance},
            publishes=self.steps_done % self._trigger_parameter_sync_step == 0,
            tokens=int(lengths.sum()) * epochs,
            flops=flops,
        )

    def train_critic(self) -> dict[str, float]:
        """Train the critic on the newest step's batch; return its metrics, none without a critic.

        Call it outside of :meth:`stepping`: then offloaded parameters of the policy take no memory of the device.
        """
        parts, self._for_critic = self._for_critic, []
        if self._critic is None or not parts:
            return {}
        with self._clock.during("critic"), self._critic.on_device(optimizer=True):
            metrics = self._updated(parts, self._critic.fit, of="critic")
        self._updates_before = None
        return metrics

    # -- times and moves of the parts of a step --------------------------------------------------------------------

    @contextmanager
    def stepping(self) -> Iterator[Moved]:
        """Keep parameters and optimizer state on the device; count the time as ``timing_s/train``."""
        with self._clock.during("train"), self.engine.on_device(optimizer=True) as moved:
            yield moved

    @contextmanager
    def sending(self) -> Iterator[Moved]:
        """Keep the parameters on the device for a transfer; count the time as ``timing_s/sync``."""
        with self.engine.on_device(optimizer=False) as moved, self._clock.during("sync"):
            yield moved

    def saving(self) -> AbstractContextManager[None]:
        """Count the time of a checkpoint as ``timing_s/save``. The next step reports it."""
        return self._clock.during("save")

    def timing(self) -> dict[str, float]:
        """Return the seconds of each activity since the last call, waiting included. They add up to all the time."""
        seconds = self._clock.seconds()
        last, self._reported_seconds = self._reported_seconds, seconds
        return {f"timing_s/{name}": value - last.get(name, 0.0) for name, value in seconds.items()}

    # -- checkpoints -----------------------------------------------------------------------------------------------

    @property
    def finished_step(self) -> int | None:
        """The step whose result the models have; None if they have changed only in part since then.

        After an error in a step it is the step before, if no update of the weights had begun.
        """
        before = self._updates_before
        return self.steps_done if before is None or (None not in before and before == self._updates()) else None

    def _updates(self) -> list[int | None]:
        return [self.engine.updates, 0 if self._critic is None else self._critic.updates]

    def state_dict(self) -> dict[str, Any]:
        """Return the trainer's own state. The engine's tensors have their own ``state_dict``."""
        assert self.finished_step is not None, "the step has to end first"
        return {"steps_done": self.steps_done}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of :meth:`state_dict`."""
        self.steps_done = int(state["steps_done"])

    # -- one step -----------------------------------------------------------------------------------------------

    def _train(self, groups: Sequence[PromptGroup], division: Sequence[Sequence[Sequence[int]]]) -> dict[str, float]:
        """Train on this rank's share of each mini-batch of ``division``."""
        share = [part[self.engine.data_parallel_rank] for part in division]
        rows = [row for part in share for row in part]
        batch = self._collated(groups, rows)
        metrics = {}
        if self._needs_reference:
            batch = replace(batch, reference_logprobs=self.engine.reference_logprobs(batch))
        if self._critic is not None:
            batch, estimated = self._critic.estimate(batch, batch.advantages)
            metrics = {f"critic/{name}": value for name, value in estimated.items()}
        algorithm = self._algorithm
        if algorithm.aggregation != "token-mean":
            lengths = np.concatenate([group.policy_lengths for group in groups])
            mini_batches = [[row for one in part for row in one] for part in division]
            weights = row_weights(lengths, mini_batches, mode=algorithm.aggregation, constant=algorithm.loss_constant)
            batch = replace(batch, weights=torch.from_numpy(weights[rows]))
        if self._needs_proximal:
            batch = replace(batch, proximal_logprobs=self.engine.logprobs(batch))
        parts = _split(batch, [len(part) for part in share])
        if self._trains_policy:
            train = partial(self.engine.train_batch, loss=self._algorithm.loss)
            metrics |= self._updated(parts, train, of="actor")
        if self._critic is not None:
            self._for_critic = parts
        return metrics

    @property
    def _trains_policy(self) -> bool:
        """Whether the next step trains the policy: not while the critic warms up."""
        return self.steps_done >= self._algorithm.critic_warmup

    @property
    def _needs_proximal(self) -> bool:
        """Whether the next step needs the policy's log-probabilities at its start."""
        return self._trains_policy and self._algorithm.loss.needs_proximal

    @property
    def _needs_reference(self) -> bool:
        """Whether the next step needs the reference's log-probabilities, for the loss or for the critic."""
        if self._critic is not None and self._critic.needs_reference:
            return True
        return self._trains_policy and self._algorithm.loss.needs_reference

    def _collated(self, groups: Sequence[PromptGroup], rows: Sequence[int]) -> Batch:
        """Return the batch of ``rows`` with advantages; for a critic, with the tokens' rewards in their place."""
        if self._critic is None:
            advantages = group_advantages(groups, estimator=self._algorithm.advantage)
            return collate(groups, advantages=advantages, rows=rows)
        batch = collate(groups, advantages=token_rewards(groups), rows=rows)
        if batch.advantages.ndim == 1:  # every row has one token
            batch = replace(batch, advantages=batch.advantages[:, None] * batch.mask)
        return batch

    def _updated(
        self, parts: Sequence[Batch], train: Callable[[Batch], dict[str, float]], *, of: str
    ) -> dict[str, float]:
        """Make an update with each part in each epoch, and skip those without a finite gradient; return the metrics."""
        rows = []
        for part in [*parts] * self._algorithm.ppo_epochs:
            try:
                rows.append({**train(part), "skipped_steps": 0.0})
                self._skipped[of].clear()
            except NonFiniteGradientError as error:
                _log.warning("an update of the %s is skipped: %s (%s)", of, error.what, error.why)
                rows.append({"skipped_steps": 1.0})
                self._skipped[of].append(error)
        return _join(rows, of=of)

    def _tell_mismatch(self, kl: float) -> None:
        if kl < _HIGHEST_MISMATCH or self._mismatch_is_told or self.engine.data_parallel_rank > 0:
            return
        self._mismatch_is_told = True
        _log.warning(
            "step %d: the rollout engine samples from another distribution than the trainer computes: "
            "actor/mismatch_kl is %.2g, and below 0.05 where both compute the same. Rewards and ratios mean little "
            "then. Look at what the two do not share: engine_options (graphs, attention, quantization), weights that "
            "never arrived, sampling filters, a staleness_threshold or a learning rate that is too high",
            self.steps_done,
            kl,
        )

    def _check_skipped(self) -> None:
        for of, errors in self._skipped.items():
            if len(errors) > self._max_skipped_in_a_row:
                raise EngineError(
                    f"the last {len(errors)} updates of the {of} were skipped",
                    why=f"{errors[-1].what}; {errors[-1].why}",
                    fix=f"{errors[-1].fix}; optimizer.max_skipped_in_a_row is the limit",
                )

    def _consumed_metrics(self, groups: Sequence[PromptGroup]) -> dict[str, float]:
        """Return the metrics of ``groups``. Raises EngineError for another incarnation, or a wrong age."""
        for group in groups:
            if group.incarnation != self._incarnation or group.newest_version > self.version:
                raise EngineError(
                    f"this trainer never published the weights that generated prompt group {group.sequence_number}",
                    why=f"its newest token is of version {group.newest_version}, incarnation {group.incarnation}; the "
                    f"trainer is at version {self.version}, incarnation {self._incarnation}",
                    fix="take groups from a PromptLedger, and restore it together with the trainer",
                )
        ages = [self.version - group.oldest_version for group in groups]
        if max(ages) > self._max_staleness:
            raise EngineError(
                f"a prompt group of age {max(ages)} reached the trainer",
                why=f"the weights are at version {self.version} and staleness_threshold is {self._max_staleness}",
                fix="take groups from a PromptLedger with the same max_staleness",
            )
        rewards = np.concatenate([group.rewards for group in groups])
        lengths = np.concatenate([group.policy_lengths for group in groups])
        spans = [group.newest_version - group.oldest_version for group in groups]
        extra = {name for group in groups for name in group.metrics} - {"reward"}
        return {
            "reward/mean": float(rewards.mean()),
            "reward/std": float(rewards.std()),
            **{
                f"reward/{name}": _mean([group.metrics[name] for group in groups if name in group.metrics])
                for name in sorted(extra)
            },
            "groups/zero_variance_ratio": _mean([float(not group.rewards_differ) for group in groups]),
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


def move_metrics(moved: Moved) -> dict[str, float]:
    """Return the seconds of copies to the device and back to the host; 0.0 if nothing moved."""
    return {"weights/load_s": moved.load.seconds, "weights/offload_s": moved.offload.seconds}


def _row_lengths(groups: Sequence[PromptGroup]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the tokens of each row, 0 for one without a trained token, and those of the policy."""
    responses = np.concatenate([group.policy_lengths for group in groups]).astype(np.int64)
    prompts = np.repeat([len(group.prompt_ids) for group in groups], [group.size for group in groups])
    return (prompts + np.concatenate([group.lengths for group in groups])) * (responses > 0), responses


def _split(batch: Batch, sizes: Sequence[int]) -> list[Batch]:
    """Return the consecutive parts of ``batch`` with ``sizes`` rows."""
    return [batch] if len(sizes) == 1 else [batch.select(rows) for rows in torch.arange(batch.rows).split(list(sizes))]


def _join(metrics: Sequence[Mapping[str, float]], *, of: str) -> dict[str, float]:
    """Return the metrics of a step from those of its mini-batches: means, and the sums of some counts.

    Metrics of the engine's speed are reported for the policy only: a critic's are left out.
    """
    values = {name: [row[name] for row in metrics if name in row] for row in metrics for name in row}
    joined = {name: float((np.sum if name in _COUNTS else np.mean)(found)) for name, found in values.items()}
    speed = {f"perf/{name}": joined.pop(name) for name in _SPEED_METRICS if name in joined}
    return {**{f"{of}/{name}": value for name, value in joined.items()}, **(speed if of == "actor" else {})}


_COUNTS = ("recompilations", "skipped_steps")
_SPEED_METRICS = ("padding_share", "recompilations")
"""An engine's metrics of its speed; the others are about what it learns."""


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values))
