"""The keys of a run's configuration, with their types, bounds and defaults."""

from __future__ import annotations

from typing import Literal

from pydantic import (
    Field,
    model_validator,
)

from hwrl.interfaces import LoraSettings
from hwrl.run.config.algorithm import AlgorithmConfig, CriticConfig
from hwrl.run.config.data import DataConfig, EvalConfig, RewardConfig
from hwrl.run.config.generation import RolloutConfig
from hwrl.run.config.report import ReportConfig
from hwrl.run.config.section import Section
from hwrl.run.config.training import FSDP, OptimizerConfig, TrainConfig
from hwrl.run.config.values import (
    AbsolutePath,
    Finite,
    Layers,
    Mebibytes,
    Name,
    NotNegative,
    Positive,
    PositiveReal,
    Seconds,
    Seed,
)


class ModelConfig(Section):
    """The model to train."""

    path: AbsolutePath
    """A directory for ``AutoModelForCausalLM`` and ``AutoTokenizer``."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """For computing, rollout and export. The optimizer always updates float32 parameters."""
    lora_rank: NotNegative = 0
    """Rank of a LoRA adapter to train, with the model frozen; 0: train the whole model."""
    lora_alpha: PositiveReal = 16.0
    """The adapter's output in a layer is multiplied by ``lora_alpha / lora_rank``."""
    target_modules: Layers = "all-linear"
    """Layers with an adapter, in PEFT's syntax: ``all-linear``, ends of names, or a regular expression."""

    @property
    def lora(self) -> LoraSettings | None:
        """The adapter to train; None if the whole model is trained."""
        if not self.lora_rank:
            return None
        return LoraSettings(rank=self.lora_rank, alpha=self.lora_alpha, target_modules=self.target_modules)


class AsyncConfig(Section):
    """How far rollout may run ahead of training."""

    staleness_threshold: NotNegative = 1
    """Largest age of a trained token, in weight versions; 0: synchronous, on-policy training."""
    trigger_parameter_sync_step: Positive = 1
    """Training steps between two weight versions."""
    partial_rollout: bool = True
    """Take new weights between two tokens of a response; otherwise only after the running responses."""


class WeightsConfig(Section):
    """How weights travel from the trainer to the rollouters."""

    bypass_cpu: bool = True
    """Send weights without a host copy, if the device can; false: through host memory, with no wait of the trainer."""
    send_base: Literal["needed", "always"] = "needed"
    """With an adapter, send the base only to replicas without it, or ``always``: with every version, for comparison."""
    senders: Literal["auto"] | Positive = "auto"
    """How many trainer ranks send the weights, each its share: 1 to ``train.ranks``; auto: several between machines."""
    keep_old_version: bool = False
    """Give a replica room for two more versions: the old one serves during a transfer, and after a failed one."""
    update_weights_bucket_megabytes: Mebibytes | None = None
    """Size of a slab, MiB; null: a default for the device. Workers receive through a ring of 8 slabs, at most 1 GiB."""
    timeout_s: Seconds = 60.0
    """Time limit for a replica to take part in a transfer; then it is excluded and must join again."""


class CheckpointConfig(Section):
    """Checkpoints."""

    save_every_steps: NotNegative = 50
    """Training steps between two checkpoints. There is always one at the end and after an interrupt; 0: only then."""
    async_save: bool = False
    """Write in the background, from a copy; offloaded tensors are written without a copy."""
    staging: Literal["host", "device"] = "host"
    """Place of that copy: page-locked host memory, or unused device memory."""
    max_ckpt_to_keep: Positive | None = 2
    """Older checkpoints are deleted after the newest is complete; null: keep all."""

    @model_validator(mode="after")
    def _only_a_copy_is_staged(self) -> CheckpointConfig:
        if self.staging == "device" and not self.async_save:
            raise ValueError("staging=device is for saves in the background; set async_save=true, too")
        return self


class TimeoutConfig(Section):
    """Time limits for the run's own processes. The run logs each wait of more than ten seconds."""

    heartbeat_s: Seconds = 60.0
    """A silence of this length means death: a replica is replaced, the trainers start again."""
    start_s: Seconds = 1800.0
    """To set up one process: imports and model."""
    trainer_s: Seconds = 3600.0
    """One call of the trainers: a step, a transfer, a save, an export. Then they start again."""
    evaluation_s: Seconds = 3600.0
    """A replica's part of an evaluation. Then the replica is replaced."""


