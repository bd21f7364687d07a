"""The keys of a run's configuration, with their types, bounds and defaults."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
    field_validator,
    model_validator,
)

from hwrl.interfaces import LoraSettings
from hwrl.run.config.algorithm import AlgorithmConfig, CriticConfig
from hwrl.run.config.report import ReportConfig
from hwrl.run.config.section import Section
from hwrl.run.config.values import (
    AbsolutePath,
    DataName,
    DataPath,
    Decay,
    EvalTemperature,
    Finite,
    Function,
    Layers,
    Mebibytes,
    Name,
    NotNegative,
    NotNegativeReal,
    Options,
    Positive,
    PositiveReal,
    Processes,
    Seconds,
    Seed,
    Share,
    Temperature,
    Texts,
    Threads,
    TokenIds,
    TopK,
    TopP,
)

FSDP = "fsdp"
"""The train engine that needs no plugin."""
EMBEDDED = "embedded"
"""The rollout engine that needs no plugin."""


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


class DataSetConfig(Section):
    """One of several data sets. [docs/data.md](data.md) explains the keys."""

    path: DataPath
    """A file, a directory of the library ``datasets``, or a name on the hub, ``hf:NAME?split=SPLIT``."""
    name: DataName = ""
    """Its name in metrics; by default the file's, without the ending."""
    weight: PositiveReal = 1.0
    """Its share of the prompts of a mixture, relative to the others."""
    prompt_key: Name | None = None
    """Instead of ``data.prompt_key``."""
    answer_key: Name | None = None
    """Instead of ``data.answer_key``."""


def _name_data_sets(value: Any) -> Any:
    """Return the entries of a list or a mapping with names; anything else as it is."""
    if isinstance(value, dict):
        value = [{"name": name, **(one if isinstance(one, dict) else {"path": one})} for name, one in value.items()]
    if not isinstance(value, list | tuple):
        return value
    entries = [dict(one) if isinstance(one, dict) else one for one in value]
    entries = [one if isinstance(one, dict | DataSetConfig) else {"path": one} for one in entries]
    for one in entries:
        if isinstance(one, dict) and isinstance(one.get("path"), str | Path) and not one.get("name"):
            one["name"] = Path(str(one["path"]).partition("?")[0]).stem
    return entries


def _check_names(sets: tuple[DataSetConfig, ...]) -> tuple[DataSetConfig, ...]:
    names = [one.name for one in sets]
    if len(set(names)) < len(names):
        raise ValueError(f"data sets need different names, and these have {', '.join(names)}; give each a name")
    return sets


_ONE, _SEVERAL = "<one>", "<several>"
DataSets = Annotated[
    Annotated[DataPath, Tag(_ONE)]
    | Annotated[tuple[DataSetConfig, ...], Field(min_length=1), AfterValidator(_check_names), Tag(_SEVERAL)],
    Discriminator(lambda value: _SEVERAL if isinstance(value, list | tuple) else _ONE),
    BeforeValidator(_name_data_sets),
]
"""One path; or a list of paths and data sets; or a mapping from names to these."""


def _listed(sets: Path | tuple[DataSetConfig, ...]) -> tuple[DataSetConfig, ...]:
    return (DataSetConfig(path=sets),) if isinstance(sets, Path) else sets


class DataConfig(Section):
    """Prompts: rows with ``prompt`` (a text or messages), ``answer`` (anything) and [further columns](data.md)."""

    train: DataSets
    """Prompts to train on: a path (.jsonl, .parquet, a directory), ``hf:NAME?split=SPLIT``, or a list: a mixture."""
    eval: DataSets | None = None
    """Held-out prompts for evaluations, likewise; several sets: a list, or names with paths. null: no evaluations."""
    prompt_key: Name = "prompt"
    """The column with the prompt."""
    answer_key: Name = "answer"
    """The column with the answer."""
    curriculum: Function | None = None
    """``package.module:function`` or ``file.py:function`` that [orders the prompts](data.md#curriculum)."""
    max_prompt_tokens: Positive = 1024
    """A longer prompt is an error."""

    @field_validator("eval")
    @classmethod
    def _all_evaluations_count(cls, sets: Path | tuple[DataSetConfig, ...] | None) -> object:
        if isinstance(sets, tuple) and any(one.weight != 1 for one in sets):
            raise ValueError("weights are for data.train: each set for evaluations is used whole")
        return sets

    @property
    def train_sets(self) -> tuple[DataSetConfig, ...]:
        """The data sets to train on. A single path has no name."""
        return _listed(self.train)

    @property
    def eval_sets(self) -> tuple[DataSetConfig, ...]:
        """The data sets for evaluations. A single path has no name."""
        return () if self.eval is None else _listed(self.eval)

    def keys_of(self, one: DataSetConfig) -> tuple[str, str]:
        """Return the names of the columns with the prompt and the answer."""
        return one.prompt_key or self.prompt_key, one.answer_key or self.answer_key


