"""The configuration of a run: all sections, and the checks between them. Some sections are in other modules."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from hwrl.hub import model_directory
from hwrl.interfaces import LoraSettings
from hwrl.run.config.data import DataConfig, EvalConfig, RewardConfig
from hwrl.run.config.sections import (
    FSDP,
    AlgorithmConfig,
    CriticConfig,
    OptimizerConfig,
    ReportConfig,
    RolloutConfig,
    TrainConfig,
)
from hwrl.run.config.values import (
    AbsolutePath,
    Finite,
    Layers,
    Mebibytes,
    ModelPath,
    Name,
    NotNegative,
    NotNegativeReal,
    Positive,
    PositiveReal,
    Seconds,
    Section,
    Seed,
)


class ModelConfig(Section):
    """The model to train."""

    path: ModelPath
    """[Model and tokenizer](training.md#the-model): a directory, or a name on the Hugging Face hub."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of computation, rollout and export. The optimizer always updates float32 parameters."""
    lora_rank: NotNegative = 0
    """Rank of the LoRA adapter to train on the frozen model; 0: train the whole model."""
    lora_alpha: PositiveReal = 16.0
    """LoRA alpha: the adapter's output is scaled by ``lora_alpha / lora_rank``."""
    target_modules: Layers = "all-linear"
    """Layers with an adapter, in PEFT's syntax: ``all-linear``, suffixes of names, or a regular expression."""

    @property
    def directory(self) -> Path:
        """The directory of the model, after a download if need be: see :func:`~hwrl.hub.model_directory`."""
        return model_directory(self.path)

    @property
    def lora(self) -> LoraSettings | None:
        """The adapter to train; None if the whole model is trained."""
        if not self.lora_rank:
            return None
        return LoraSettings(rank=self.lora_rank, alpha=self.lora_alpha, target_modules=self.target_modules)


class AsyncConfig(Section):
    """How far rollout may run ahead of training, and when replicas take new weights."""

    staleness_threshold: NotNegative = 1
    """Maximum age of a trained token, in weight versions; 0: synchronous, on-policy training."""
    lead_versions: NotNegativeReal | None = None
    """[The lead](staleness.md#lead): versions that rollout may run ahead; null, or more: ``staleness_threshold``."""
    trigger_parameter_sync_step: Positive = 1
    """Training steps per weight version. The weights are sent to the replicas after every such number of steps."""
    partial_rollout: bool = True
    """Take new weights in the middle of responses, between two tokens. If false, finish running responses first."""


class WeightsConfig(Section):
    """How weights travel from the trainer to the replicas."""

    bypass_cpu: bool = True
    """Send weights from device to device, if possible; false: through host memory, and the trainer does not wait."""
    senders: Literal["auto"] | Positive = "auto"
    """Number of trainer ranks that send the weights, each a share; auto: several if the run has several machines."""
    keep_old_version: bool = False
    """Double-buffer the weights in each replica: it uses the old version during a transfer, and after a failed one."""
    update_weights_bucket_megabytes: Mebibytes | None = None
    """Size of a bucket in MiB; null: by device. Workers receive through a ring of 8 buckets, at most 1 GiB."""
    timeout_s: Seconds = 60.0
    """Time limit for a replica to take part in a transfer. After that it is excluded and must join again."""


class CheckpointConfig(Section):
    """When and how checkpoints are saved, and how many are kept."""

    save_every_steps: NotNegative = 50
    """Training steps between two checkpoints; 0: only at the end and after an interrupt, where one is always saved."""
    async_save: bool = False
    """Write checkpoints in the background, from a copy of the state. Offloaded tensors need no copy."""
    staging: Literal["host", "device"] = "host"
    """Where the copy is kept: in page-locked host memory, or in unused device memory."""
    max_ckpt_to_keep: Positive | None = 2
    """Number of checkpoints to keep. Older ones are deleted when a new one is complete; null: keep all."""

    @model_validator(mode="after")
    def _only_a_copy_is_staged(self) -> CheckpointConfig:
        if self.staging == "device" and not self.async_save:
            raise ValueError("staging=device is for saves in the background; also set async_save=true")
        return self


class TimeoutConfig(Section):
    """Time limits for the run's processes. A wait of ten seconds is logged, unless such waits are usual in the run."""

    heartbeat_s: Seconds = 60.0
    """A process that does not answer for this time counts as dead: it is replaced, or all trainers start again."""
    start_s: Seconds = 1800.0
    """Time limit for the setup of a process: its imports and its model."""
    trainer_s: Seconds = 3600.0
    """Time limit for a call of the trainers: a step, a transfer, a save, an export. After that they start again."""
    evaluation_s: Seconds = 3600.0
    """Time limit for a replica's part of an evaluation. After that the replica is replaced."""


class Config(Section):
    """The configuration of a run. ``hwrl train --print-config`` prints every key with its value."""

    dir: AbsolutePath
    """Run directory, for metrics, checkpoints, the trained model and this configuration."""
    seed: Seed = 0
    """Seed for the order of prompts, for sampling and for the train engine."""
    resume: bool = False
    """Continue from the newest complete checkpoint in ``dir``; without a checkpoint, start at step 0."""
    cluster_security: Literal["token", "tls"] | None = None
    """Security that a joined Ray cluster must have: a token, or TLS as well; null: an open one gets a warning."""
    goals: dict[Name, Finite] = Field(default_factory=dict)
    """Minimum values of metrics in the last step and the last evaluation. If one is missed, the exit status is 1."""
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
    def _keys_fit_together(self) -> Config:
        train = self.train  # with a plugin's engine, all ranks may share a response
        shares = train.ranks // train.context_parallel if train.engine == FSDP else 1
        each = f"train.ranks={shares}"
        if train.context_parallel > 1:
            each = f"train.ranks={train.ranks} / train.context_parallel={train.context_parallel}"
        responses = self.train.batch_groups * self.rollout.n
        if self.algorithm.mini_batches * shares > responses:
            raise ValueError(
                f"the {responses} responses of a step (train.batch_groups={self.train.batch_groups} * rollout.n="
                f"{self.rollout.n}) are too few: each mini-batch needs one for each rank, {each} * "
                f"algorithm.mini_batches={self.algorithm.mini_batches}"
            )
        if self.reward.function is None and self.rollout.workflow is None:
            raise ValueError("reward.function is missing: only a rollout.workflow can give rewards without it")
        if self.max_model_len <= self.data.max_prompt_tokens:
            raise ValueError(
                f"rollout.max_model_len={self.max_model_len} must be more than data.max_prompt_tokens="
                f"{self.data.max_prompt_tokens}: a prompt needs room for a response"
            )
        if self.weights.senders != "auto" and self.weights.senders > self.train.ranks:
            raise ValueError(
                f"weights.senders={self.weights.senders} must be at most train.ranks={self.train.ranks}: ranks of the "
                "trainer send the weights"
            )
        if self.eval.every_steps and self.data.eval is None:
            raise ValueError(f"eval.every_steps={self.eval.every_steps} needs data.eval: prompts for evaluations")
        if self.eval.before_training and self.data.eval is None:
            raise ValueError("eval.before_training=true needs data.eval: prompts for evaluations")
        unmeasured = [name for name in self.goals if name.startswith("eval/")] if self.data.eval is None else []
        if unmeasured:
            raise ValueError(
                f"goals: {', '.join(unmeasured)} cannot be reached without data.eval: prompts for evaluations"
            )
        if self.model.lora_rank and self.train.engine != FSDP:
            raise ValueError(
                f"model.lora_rank={self.model.lora_rank} needs train.engine={FSDP}; {self.train.engine} trains only "
                "whole models, with model.lora_rank=0"
            )
        if self.rollout.n < 2 and self.algorithm.compares_responses:
            raise ValueError(
                f"with rollout.n={self.rollout.n} nothing is learned: algorithm.advantage={self.algorithm.advantage} "
                "compares the responses to a prompt; set rollout.n=2 or more, or algorithm.advantage=gae or "
                "reinforce_plus_plus"
            )
        if self.rollout.n < 2 and self.algorithm.filter_groups:
            raise ValueError(
                f"algorithm.filter_groups=true would filter every prompt: with rollout.n={self.rollout.n} the rewards "
                "of a prompt cannot differ; set rollout.n=2 or more, or filter_groups=false"
            )
        if not self.algorithm.has_critic and self.critic != CriticConfig():
            raise ValueError(
                f"the section critic has settings, but algorithm.advantage={self.algorithm.advantage} uses no critic; "
                "also set algorithm.advantage=gae"
            )
        if self.algorithm.reference is not None and not self._uses_reference and ":" not in self.algorithm.loss:
            raise ValueError(
                f"algorithm.reference={self.algorithm.reference} has no effect; also set algorithm.kl_coeff, "
                "critic.kl_coeff or algorithm.loss=distill"
            )
        if self.train.engine != FSDP and (self.algorithm.has_critic or self._uses_reference):
            key = f"kl_coeff={self.algorithm.kl_coeff:g}" if self.algorithm.kl_coeff else "loss=distill"
            key = "advantage=gae" if self.algorithm.has_critic else key
            missing = "critic" if self.algorithm.has_critic else "reference model"
            raise ValueError(
                f"algorithm.{key} needs train.engine={FSDP}: {self.train.engine} does not support a {missing}"
            )
        if self.algorithm.overlong_buffer_tokens > self.rollout.max_new_tokens:
            raise ValueError(
                f"algorithm.overlong_buffer_tokens={self.algorithm.overlong_buffer_tokens} must be at most "
                f"rollout.max_new_tokens={self.rollout.max_new_tokens}: the overlong zone is at the end of a response"
            )
        return self

    def with_models(self, change: Callable[[Path], Path]) -> Config:
        """Return the configuration with ``change(path)`` in place of each path of a model."""
        sections = {}
        for key, path in self.models.items():
            section, name = key.split(".")
            sections[section] = getattr(self, section).model_copy(update={name: change(path)})
        return self.model_copy(update=sections)

    @property
    def models(self) -> dict[str, Path]:
        """The paths of the models that the run uses, by their keys."""
        models = {"model.path": self.model.path}
        if self.algorithm.has_critic and self.critic.path is not None:
            models["critic.path"] = self.critic.path
        if self.algorithm.reference is not None:
            models["algorithm.reference"] = self.algorithm.reference
        return models

    @property
    def max_model_len(self) -> int:
        """The maximum number of tokens in a trajectory, including its prompt."""
        return self.rollout.max_model_len or self.data.max_prompt_tokens + self.rollout.max_new_tokens

    @property
    def has_reference_copy(self) -> bool:
        """Whether the trainer keeps a frozen model as the reference. With LoRA, the base serves as one by default."""
        return self._uses_reference and (self.model.lora is None or self.algorithm.reference is not None)

    @property
    def _uses_reference(self) -> bool:
        by_loss = self.algorithm.kl_coeff != 0 or self.algorithm.loss == "distill"
        return by_loss or (self.algorithm.has_critic and self.critic.kl_coeff != 0)

    @property
    def groups_per_version(self) -> int:
        """The number of prompts in all training steps of one weight version."""
        return self.train.batch_groups * self.async_training.trigger_parameter_sync_step

    @property
    def takes_turns(self) -> bool:
        """Whether trainer and replicas take turns, so that each can free its memory for the other.

        They do if replicas may not run ahead (``staleness_threshold`` or ``lead_versions`` is 0), each step is a
        version (``trigger_parameter_sync_step=1``), and idle replicas sleep (``free_cache_engine``).
        """
        steps = self.async_training.trigger_parameter_sync_step
        return self.lead_groups == 0 and steps == 1 and self.rollout.free_cache_engine

    @property
    def lead_groups(self) -> int:
        """The most prompts that may be running or finished beyond those of the present version, rounded down."""
        limits = self.async_training
        most = limits.staleness_threshold
        lead = most if limits.lead_versions is None else min(most, limits.lead_versions)
        return int(Fraction(str(lead)) * self.groups_per_version)  # as written: 0.29 × 100 is 28.9… as a float