class Config(Section):
    """A whole run. ``hwrl train --print-config`` shows every key with its value."""

    dir: AbsolutePath
    """Run directory: metrics, checkpoints, the reward curve, the resolved configuration."""
    seed: Seed = 0
    """Seed of the order of prompts and of sampling."""
    resume: bool = False
    """Continue from the newest complete checkpoint in ``dir``; without one, start at the beginning."""
    cluster_security: Literal["token", "tls"] | None = None
    """What a joined Ray cluster must have: a token, or also TLS; null: it may be open, with a warning."""
    goals: dict[Name, Finite] = Field(default_factory=dict)
    """Metrics to reach in the last training step and the last evaluation; else the exit status is 1."""
    model: ModelConfig
    data: DataConfig
    reward: RewardConfig = RewardConfig()
    rollout: RolloutConfig = RolloutConfig()
    train: TrainConfig = TrainConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    critic: CriticConfig = CriticConfig()
    async_training: AsyncConfig = AsyncConfig()
    weights: WeightsConfig = WeightsConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    eval: EvalConfig = EvalConfig()
    report: ReportConfig = ReportConfig()
    timeouts: TimeoutConfig = TimeoutConfig()

    @model_validator(mode="after")
    def _every_rank_has_a_response(self) -> Config:
        train = self.train  # a plugin's ranks may share a response, too
        shares = train.ranks // train.context_parallel if train.engine == FSDP else 1
        each = f"train.ranks={shares}"
        if train.context_parallel > 1:
            each = f"train.ranks={train.ranks} / train.context_parallel={train.context_parallel}"
        responses = self.train.batch_groups * self.rollout.n
        if self.algorithm.mini_batches * shares > responses:
            raise ValueError(
                f"the {responses} responses of a step (train.batch_groups={self.train.batch_groups} * rollout.n="
                f"{self.rollout.n}) must be at least one for each rank in each mini-batch: {each} * "
                f"algorithm.mini_batches={self.algorithm.mini_batches}"
            )
        return self

    @model_validator(mode="after")
    def _trajectories_are_rewarded(self) -> Config:
        if self.reward.function is None and self.rollout.workflow is None:
            raise ValueError("reward.function is missing: without rollout.workflow nothing else gives a reward")
        return self

    @model_validator(mode="after")
    def _a_prompt_leaves_room(self) -> Config:
        if self.max_model_len <= self.data.max_prompt_tokens:
            raise ValueError(
                f"rollout.max_model_len={self.max_model_len} must be more than data.max_prompt_tokens="
                f"{self.data.max_prompt_tokens}: a prompt needs room for a response"
            )
        return self

    @model_validator(mode="after")
    def _senders_are_ranks(self) -> Config:
        if self.weights.senders != "auto" and self.weights.senders > self.train.ranks:
            raise ValueError(
                f"weights.senders={self.weights.senders} must be at most train.ranks={self.train.ranks}: ranks of the "
                "trainer send the weights"
            )
        return self

    @model_validator(mode="after")
    def _evaluations_have_prompts(self) -> Config:
        if self.eval.every_steps and self.data.eval is None:
            raise ValueError(f"eval.every_steps={self.eval.every_steps} needs data.eval, prompts to evaluate on")
        return self

    @model_validator(mode="after")
    def _goals_are_measured(self) -> Config:
        unmeasured = [name for name in self.goals if name.startswith("eval/")] if self.data.eval is None else []
        if unmeasured:
            raise ValueError(
                f"goals: {', '.join(unmeasured)} cannot be reached without data.eval, prompts to evaluate on"
            )
        return self

    @model_validator(mode="after")
    def _the_engine_trains_adapters(self) -> Config:
        if self.model.lora_rank and self.train.engine != FSDP:
            raise ValueError(
                f"model.lora_rank={self.model.lora_rank} needs train.engine={FSDP}; {self.train.engine} trains whole "
                "models, with model.lora_rank=0"
            )
        return self

    @model_validator(mode="after")
    def _advantages_have_a_source(self) -> Config:
        if self.rollout.n < 2 and self.algorithm.compares_responses:
            raise ValueError(
                f"rollout.n={self.rollout.n} teaches nothing: a response's advantage comes from the others; set "
                "rollout.n=2 or more, or algorithm.advantage=gae or reinforce_plus_plus"
            )
        if self.rollout.n < 2 and self.algorithm.filter_groups:
            raise ValueError(
                f"algorithm.filter_groups=true would filter every prompt: with rollout.n={self.rollout.n} its rewards "
                "cannot differ; set rollout.n=2 or more, or filter_groups=false"
            )
        if not self.algorithm.has_critic and self.critic != CriticConfig():
            raise ValueError(
                f"critic has settings, and algorithm.advantage={self.algorithm.advantage} uses no critic; set "
                "algorithm.advantage=gae, too"
            )
        if self.train.engine != FSDP and (self.algorithm.has_critic or self.algorithm.kl_coeff):
            key = "advantage=gae" if self.algorithm.has_critic else f"kl_coeff={self.algorithm.kl_coeff:g}"
            missing = "critic" if self.algorithm.has_critic else "reference model"
            raise ValueError(
                f"algorithm.{key} needs train.engine={FSDP}: {self.train.engine} has no {missing} for its ranks"
            )
        return self

    @model_validator(mode="after")
    def _the_overlong_buffer_is_in_the_limit(self) -> Config:
        if self.algorithm.overlong_buffer_tokens > self.rollout.max_new_tokens:
            raise ValueError(
                f"algorithm.overlong_buffer_tokens={self.algorithm.overlong_buffer_tokens} must be at most "
                f"rollout.max_new_tokens={self.rollout.max_new_tokens}: it is the last part of it"
            )
        return self

    @property
    def max_model_len(self) -> int:
        """Most tokens of a trajectory, the prompt included."""
        return self.rollout.max_model_len or self.data.max_prompt_tokens + self.rollout.max_new_tokens

    @property
    def has_reference_copy(self) -> bool:
        """Whether a frozen copy of the model is the reference; an adapter has its base."""
        used = self.algorithm.kl_coeff != 0 or (self.algorithm.has_critic and self.critic.kl_coef != 0)
        return used and self.model.lora is None

    @property
    def groups_per_version(self) -> int:
        """Prompts trained with one weight version."""
        return self.train.batch_groups * self.async_training.trigger_parameter_sync_step
