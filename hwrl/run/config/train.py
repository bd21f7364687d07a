"""The keys of the sections ``optimizer`` and ``train``."""

from __future__ import annotations

from typing import Literal

from pydantic import (
    Field,
    model_validator,
)

from hwrl.run.config.values import (
    Decay,
    Name,
    NotNegative,
    NotNegativeReal,
    Options,
    Positive,
    PositiveReal,
    ProcessCount,
    Section,
    Share,
    Threads,
)

FSDP = "fsdp"
"""The train engine that needs no plugin."""


class OptimizerConfig(Section):
    """AdamW and the schedule of its learning rate: linear warm-up, then linear decay."""

    learning_rate: PositiveReal = 1e-6
    """Peak learning rate."""
    warmup_steps: NotNegative = 0
    """Optimizer steps of the warm-up."""
    min_learning_rate_ratio: Share = 1.0
    """Final learning rate divided by the peak; 1: no decay."""
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """AdamW's decay rates for the two moments."""
    weight_decay: NotNegativeReal = 0.0
    """AdamW's weight decay."""
    max_grad_norm: PositiveReal = 1.0
    """Gradient clipping norm."""
    max_skipped_in_a_row: NotNegative = 3
    """Maximum number of updates in a row skipped because the gradient norm is NaN or inf. One more ends the run."""


class TrainConfig(Section):
    """The training side: engine, ranks, batches and memory."""

    engine: Name = FSDP
    """``fsdp``: FSDP2, for any ``AutoModelForCausalLM`` directory; or the name of an engine from a plugin."""
    engine_options: Options = Field(default_factory=dict)
    """Settings of the plugin's engine. The plugin checks them."""
    ranks: ProcessCount = 1
    """Number of training processes. They train one model together."""
    context_parallel: ProcessCount = 1
    """Number of neighbouring ranks that [share each pack](train_engine.md#long-rows): a divisor of ``ranks``."""
    shard_ranks: ProcessCount | None = None
    """FSDP shard group size (HSDP): the number of neighbouring ranks that shard one copy of the model; null: all."""
    steps: Positive = 100
    """Number of training steps, with one batch each."""
    batch_groups: Positive = 32
    """Number of prompts in a step, over all ranks."""
    micro_batch_tokens: Positive = 16384
    """Maximum tokens in one forward pass ([a pack](train_engine.md#packs)). A longer row gets a pass of its own."""
    param_offload: bool = False
    """Keep the parameters in host memory, except during steps and weight transfers."""
    optimizer_offload: bool = False
    """Keep the optimizer's state in host memory, except during steps."""
    host_step: bool = False
    """Keep parameters, gradients and optimizer state in host memory, and run the optimizer on the host's cores."""
    activation_checkpointing: Literal["auto"] | bool = "auto"
    """Recompute layers in the backward pass, to save memory; ``auto``: as many layers as necessary."""
    compile: Literal["auto"] | bool = "auto"
    """Compile the layers with torch; ``auto``: if the device becomes faster by it."""
    fused_kernels: bool = True
    """Use the backend's fused operations in layers that are not compiled, if they compute the same."""
    max_restarts: NotNegative = 3
    """Maximum restarts of the trainer in the whole run, each from the newest checkpoint. Another death ends it."""
    threads: Threads = 1
    """Host threads per rank."""
    profile_steps: tuple[Positive, Positive] | None = None
    """First and last step to record with torch's profiler. Rank 0 writes a Chrome trace to ``profile/``."""

    @model_validator(mode="after")
    def _keys_fit_together(self) -> TrainConfig:
        if self.engine == FSDP and self.engine_options:
            raise ValueError(f"engine_options are for an engine from a plugin; engine={FSDP} has no options")
        if self.context_parallel > 1 and self.engine != FSDP:
            raise ValueError(f"context_parallel={self.context_parallel} is for engine={FSDP}, not for {self.engine}")
        if self.ranks % self.context_parallel:
            raise ValueError(
                f"context_parallel={self.context_parallel} must divide ranks={self.ranks}: this number of ranks shares "
                "each pack"
            )
        if self.shard_ranks is not None and self.engine != FSDP:
            raise ValueError(f"shard_ranks={self.shard_ranks} is for engine={FSDP}; {self.engine} has its own sharding")
        if self.shard_ranks is not None and self.ranks % self.shard_ranks:
            raise ValueError(
                f"shard_ranks={self.shard_ranks} must divide ranks={self.ranks}: this number of ranks shards each copy "
                "of the model"
            )
        if self.host_step and (self.param_offload or self.optimizer_offload):
            raise ValueError(
                "host_step=true always keeps parameters and optimizer state in host memory; set param_offload and "
                "optimizer_offload to false"
            )
        if self.profile_steps is not None and not self.profile_steps[0] <= self.profile_steps[1] <= self.steps:
            raise ValueError(
                f"profile_steps={list(self.profile_steps)} must be the first and the last of a range of the "
                f"steps=1 … {self.steps}"
            )
        return self
