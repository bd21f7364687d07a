"""The part of the configuration about generation."""

from __future__ import annotations

from typing import Literal

from pydantic import (
    Field,
    model_validator,
)

from hwrl.run.config.section import Section
from hwrl.run.config.values import (
    Function,
    Name,
    NotNegative,
    Options,
    Positive,
    ProcessCount,
    Seconds,
    Share,
    Temperature,
    Texts,
    Threads,
    TokenIds,
    TopK,
    TopP,
    UserOptions,
    functions_in,
)

EMBEDDED = "embedded"
"""The rollout engine that needs no plugin."""


class RolloutConfig(Section):
    """Generation."""

    engine: Name = EMBEDDED
    """``embedded``: a transformers model in the replica's process; or the name of a plugin's engine."""
    engine_options: Options = Field(default_factory=dict)
    """The plugin's own settings, checked by the plugin."""
    replicas: ProcessCount = 1
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
    workflow_options: UserOptions = Field(default_factory=dict)
    """Further arguments of the factory. The files of functions in them (``file.py:function``) are inputs of the run."""
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
    tensor_parallel: ProcessCount = 1
    """Devices per replica, if its engine can divide a model. It shares none of them."""
    max_restarts: NotNegative = 3
    """Restarts of a replica with no finished prompt between them, after growing pauses; then it is given up."""
    min_replicas: ProcessCount | None = None
    """Replicas that must be left if others are given up; null: ``replicas``, or those after scaling down."""
    threads: Threads = 1
    """Host threads of a replica."""
    free_cache_engine: bool = False
    """An idle replica frees its device memory until it has work again."""
    sleep_level: Literal[1, 2] = 1
    """1: an idle replica keeps its weights in host memory; 2: it drops them, and they are sent again."""

    @property
    def workflow_functions(self) -> dict[str, str]:
        """The functions of users' files in ``workflow_options``, by their keys."""
        return functions_in(self.workflow_options, "rollout.workflow_options")

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
    def _enough_replicas_begin(self) -> RolloutConfig:
        if self.min_replicas is not None and self.min_replicas > self.replicas:
            raise ValueError(f"min_replicas={self.min_replicas} must be at most replicas={self.replicas}")
        return self

    @model_validator(mode="after")
    def _a_group_fits(self) -> RolloutConfig:
        if self.max_running < self.n:
            raise ValueError(
                f"max_running={self.max_running} must be at least n={self.n}: a prompt's responses run together"
            )
        return self
