"""The keys of the sections ``rollout``, ``optimizer``, ``train``, ``algorithm``, ``critic`` and ``report``."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import AfterValidator, Field, model_validator

from hwrl.run.config.values import (
    Decay,
    Function,
    ModelPath,
    Name,
    NotNegative,
    NotNegativeReal,
    Options,
    Positive,
    PositiveReal,
    ProcessCount,
    Seconds,
    Section,
    Share,
    Temperature,
    Texts,
    Threads,
    TokenIds,
    TopK,
    TopP,
    UserOptions,
    built_in_or_function,
    functions_in,
)
from hwrl.train import (
    WEIGHTED_LOSSES,
    AdvantageName,
    AggregationMode,
    ImportanceLevel,
    KlEstimator,
    LossName,
    RejectionMode,
)

EMBEDDED = "embedded"
"""The rollout engine that needs no plugin."""

FSDP = "fsdp"
"""The train engine that needs no plugin."""

_WITHOUT_BASELINE = ("gae", "reinforce_plus_plus")
"""The advantages that do not compare a response with others to the same prompt."""

_NO_LOSSES = {
    name: f"{name} is an advantage: set algorithm.advantage={name}; its loss is usually loss=ppo_clip"
    for name in get_args(AdvantageName)
} | {
    "ppo": "Input should be ppo_clip for the loss of PPO; its critic comes with algorithm.advantage=gae",
    "dapo": "DAPO is loss=ppo_clip with clip_ratio_high, filter_groups=true and overlong_buffer_tokens",
}
_NO_ADVANTAGES = {name: f"{name} is a loss: set algorithm.loss={name}" for name in get_args(LossName)} | {
    "ppo": "the advantages of PPO are advantage=gae, with a critic; its loss is algorithm.loss=ppo_clip",
    "dapo": "DAPO is advantage=grpo, with filter_groups=true and overlong_buffer_tokens",
}


class RolloutConfig(Section):
    """The rollout side: replicas, their engine, sampling and workflows."""

    engine: Name = EMBEDDED
    """``embedded``: a transformers model in the replica's process; or the name of an engine from a plugin."""
    engine_options: Options = Field(default_factory=dict)
    """Settings of the plugin's engine. The plugin checks them."""
    replicas: ProcessCount = 1
    """Number of rollout processes, each with its own copy of the model."""
    n: Positive = 8
    """Number of responses per prompt."""
    max_new_tokens: Positive = 256
    """Maximum number of tokens in a response. A longer response is cut off and counts as truncated."""
    temperature: Temperature = 1.0
    """Sampling temperature. The trainer applies it to the logits as well."""
    top_p: TopP = 1.0
    """Sample from the smallest set of tokens with this total probability; 1: all ([sampling](training.md#sampling))."""
    top_k: TopK = -1
    """Sample from this number of most probable tokens; -1: all."""
    min_p: Share = 0.0
    """Drop tokens with a probability below this share of the largest one; 0: none."""
    stop: Texts = ()
    """Texts that end a response. They remain part of it."""
    stop_token_ids: TokenIds = ()
    """Tokens that end a response, in addition to the model's end tokens."""
    max_running: Positive = 128
    """Maximum number of responses that one replica generates at the same time."""
    workflow: Function | None = None
    """``package.module:factory`` or ``file.py:factory`` of a [workflow](workflows.md); null: one turn per sample."""
    workflow_options: UserOptions = Field(default_factory=dict)
    """Further arguments of the factory. A file named in them as ``file.py:function`` is an input of the run."""
    workflow_timeout_s: Seconds = 300.0
    """Time limit for one run of the workflow. A longer run is cancelled and counts as failed."""
    workflow_attempts: Positive = 2
    """Maximum number of runs of the workflow for one sample. After that many failures the prompt has failed."""
    max_trajectories: Positive | None = None
    """Maximum number of workflow runs in one replica at the same time; null: ``max_running``."""
    max_model_len: Positive | None = None
    """Maximum tokens of a trajectory with its prompt; null: ``data.max_prompt_tokens`` + ``max_new_tokens``."""
    tool_parser: Name = "hermes"
    """Format of [tool calls](agents.md#tools) in workflows: ``hermes``, or the name of one of the engine's parsers."""
    group_timeout_s: Seconds = 600.0
    """Time limit without [progress](staleness.md#progress) on a prompt. Then its replica is replaced."""
    max_attempts: Positive = 3
    """Maximum number of attempts at a prompt. After that many failures it is given up."""
    on_failure: Literal["stop", "skip"] = "stop"
    """If a prompt is given up: ``stop`` the run with an error, or ``skip`` the prompt and train on another one."""
    max_skipped_in_a_row: Positive = 10
    """Maximum number of prompts skipped without a finished prompt in between. One more ends the run."""
    tensor_parallel: ProcessCount = 1
    """Devices per replica, if its engine can divide a model. A replica with several devices does not share them."""
    max_restarts: NotNegative = 3
    """Maximum consecutive restarts of a replica, without a finished prompt in between. Then it is given up."""
    min_replicas: ProcessCount | None = None
    """Minimum number of replicas, when some are given up; null: ``replicas``, or the number after scaling down."""
    threads: Threads = 1
    """Host threads per replica."""
    free_cache_engine: bool = False
    """Let an idle replica sleep: it frees its device memory until it has work again."""
    sleep_level: Literal[1, 2] = 1
    """1: a sleeping replica keeps its weights in host memory; 2: it drops them and receives them again."""

    @property
    def workflow_functions(self) -> dict[str, str]:
        """The functions of users' files in ``workflow_options``, by their keys."""
        return functions_in(self.workflow_options, "rollout.workflow_options")

    @model_validator(mode="after")
    def _keys_fit_together(self) -> RolloutConfig:
        if self.engine == EMBEDDED and self.engine_options:
            raise ValueError(f"engine_options are for an engine from a plugin; engine={EMBEDDED} has no options")
        if self.engine == EMBEDDED and self.tensor_parallel > 1:
            raise ValueError(
                f"tensor_parallel={self.tensor_parallel} is not possible: engine={EMBEDDED} uses one device per replica"
            )
        if self.sleep_level == 2 and not self.free_cache_engine:
            raise ValueError("sleep_level=2 is for replicas that sleep; also set free_cache_engine=true")
        settings = {name: getattr(self, name) for name in ("workflow_options", "max_trajectories", "max_model_len")}
        given = [name for name, value in settings.items() if value]
        if self.workflow is None and given:
            raise ValueError(f"{' and '.join(given)} can only be set with a workflow; also set workflow")
        if self.max_trajectories is not None and self.max_trajectories < self.n:
            raise ValueError(
                f"max_trajectories={self.max_trajectories} must be at least n={self.n}: a prompt's runs start together"
            )
        if self.min_replicas is not None and self.min_replicas > self.replicas:
            raise ValueError(f"min_replicas={self.min_replicas} must be at most replicas={self.replicas}")
        if self.max_running < self.n:
            raise ValueError(
                f"max_running={self.max_running} must be at least n={self.n}: the responses to a prompt run together"
            )
        return self


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


