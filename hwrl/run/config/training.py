"""The parts of the configuration about the trainer: its optimizer and its engine."""

from __future__ import annotations

from typing import Literal

from pydantic import (
    Field,
    model_validator,
)

from hwrl.run.config.section import Section
from hwrl.run.config.values import (
    Decay,
    Name,
    NotNegative,
    NotNegativeReal,
    Options,
    Positive,
    PositiveReal,
    ProcessCount,
    Share,
    Threads,
)

FSDP = "fsdp"
"""The train engine that needs no plugin."""


class OptimizerConfig(Section):
    """AdamW and its schedule: linear warm-up, then linear decay."""

    learning_rate: PositiveReal = 1e-6
    """Its highest value."""
    warmup_steps: NotNegative = 0
    """Optimizer steps until the highest learning rate."""
    min_learning_rate_ratio: Share = 1.0
    """The last learning rate divided by the highest; 1 means no decay."""
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """AdamW's decay rates of the moments."""
    weight_decay: NotNegativeReal = 0.0
    """AdamW's."""
    max_grad_norm: PositiveReal = 1.0
    """Gradients are scaled down to this norm."""


class TrainConfig(Section):
    """The training side."""

    engine: Name = FSDP
    """``fsdp``: FSDP2, for any ``AutoModelForCausalLM`` directory; or the name of a plugin's engine."""
    engine_options: Options = Field(default_factory=dict)
    """The plugin's own settings, checked by the plugin."""
    ranks: ProcessCount = 1
    """Training processes. They share one model."""
    context_parallel: ProcessCount = 1
    """Neighbouring ranks that [share each pack](training.md#long-rows): a divisor of ``ranks``."""
    shard_ranks: ProcessCount | None = None
    """Ranks that shard one copy of the model, neighbours; the others have copies of it. null: all ``ranks``."""
    steps: Positive = 100
    """Training steps, one batch each."""
    batch_groups: Positive = 32
    """Prompts in a step, over all ranks."""
    micro_batch_tokens: Positive = 16384
    """Most tokens in one forward pass ([a pack](training.md#packs)); a longer row gets its own pass."""
    param_offload: bool = False
    """Keep the parameters in host memory, except during steps and weight transfers."""
    optimizer_offload: bool = False
    """Keep the optimizer's state in host memory, except during steps."""
    host_step: bool = False
    """Keep parameters, gradients and optimizer state in host memory; the optimizer steps there, on the host's cores."""
    activation_checkpointing: Literal["auto"] | bool = "auto"
    """Recompute layers in the backward pass: less memory, more time. ``auto``: as many as the memory needs."""
    compile: Literal["auto"] | bool = "auto"
    """Compile the layers with torch; ``auto``: where that pays on the device."""
    fused_kernels: bool = True
    """Run layers that are not compiled on the backend's fused operations, where these compute the same."""
    max_restarts: NotNegative = 3
    """Restarts of the trainer, from the last complete checkpoint, before the run ends with an error."""
    threads: Threads = 1
    """Host threads of a rank."""
    profile_steps: tuple[Positive, Positive] | None = None
    """The first and last step that torch's profiler records; rank 0 writes a Chrome trace to ``profile/``."""

    @model_validator(mode="after")
    def _options_are_a_plugins(self) -> TrainConfig:
        if self.engine == FSDP and self.engine_options:
            raise ValueError(f"engine_options are for a plugin's engine, and engine={FSDP} has none")
        return self

    @model_validator(mode="after")
    def _ranks_can_share_packs(self) -> TrainConfig:
        if self.context_parallel > 1 and self.engine != FSDP:
            raise ValueError(f"context_parallel={self.context_parallel} is for engine={FSDP}, not for {self.engine}")
        if self.ranks % self.context_parallel:
            raise ValueError(
                f"context_parallel={self.context_parallel} must divide ranks={self.ranks}: that number of ranks shares "
                "each pack"
            )
        return self

    @model_validator(mode="after")
    def _ranks_divide_into_copies(self) -> TrainConfig:
        if self.shard_ranks is not None and self.engine != FSDP:
            raise ValueError(f"shard_ranks={self.shard_ranks} is for engine={FSDP}; {self.engine} divides by itself")
        if self.shard_ranks is not None and self.ranks % self.shard_ranks:
            raise ValueError(
                f"shard_ranks={self.shard_ranks} must divide ranks={self.ranks}: each copy of the model needs that "
                "number of ranks"
            )
        return self

    @model_validator(mode="after")
    def _the_host_steps_or_keeps(self) -> TrainConfig:
        if self.host_step and (self.param_offload or self.optimizer_offload):
            raise ValueError(
                "host_step=true already keeps parameters and optimizer state in host memory, in the step, too; set "
                "param_offload and optimizer_offload to false"
            )
        return self

    @model_validator(mode="after")
    def _profiled_steps_are_trained(self) -> TrainConfig:
        if self.profile_steps is not None and not self.profile_steps[0] <= self.profile_steps[1] <= self.steps:
            raise ValueError(
                f"profile_steps={list(self.profile_steps)} must be the first and the last of some of the "
                f"steps=1 … {self.steps}"
            )
        return self