class RewardConfig(Section):
    """The reward of a response."""

    function: Function | None = None
    """``package.module:function`` or ``file.py:function``, of (prompt, response, answer). null: the workflow's."""
    attempts: Positive = 3
    """Calls for one prompt, if the function raises, before the prompt has failed."""
    timeout_s: Seconds = 300.0
    """Time limit of one call. A longer call is killed; its prompt has failed."""
    workers: Processes = 4
    """Most processes of each replica that call the function; another one starts when prompts wait."""
    batch: bool = False
    """Call the function once per prompt, with lists: an element for each response, and so the result."""
    concurrency: Positive = 64
    """Calls of an async function at the same time, in each process."""


class RolloutConfig(Section):
    """Generation."""

    engine: Name = EMBEDDED
    """``embedded``: a transformers model in the replica's process; or the name of a plugin's engine."""
    engine_options: Options = Field(default_factory=dict)
    """The plugin's own settings, checked by the plugin."""
    replicas: Processes = 1
    """Rollout processes, each with its own model."""
    n: Positive = 8
    """Responses per prompt."""
    max_new_tokens: Positive = 256
    """A longer response is cut off and counts as truncated."""
    temperature: Temperature = 1.0
    """Temperature of sampling, and of the trained policy."""
    top_p: TopP = 1.0
    """Sample among the fewest tokens with this probability together; 1: all ([sampling](training.md#sampling))."""
    top_k: TopK = -1
    """Sample among this number of the most probable tokens; -1: all."""
    min_p: Share = 0.0
    """Drop tokens below this share of the largest probability; 0: none."""
    stop: Texts = ()
    """Texts that end a response, and stay in it."""
    stop_token_ids: TokenIds = ()
    """Tokens that end a response, beside the model's end tokens."""
    max_running: Positive = 128
    """Responses in one replica at the same time."""
    workflow: Function | None = None
    """``package.module:factory`` or ``file.py:factory`` of a [workflow](workflows.md); null: one response, one turn."""
    workflow_options: Options = Field(default_factory=dict)
    """Further arguments of the factory."""
    workflow_timeout_s: Seconds = 300.0
    """Time limit of one run of the workflow. A longer run is cancelled, and has failed."""
    workflow_attempts: Positive = 2
    """Runs of the workflow for one sample, if it fails, before the prompt has failed."""
    max_trajectories: Positive | None = None
    """Runs of the workflow in one replica at the same time; null: ``max_running``."""
    max_model_len: Positive | None = None
    """Most tokens of a trajectory, the prompt included; null: ``data.max_prompt_tokens`` + ``max_new_tokens``."""
    tool_parser: Name = "hermes"
    """The form of [tool calls](agents.md#tools) in workflows: ``hermes``, or the name of a parser of the engine."""
    endpoint_host: Name = "127.0.0.1"
    """The address of a replica's machine at which [endpoints](agents.md) for agents listen; 0.0.0.0: all of them."""
    group_timeout_s: Seconds = 600.0
    """Time without [progress](training.md#progress) on a prompt; then its replica counts as hung and is replaced."""
    max_attempts: Positive = 3
    """Failures of one prompt before it is given up."""
    on_failure: Literal["stop", "skip"] = "stop"
    """When a prompt is given up: ``stop`` the run with an error, or ``skip`` the prompt; another one is trained."""
    max_skipped_in_a_row: Positive = 10
    """Prompts that may be skipped with no finished prompt between them; the next one ends the run."""
    tensor_parallel: Processes = 1
    """Devices per replica, if its engine can divide a model. It shares none of them."""
    max_restarts: NotNegative = 3
    """Deaths of replicas in a run before it ends with an error; each dead replica is replaced."""
    threads: Threads = 1
    """Host threads of a replica."""
    free_cache_engine: bool = False
    """An idle replica frees its device memory until it has work again."""
    sleep_level: Literal[1, 2] = 1
    """1: an idle replica keeps its weights in host memory; 2: it drops them, and they are sent again."""

    @model_validator(mode="after")
    def _options_are_a_plugins(self) -> RolloutConfig:
        if self.engine == EMBEDDED and self.engine_options:
            raise ValueError(f"engine_options are for a plugin's engine, and engine={EMBEDDED} has none")
        return self

    @model_validator(mode="after")
    def _a_plugins_engine_is_divided(self) -> RolloutConfig:
        if self.engine == EMBEDDED and self.tensor_parallel > 1:
            raise ValueError(
                f"tensor_parallel={self.tensor_parallel} is not possible: engine={EMBEDDED} uses one device"
            )
        return self

    @model_validator(mode="after")
    def _only_a_sleeper_has_a_level(self) -> RolloutConfig:
        if self.sleep_level == 2 and not self.free_cache_engine:
            raise ValueError("sleep_level=2 is for replicas that sleep; set free_cache_engine=true, too")
        return self

    @model_validator(mode="after")
    def _only_a_workflow_has_settings(self) -> RolloutConfig:
        settings = {name: getattr(self, name) for name in ("workflow_options", "max_trajectories", "max_model_len")}
        given = [name for name, value in settings.items() if value]
        if self.workflow is None and given:
            raise ValueError(f"{' and '.join(given)} must stay away without a workflow; set workflow, too")
        if self.max_trajectories is not None and self.max_trajectories < self.n:
            raise ValueError(
                f"max_trajectories={self.max_trajectories} must be at least n={self.n}: a prompt's runs go together"
            )
        return self

    @model_validator(mode="after")
    def _a_group_fits(self) -> RolloutConfig:
        if self.max_running < self.n:
            raise ValueError(
                f"max_running={self.max_running} must be at least n={self.n}: a prompt's responses run together"
            )
        return self


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
    ranks: Processes = 1
    """Training processes. They share one model."""
    context_parallel: Processes = 1
    """Neighbouring ranks that [share each pack](training.md#long-rows): a divisor of ``ranks``."""
    shard_ranks: Processes | None = None
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


