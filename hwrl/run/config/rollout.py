"""The keys of the section ``rollout``."""

from __future__ import annotations

from typing import Literal

from pydantic import (
    Field,
    model_validator,
)

from hwrl.run.config.values import (
    Function,
    Name,
    NotNegative,
    Options,
    Positive,
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
    functions_in,
)

EMBEDDED = "embedded"
"""The rollout engine that needs no plugin."""


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