class AlgorithmConfig(Section):
    """Advantages and loss; [algorithms](algorithms.md) has the formulas, and how to write your own."""

    advantage: Annotated[Function, AfterValidator(built_in_or_function(get_args(AdvantageName), _NO_ADVANTAGES))] = (
        "grpo"
    )
    """A built-in one: ``grpo``, ``dr_grpo``, ``rloo``, …; ``gae`` with a [critic](#critic); or your function."""
    loss: Annotated[Function, AfterValidator(built_in_or_function(get_args(LossName), _NO_LOSSES))] = "ppo_clip"
    """A built-in one: ``ppo_clip``, ``tis``, ``decoupled``, ``gspo``, ``cispo``, ``distill``; or your function."""
    reference: ModelPath | None = None
    """The [reference](algorithms.md#a-reference-model), a directory or a name on the hub; null: the starting model."""
    clip_ratio_low: Annotated[PositiveReal, Field(lt=1)] = 0.2
    """Lower clip range: a ratio below 1 - ``clip_ratio_low`` is clipped."""
    clip_ratio_high: PositiveReal = 0.28
    """Upper clip range: a ratio above 1 + ``clip_ratio_high`` is clipped."""
    rollout_is: ImportanceLevel = "token"
    """Importance weights (``tis``, ``decoupled``, ``distill``): one per ``token``, or one per ``sequence``."""
    rollout_is_threshold: PositiveReal = 2.0
    """Importance weights are truncated to this value."""
    rollout_rs: RejectionMode | None = None
    """Reject tokens by their ratio to the rollout policy, or whole responses by its product or geometric mean."""
    rollout_rs_threshold: PositiveReal = 2.0
    """Upper bound of accepted ratios."""
    rollout_rs_threshold_lower: PositiveReal | None = None
    """Lower bound of accepted ratios; null: 1 / ``rollout_rs_threshold``."""
    loss_agg_mode: AggregationMode = "token-mean"
    """How the losses of tokens are [aggregated](algorithms.md#aggregation) to one number."""
    loss_scale_factor: PositiveReal | None = None
    """Divisor for ``seq-mean-token-sum-norm``; null: ``rollout.max_new_tokens``."""
    kl_coeff: NotNegativeReal = 0.0
    """KL loss coefficient, for the divergence from the reference model; 0: none is kept for it."""
    kl_estimator: KlEstimator = "k3"
    """Estimator of the KL divergence: ``k1``, ``k2`` or ``k3``."""
    entropy_coeff: NotNegativeReal = 0.0
    """Entropy bonus coefficient."""
    mask_truncated: bool = False
    """Exclude truncated responses from the loss."""
    overlong_buffer_tokens: NotNegative = 0
    """Length of the soft overlong zone (DAPO), the last tokens before ``rollout.max_new_tokens``; 0: no zone."""
    overlong_penalty: NotNegativeReal = 1.0
    """Penalty at the end of the overlong zone. It grows linearly from 0 at the start of the zone."""
    ppo_epochs: Positive = 1
    """Training passes over each batch."""
    mini_batches: Positive = 1
    """Mini-batches per pass: each makes one optimizer step."""
    filter_groups: bool = False
    """Train only on prompts whose rewards differ ([dynamic sampling](staleness.md#dynamic-sampling))."""
    max_filtered_in_a_row: Positive = 1000
    """Maximum number of prompts filtered without another finished prompt in between. One more ends the run."""

    @model_validator(mode="after")
    def _settings_have_an_effect(self) -> AlgorithmConfig:
        if self.rollout_is != "token" and self.loss not in WEIGHTED_LOSSES:
            losses = " or ".join(WEIGHTED_LOSSES)
            raise ValueError(f"rollout_is={self.rollout_is} is for loss={losses}, not for {self.loss}")
        if self.loss == "distill" and self.reference is None:
            raise ValueError("loss=distill needs a teacher: set algorithm.reference to a model with the same tokenizer")
        if self.loss_scale_factor is not None and self.loss_agg_mode != "seq-mean-token-sum-norm":
            raise ValueError(
                f"loss_scale_factor is for loss_agg_mode=seq-mean-token-sum-norm, not {self.loss_agg_mode}"
            )
        if self.rollout_rs is None and (self.rollout_rs_threshold != 2 or self.rollout_rs_threshold_lower is not None):
            raise ValueError("rollout_rs_threshold has no effect without rollout_rs; also set rollout_rs=token_k1")
        if self.rejection_band[0] >= self.rollout_rs_threshold:
            raise ValueError(
                f"rollout_rs_threshold_lower={self.rejection_band[0]:g} must be less than "
                f"rollout_rs_threshold={self.rollout_rs_threshold:g}"
            )
        return self

    @property
    def rejection_band(self) -> tuple[float, float]:
        """The lower and the upper bound of accepted ratios."""
        return self.rollout_rs_threshold_lower or 1 / self.rollout_rs_threshold, self.rollout_rs_threshold

    @property
    def compares_responses(self) -> bool:
        """Whether an advantage compares the responses to a prompt. Taken as False for a user's function.

        A distillation uses no advantage.
        """
        return self.loss != "distill" and ":" not in self.advantage and self.advantage not in _WITHOUT_BASELINE

    @property
    def has_critic(self) -> bool:
        """Whether the advantages come from a critic."""
        return self.advantage == "gae"


