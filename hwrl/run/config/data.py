"""The keys of the sections ``data`` (prompts), ``reward`` and ``eval``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag, field_validator, model_validator

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
    Section,
    Share,
    Template,
    is_template,
)


class DataSetConfig(Section):
    """One of several data sets. [docs/data.md](data.md) explains the keys."""

    path: DataPath
    """A file, a directory of the library ``datasets``, or a data set on the hub, ``hf:NAME?split=SPLIT``."""
    name: DataName = ""
    """Name of the data set in metrics; by default the name of the file without its ending."""
    weight: PositiveReal = 1.0
    """Share of the prompts in a mixture, relative to the other data sets."""
    prompt_key: Name | None = None
    """Column with the prompt, in place of ``data.prompt_key``."""
    answer_key: Name | None = None
    """Column with the answer, in place of ``data.answer_key``."""


def _name_data_sets(value: Any) -> Any:
    """Return the entries of a list or a mapping with names; anything else as it is."""
    if isinstance(value, dict) and "path" in value:
        value = [value]
    if isinstance(value, dict):
        value = [
            {"name": name, **(entry if isinstance(entry, dict) else {"path": entry})} for name, entry in value.items()
        ]
    if not isinstance(value, list | tuple):
        return value
    entries = [dict(entry) if isinstance(entry, dict) else entry for entry in value]
    entries = [entry if isinstance(entry, dict | DataSetConfig) else {"path": entry} for entry in entries]
    for entry in entries:
        if isinstance(entry, dict) and isinstance(entry.get("path"), str | Path) and not entry.get("name"):
            entry["name"] = Path(str(entry["path"]).partition("?")[0]).stem
    return entries


def _check_names(sets: tuple[DataSetConfig, ...]) -> tuple[DataSetConfig, ...]:
    names = [data_set.name for data_set in sets]
    if len(set(names)) < len(names):
        raise ValueError(f"data sets need different names, but these are called {', '.join(names)}; name each of them")
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
    """Data sets: rows with ``prompt`` (a text or messages), ``answer`` (any value) and [further columns](data.md)."""

    train: DataSets
    """Training prompts: a path (.jsonl, .parquet, a directory), ``hf:NAME?split=SPLIT``, or a list for a mixture."""
    eval: DataSets | None = None
    """Evaluation prompts: like ``train``; for several sets a list, or names with paths; null: no evaluations."""
    prompt_key: Name = "prompt"
    """Column with the prompt."""
    answer_key: Name = "answer"
    """Column with the answer."""
    curriculum: Function | None = None
    """``package.module:function`` or ``file.py:function`` that [orders the prompts](data.md#curriculum)."""
    max_prompt_tokens: Positive = 1024
    """Maximum number of tokens in a prompt. A longer prompt is an error."""
    chat_template: Template | None = None
    """Jinja template for prompts of messages, or its file; null: [the tokenizer's](data.md#chat-templates)."""
    chat_template_kwargs: Options = Field(default_factory=dict)
    """Options for the chat template, such as ``enable_thinking: false``."""

    @field_validator("eval")
    @classmethod
    def _all_evaluations_count(cls, sets: Path | tuple[DataSetConfig, ...] | None) -> object:
        if isinstance(sets, tuple) and any(data_set.weight != 1 for data_set in sets):
            raise ValueError("weights are only for data.train: evaluations use every set completely")
        return sets

    @property
    def chat_template_file(self) -> Path | None:
        """The file of the chat template; None if the configuration has the text, or no template."""
        template = self.chat_template
        return None if template is None or is_template(template) else Path(template)

    @property
    def train_sets(self) -> tuple[DataSetConfig, ...]:
        """The training data sets. A single path gives one data set with an empty name."""
        return _listed(self.train)

    @property
    def eval_sets(self) -> tuple[DataSetConfig, ...]:
        """The evaluation data sets. A single path gives one data set with an empty name."""
        return () if self.eval is None else _listed(self.eval)

    def keys_of(self, data_set: DataSetConfig) -> tuple[str, str]:
        """Return the names of the two columns of ``data_set`` with the prompt and the answer."""
        return data_set.prompt_key or self.prompt_key, data_set.answer_key or self.answer_key


class RewardConfig(Section):
    """How responses are rewarded."""

    function: Function | None = None
    """``package.module:function`` or ``file.py:function`` of (prompt, response, answer); null: the workflow rewards."""
    attempts: Positive = 3
    """Maximum number of calls for one prompt if the function raises. After that many errors the prompt has failed."""
    timeout_s: Seconds = 300.0
    """Time limit for one call. After that its process is killed, and the prompt has failed."""
    workers: ProcessCount = 4
    """Maximum number of processes per replica that call the function. Another one is started when prompts wait."""
    batch: bool = False
    """Call the function once per prompt, with a list element for each response. It returns a list as well."""
    concurrency: Positive = 64
    """Maximum number of concurrent calls of an async function in each process."""


class EvalConfig(Section):
    """Evaluation on held-out prompts, divided among the replicas."""

    every_steps: NotNegative = 0
    """Training steps between two evaluations; 0: only one at the end. One that is due during another is left out."""
    before_training: bool = False
    """Also evaluate the starting model, as the metrics of step 0. Training begins after that."""
    prompts: Positive = 256
    """Maximum number of prompts of each set, from its beginning."""
    n: Positive = 1
    """Number of responses per prompt. With several, [pass@k](data.md#evaluation) is computed."""
    temperature: EvalTemperature = 0.0
    """Sampling temperature; 0: greedy decoding."""
    share: Share = 0.25
    """Share of a replica's places for responses that an evaluation beside training uses, at least one place."""
    pass_reward: Finite = 1.0
    """Minimum reward with which a response counts as passed, for pass@k."""

    @model_validator(mode="after")
    def _samples_differ(self) -> EvalConfig:
        if self.n > 1 and self.temperature == 0:
            raise ValueError(f"n={self.n} greedy responses to a prompt would be equal; also set temperature")
        return self
