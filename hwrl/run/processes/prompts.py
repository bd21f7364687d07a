"""Load the prompts of a run in the process of a replica: read and order them.

Each replica reads all rows of the run, and tokenises the prompts that it leases. The ledger leases sequence numbers,
and every replica finds the same prompt for a number. The run's first process of a replica tokenises all, to check them.
"""

from __future__ import annotations

from typing import Any

from hwrl.models import load_tokenizer, use_chat_template, vocabulary_size
from hwrl.rollout import ChatTokens, DataKeys, Prompt, Prompts, PromptSet, PromptStream
from hwrl.run.config import Config, DataSetConfig
from hwrl.run.identity import CURRICULUM, EVAL, TEMPLATE, TRAIN, RunInputs, data_key
from hwrl.user_code import load_function


def run_tokenizer(config: Config, inputs: RunInputs) -> Any:
    """Return the model's tokenizer, set to the run's chat template and its options. All parts of a replica use it.

    Raises ConfigError if one of ``data.chat_template_kwargs`` has no effect.
    """
    tokenizer, template = load_tokenizer(config.model.path), config.data.chat_template
    if config.data.chat_template_file is not None:
        template = inputs.read(TEMPLATE).decode()
    use_chat_template(tokenizer, template, options=config.data.chat_template_kwargs)
    return tokenizer


def training_prompts(config: Config, inputs: RunInputs, tokenizer: Any, *, check: bool = False) -> PromptStream:
    """Return the stream of prompts to train on. With ``check``, tokenise all now, and raise DataError for a bad one."""
    loaded = [_load(config, inputs, tokenizer, key=TRAIN, data_set=one, check=check) for one in config.data.train_sets]
    sets = [
        PromptSet(one.name, prompts, one.weight) for one, prompts in zip(config.data.train_sets, loaded, strict=True)
    ]
    target = config.data.curriculum
    curriculum = None if target is None else load_function(target, key=CURRICULUM, source=inputs.source(CURRICULUM))
    return PromptStream(sets, seed=config.seed, curriculum=curriculum)


class EvaluationPrompts:
    """The evaluation prompts of all sets, one set after another; none without evaluation data."""

    def __init__(self, config: Config, inputs: RunInputs, tokenizer: Any, *, check: bool = False) -> None:
        sets = [_load(config, inputs, tokenizer, key=EVAL, data_set=one, check=check) for one in config.data.eval_sets]
        self._places = [(one, row) for one in sets for row in range(len(one))[: config.eval.prompts]]

    def part(self, part: int, parts: int) -> list[Prompt]:
        """Return part number ``part`` of ``parts`` equal parts."""
        return [prompts[row] for prompts, row in self._places[part::parts]]


def _load(
    config: Config, inputs: RunInputs, tokenizer: Any, *, key: str, data_set: DataSetConfig, check: bool
) -> Prompts:
    chat = ChatTokens(tokenizer, end_ids=(), max_length=config.data.max_prompt_tokens)
    prompts = Prompts(
        data_set.path,
        content=inputs.read_data(data_key(key, data_set.name)),
        encode=chat.encode_prompt,
        max_prompt_tokens=config.data.max_prompt_tokens,
        vocabulary=vocabulary_size(config.model.path),
        keys=DataKeys(*config.data.keys_of(data_set)),
        source=data_set.name,
    )
    if check:
        for _ in prompts:
            pass
    return prompts