class CriticConfig(Section):
    """The critic of PPO, for ``algorithm.advantage=gae``: a second model, which outputs a value for each token.

    Its other settings are those of the policy: ``train``, ``optimizer`` and the adapter.
    """

    path: ModelPath | None = None
    """The model from which the critic starts, with a new output layer; null: ``model.path``."""
    learning_rate: PositiveReal = 1e-5
    """Peak learning rate of the critic."""
    cliprange_value: PositiveReal = 0.2
    """Value clip range: the loss clips a value to this distance from the old value."""
    gamma: Annotated[PositiveReal, Field(le=1)] = 1.0
    """Discount factor of rewards, per token of the policy."""
    lam: Share = 0.95
    """GAE lambda: 1 uses only rewards, 0 only the value of the next token."""
    kl_coeff: NotNegativeReal = 0.0
    """KL penalty coefficient in the rewards, per token (PPO); 0: no reference model is kept."""
    warmup_steps: NotNegative = 0
    """Training steps at the start that train only the critic."""


class ReportConfig(Section):
    """Samples, trackers and traces: what a run records about itself."""

    samples_per_step: NotNegative = 2
    """Trajectories of each step, chosen at random, that are written as text to ``samples.jsonl``; 0: none."""
    trackers: tuple[Function, ...] = ("tensorboard",)
    """Other places for metrics: names of plugins, ``file.py:function``; see [trackers](report.md#trackers)."""
    tracker_options: dict[Function, Options] = Field(default_factory=dict)
    """Settings of a tracker, by its name in ``trackers``. The tracker checks them."""
    trace_every: NotNegative = 0
    """Trace every n-th prompt, for [trackers of traces](watching.md#traces); 0: none."""
    run_name: Name | None = None
    """Name of the run in trackers; null: the last part of ``dir``."""

    @model_validator(mode="after")
    def _keys_fit_together(self) -> ReportConfig:
        if len(set(self.trackers)) < len(self.trackers):
            raise ValueError(f"trackers={list(self.trackers)} has the same name twice")
        unused = sorted(self.tracker_options.keys() - set(self.trackers))
        if unused:
            raise ValueError(f"tracker_options are for trackers={list(self.trackers)}, not for {', '.join(unused)}")
        return self