class EvalConfig(Section):
    """Evaluation on held-out prompts, spread over the replicas."""

    every_steps: NotNegative = 0
    """Training steps between two evaluations; 0: only at the end."""
    prompts: Positive = 256
    """Most prompts of each set, from its beginning."""
    n: Positive = 1
    """Responses to each prompt. With several there is [pass@k](data.md#evaluation)."""
    temperature: EvalTemperature = 0.0
    """Temperature of sampling; 0: greedy."""
    pass_reward: Finite = 1.0
    """A response with this reward, or more, has passed, for pass@k."""

    @model_validator(mode="after")
    def _samples_differ(self) -> EvalConfig:
        if self.n > 1 and self.temperature == 0:
            raise ValueError(f"n={self.n} greedy responses to a prompt would be equal; set temperature, too")
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
    """One evaluation. Then its replica is replaced."""


class Config(Section):
    """A whole run. ``hwrl train --print-config`` shows every key with its value."""

    dir: AbsolutePath
    """Run directory: metrics, checkpoints, the reward curve, the resolved configuration."""
    seed: Seed = 0
    """Seed of the order of prompts and of sampling."""
    resume: bool = False
    """Continue from the newest complete checkpoint in ``dir``; without one, start at the beginning."""
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
        if self.rollout.n < 2 and not self.algorithm.has_critic:
            raise ValueError(
                f"rollout.n={self.rollout.n} teaches nothing: a response's advantage comes from the others; set "
                "rollout.n=2 or more, or algorithm.advantage=gae"
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
        """Whether a frozen copy of the model is the reference of ``algorithm.kl_coeff``; an adapter has its base."""
        return self.algorithm.kl_coeff != 0 and self.model.lora is None

    @property
    def groups_per_version(self) -> int:
        """Prompts trained with one weight version."""
        return self.train.batch_groups * self.async_training.trigger_parameter_sync_step
