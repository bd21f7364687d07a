"""The configuration of a run: typed, validated, from YAML and ``key=value`` words."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from hwrl.errors import ConfigError, manual
from hwrl.interfaces import LoraSettings
from hwrl.run.bounds import (
    AbsolutePath,
    Decay,
    Finite,
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
    Threads,
)
from hwrl.run.mistakes import describe, keys_in
from hwrl.run.yaml_text import parse_yaml, read_file
from hwrl.train.choices import AdvantageName, LossName

FSDP = "fsdp"
"""The train engine that needs no plugin."""
EMBEDDED = "embedded"
"""The rollout engine that needs no plugin."""

RUN_CONFIG = "config.yaml"
"""In a run directory: the run's configuration, which begins with RUN_HEADER."""
RUN_HEADER = b"# The configuration of the run in this directory; hwrl train writes it anew.\n"
"""How the file begins, and no file that hwrl did not write."""


class Section(BaseModel):
    """A part of the configuration; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class ModelConfig(Section):
    """The model to train."""

    path: AbsolutePath
    """A directory that ``AutoModelForCausalLM`` and ``AutoTokenizer`` can load."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of computing, rollout and export; what the optimizer updates is always float32."""
    lora_rank: NotNegative = 0
    """Train a LoRA adapter of this rank, and leave the model as it is; 0: train the whole model."""
    lora_alpha: PositiveReal = 16.0
    """The adapter's part in a layer is multiplied by ``lora_alpha / lora_rank``."""
    target_modules: Layers = "all-linear"
    """Layers with an adapter, as PEFT has it: ``all-linear``, ends of their names, or a regular expression."""

    @property
    def lora(self) -> LoraSettings | None:
        """The adapter that is trained; None if it is the whole model."""
        if not self.lora_rank:
            return None
        return LoraSettings(rank=self.lora_rank, alpha=self.lora_alpha, target_modules=self.target_modules)


class DataConfig(Section):
    """Prompts: rows with ``prompt`` (a text or messages) and ``answer`` (anything), as .jsonl or .parquet."""

    train: AbsolutePath
    """Prompts to train on."""
    eval: AbsolutePath | None = None
    """Held-out prompts; without them nothing is evaluated."""
    max_prompt_tokens: Positive = 1024
    """A longer prompt is an error."""


class RewardConfig(Section):
    """How a response is judged."""

    function: Name
    """``package.module:function`` or ``file.py:function``, called as ``function(prompt, response, answer)``."""
    attempts: Positive = 3
    """How often a function that raises is called before the prompt has failed."""
    timeout_s: Seconds = 300.0
    """How long one call may take; a longer one counts as a failed try of its prompt."""
    threads: Threads = 4
    """So many calls at a time in each replica, in threads of its process; 1 for a function that is not thread-safe."""

    @field_validator("function")
    @classmethod
    def _a_file_is_absolute(cls, function: str) -> str:
        place, colon, name = function.rpartition(":")
        return f"{Path(place).absolute()}{colon}{name}" if place.endswith(".py") else function


