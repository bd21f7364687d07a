"""The parts of the configuration about data: prompts, rewards, evaluations."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
    field_validator,
    model_validator,
)

from hwrl.run.config.section import Section
from hwrl.run.config.values import (
    DataName,
    DataPath,
    EvalTemperature,
    Finite,
    Function,
    Name,
    NotNegative,
    Options,
    Positive,
    PositiveReal,
    ProcessCount,
    Seconds,
    Template,
    is_template,
)


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
    if isinstance(value, dict) and "path" in value:
        value = [value]
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
    chat_template: Template | None = None
    """A Jinja template for prompts of messages, or its file; null: [the tokenizer's](data.md#chat-templates)."""
    chat_template_kwargs: Options = Field(default_factory=dict)
    """Options for the chat template, such as ``enable_thinking: false``."""

    @field_validator("eval")
    @classmethod
    def _all_evaluations_count(cls, sets: Path | tuple[DataSetConfig, ...] | None) -> object:
        if isinstance(sets, tuple) and any(one.weight != 1 for one in sets):
            raise ValueError("weights are for data.train: each set for evaluations is used whole")
        return sets

    @property
    def chat_template_file(self) -> Path | None:
        """The file of the chat template; None if the configuration has its text, or none."""
        template = self.chat_template
        return None if template is None or is_template(template) else Path(template)

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
    workers: ProcessCount = 4
    """Most processes of each replica that call the function; another one starts when prompts wait."""
    batch: bool = False
    """Call the function once per prompt, with lists: an element for each response, and so the result."""
    concurrency: Positive = 64
    """Calls of an async function at the same time, in each process."""


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