class RolloutConfig(Section):
    """Generation."""

    engine: Name = EMBEDDED
    """``embedded``: a transformers model in the replica's process; or the name of a plugin that brings another."""
    engine_options: Options = {}
    """The plugin's own settings; it checks them."""
    replicas: Processes = 1
    """Rollout processes, each with a model of its own."""
    n: Positive = 8
    """Responses to each prompt."""
    max_new_tokens: Positive = 256
    """A longer response is cut off and counts as truncated."""
    temperature: Temperature = 1.0
    """Of sampling, and of the policy that is trained."""
    max_running: Positive = 128
    """Responses that one replica generates at a time."""
    group_timeout_s: Seconds = 600.0
    """How long a replica may take for a prompt before another gets it."""
    max_attempts: Positive = 3
    """How often a prompt may fail before the run ends with an error."""
    tensor_parallel: Processes = 1
    """Devices over which a replica divides its model, if its engine can. It shares none of them."""
    max_restarts: NotNegative = 3
    """How many replicas may die in a run; each is replaced."""
    threads: Threads = 1
    """Host threads of a replica."""
    free_cache_engine: bool = False
    """A replica that has nothing to do gives its device memory back until there is work again."""
    sleep_level: Literal[1, 2] = 1
    """1 keeps the weights in host memory meanwhile; 2 drops them, so that they must be sent again."""

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
    def _a_group_fits(self) -> RolloutConfig:
        if self.n < 2:
            raise ValueError(
                f"n={self.n} teaches nothing: a response's advantage comes from the others; set n=2 or more"
            )
        if self.max_running < self.n:
            raise ValueError(
                f"max_running={self.max_running} must be at least n={self.n}: a prompt's responses run together"
            )
        return self


class OptimizerConfig(Section):
    """AdamW and its schedule: linear warm-up, then linear decay."""

    learning_rate: PositiveReal = 1e-6
    """The highest one."""
    warmup_steps: NotNegative = 0
    """Optimizer steps until the highest learning rate."""
    min_learning_rate_ratio: Share = 1.0
    """The last learning rate, as a share of the highest; 1 is no decay."""
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """AdamW's decay rates of the moments."""
    weight_decay: NotNegativeReal = 0.0
    """AdamW's."""
    max_grad_norm: PositiveReal = 1.0
    """Gradients are scaled down to this norm."""


class TrainConfig(Section):
    """The training side."""

    engine: Name = FSDP
    """``fsdp``: FSDP2, any ``AutoModelForCausalLM`` directory; or the name of a plugin that brings another."""
    engine_options: Options = {}
    """The plugin's own settings; it checks them."""
    ranks: Processes = 1
    """Training processes that share the model."""
    steps: Positive = 100
    """Batches to train on."""
    batch_groups: Positive = 32
    """Prompts trained on in a step, of all ranks together."""
    micro_batch_tokens: Positive = 16384
    """Padded tokens in one forward pass, at most (a longer response goes alone)."""
    param_offload: bool = False
    """Keep the parameters in host memory, except during steps and weight transfers."""
    optimizer_offload: bool = False
    """Keep the optimizer's state in host memory, except during steps."""
    activation_checkpointing: bool = False
    """Keep only the layers' inputs for the backward pass, and compute the rest again: less memory, more time."""
    max_restarts: NotNegative = 3
    """How often dead trainers are started again from the last complete checkpoint."""
    threads: Threads = 1
    """Host threads of a rank."""

    @model_validator(mode="after")
    def _options_are_a_plugins(self) -> TrainConfig:
        if self.engine == FSDP and self.engine_options:
            raise ValueError(f"engine_options are for a plugin's engine, and engine={FSDP} has none")
        return self


class AlgorithmConfig(Section):
    """Advantages and loss; see :mod:`hwrl.train.losses`."""

    advantage: AdvantageName = "grpo"
    """``grpo``, ``dr_grpo`` or ``rloo``."""
    loss: LossName = "ppo_clip"
    """``ppo_clip``, ``tis`` or ``decoupled``."""
    clip_ratio_low: Annotated[PositiveReal, Field(lt=1)] = 0.2
    """How far the ratio may fall below 1."""
    clip_ratio_high: PositiveReal = 0.28
    """How far the ratio may rise above 1."""
    rollout_is_threshold: PositiveReal = 2.0
    """Importance weights of off-policy tokens are truncated here (``tis`` and ``decoupled``)."""
    ppo_epochs: Positive = 1
    """Passes over each batch."""
    mini_batches: Positive = 1
    """Optimizer steps in a pass."""


class AsyncConfig(Section):
    """How far rollout may run ahead of training."""

    staleness_threshold: NotNegative = 1
    """Weight versions that a token may be behind when it is trained on; 0 is synchronous, on-policy training."""
    trigger_parameter_sync_step: Positive = 1
    """Training steps between two weight versions."""
    partial_rollout: bool = True
    """Take new weights between two tokens of a response; otherwise only when the running responses are finished."""


class WeightsConfig(Section):
    """How weights travel from the trainer to the rollouters."""

    bypass_cpu: bool = True
    """No copy on the host, where the device can; else a versioned store in host memory: the trainer does not wait."""
    send_base: Literal["needed", "always"] = "needed"
    """With an adapter: send the base to a replica that does not hold it, or, for comparison, with every version."""
    update_weights_bucket_megabytes: Mebibytes | None = None
    """Size of a slab of the broadcast buffer, MiB; without it, what suits the device."""
    timeout_s: Seconds = 60.0
    """A replica that does not take part in a transfer for so long is left out, and must join again."""


class CheckpointConfig(Section):
    """Checkpoints."""

    save_every_steps: NotNegative = 50
    """Training steps between two; also at the end and when interrupted, and with 0 only then."""
    async_save: bool = False
    """Write in the background, from a copy; what is offloaded is written from where it lies."""
    staging: Literal["host", "device"] = "host"
    """Where that copy lies: page-locked host memory, or device memory that nothing else needed so far."""
    max_ckpt_to_keep: Positive | None = 2
    """Older ones are deleted, after the newest is complete; null keeps all."""

    @model_validator(mode="after")
    def _only_a_copy_is_staged(self) -> CheckpointConfig:
        if self.staging == "device" and not self.async_save:
            raise ValueError("staging=device is for saves in the background; set async_save=true, too")
        return self


class EvalConfig(Section):
    """Evaluation on held-out prompts, greedy."""

    every_steps: NotNegative = 0
    """0: only at the end."""
    prompts: Positive = 256
    """At most so many, the first of the file."""


class TimeoutConfig(Section):
    """How long a run waits for its own processes. After ten seconds it says what it waits for."""

    heartbeat_s: Seconds = 60.0
    """A process that does not answer for so long is dead: a replica is replaced, trainers start again."""
    start_s: Seconds = 1800.0
    """Setting up one process: its imports, its model."""
    trainer_s: Seconds = 3600.0
    """One call of the trainers: a step, a publication, a save, an export. Then they start again."""
    evaluation_s: Seconds = 3600.0
    """One evaluation. Then its replica is replaced."""


class Config(Section):
    """A whole run. ``hwrl train --print-config`` shows every key with its value."""

    dir: AbsolutePath
    """Run directory: metrics, checkpoints, the reward curve, the resolved configuration."""
    seed: Seed = 0
    """Of the order of the prompts and of sampling."""
    resume: bool = False
    """Continue from the newest complete checkpoint in ``dir``; without one, start at the beginning."""
    goals: dict[Name, Finite] = {}
    """Figures that the last training step and the last evaluation must reach; else the exit status is 1."""
    model: ModelConfig
    data: DataConfig
    reward: RewardConfig
    rollout: RolloutConfig = RolloutConfig()
    train: TrainConfig = TrainConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    async_training: AsyncConfig = AsyncConfig()
    weights: WeightsConfig = WeightsConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    eval: EvalConfig = EvalConfig()
    timeouts: TimeoutConfig = TimeoutConfig()

    @model_validator(mode="after")
    def _ranks_share_a_batch(self) -> Config:
        if self.train.batch_groups < self.train.ranks:
            raise ValueError(
                f"train.batch_groups={self.train.batch_groups} must be at least train.ranks={self.train.ranks}"
            )
        return self

    @model_validator(mode="after")
    def _every_mini_batch_has_a_response(self) -> Config:
        shares = self.train.ranks if self.train.engine == FSDP else 1  # a plugin's ranks may share a batch
        responses = self.train.batch_groups // shares * self.rollout.n
        if self.algorithm.mini_batches > responses:
            raise ValueError(
                f"algorithm.mini_batches={self.algorithm.mini_batches} must be at most {responses}, the responses of a "
                f"rank: train.batch_groups={self.train.batch_groups} // train.ranks={self.train.ranks} * rollout.n="
                f"{self.rollout.n}"
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

    @property
    def groups_per_version(self) -> int:
        """Prompts trained on under one weight version."""
        return self.train.batch_groups * self.async_training.trigger_parameter_sync_step


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read ``path`` (YAML), apply ``key.subkey=value`` words in order, validate; ConfigError names what is wrong.

    Values are read as YAML. Relative paths in the file and in the words are relative to the working directory. The
    configuration that a run directory holds has no ``dir``: it means the directory that it lies in.
    """
    try:
        content = read_file(path)
        tree = parse_yaml(content.decode("utf-8"))
    except OSError as exc:
        raise ConfigError(f"cannot read {path}", why=str(exc), fix="name a YAML file") from exc
    except UnicodeDecodeError as exc:
        raise ConfigError(f"{path} is not text in UTF-8", why=str(exc), fix="save it as UTF-8") from exc
    except ValueError as exc:
        raise ConfigError(f"{path} is not YAML that can be used", why=str(exc), fix="correct the file") from exc
    tree = {} if tree is None else tree
    if not isinstance(tree, dict):
        raise ConfigError(
            f"{path} holds no sections",
            why=f"it is a {type(tree).__name__}",
            fix="write 'dir: …', 'model: {path: …}', …",
        )
    if path.name == RUN_CONFIG and content.startswith(RUN_HEADER):
        tree.setdefault("dir", str(path.parent))
    for word in overrides:
        _override(tree, word)
    return parse_config(tree)


def parse_config(tree: dict[str, Any]) -> Config:
    """Validate ``tree``; ConfigError lists every mistake, with a suggestion for each unknown key."""
    try:
        return Config.model_validate(tree)
    except ValidationError as exc:
        mistakes = [describe(error, root=Config) for error in exc.errors(include_url=False)]
        raise ConfigError(
            f"the configuration has {len(mistakes)} mistake{'s' if len(mistakes) > 1 else ''}",
            why="\n       ".join(mistakes),
            fix=f"correct each; {manual('configuration.md')} lists every key with its default",
        ) from exc


def dump_config(config: Config) -> str:
    """Return ``config`` as YAML, every key included, such that :func:`load_config` reads it back."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def dump_run_config(config: Config) -> bytes:
    """Return what a run directory's ``config.yaml`` holds: all but ``dir``, since it may be moved, and ``resume``."""
    return (
        RUN_HEADER + yaml.safe_dump(config.model_dump(mode="json", exclude={"dir", "resume"}), sort_keys=False).encode()
    )


def _override(tree: dict[str, Any], word: str) -> None:
    key, separator, text = word.partition("=")
    parts = key.split(".")
    if not separator or not all(parts):
        raise ConfigError(f"{word!r} is not an override", why="it must be key=value", fix="for example train.steps=100")
    try:
        value = parse_yaml(text)
    except ValueError as exc:
        raise ConfigError(f"the value of {word!r} cannot be read", why=str(exc), fix="quote it") from exc
    for depth, part in enumerate(parts[:-1], start=1):
        child = tree.setdefault(part, {})
        if not isinstance(child, dict):
            raise _not_a_section(word, place=".".join(parts[:depth]), value=child)
        tree = child
    tree[parts[-1]] = value


def _not_a_section(word: str, *, place: str, value: object) -> ConfigError:
    keys = keys_in(place, root=Config)
    likely = f"give {place} in the file as a section with keys like {keys[0]}" if keys else f"set {place}=… itself"
    return ConfigError(f"{word!r} does not fit", why=f"{place} is the value {value!r}, not a section", fix=likely)
