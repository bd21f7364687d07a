"""Load the prompts of a run in the process of a replica: read, check, tokenise and order them.

Each replica loads all prompts of the run. The ledger leases sequence numbers, and every replica finds the same prompt
for a number.
"""

from __future__ import annotations

from typing import Any

from hwrl.models import load_tokenizer, use_chat_template, vocabulary_size
from hwrl.rollout import ChatTokens, DataKeys, Prompt, PromptSet, PromptStream, check_vocabulary, load_prompts
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


def training_prompts(config: Config, inputs: RunInputs) -> PromptStream:
    """Return the stream of prompts to train on."""
    sets = [
        PromptSet(data_set.name, _load(config, inputs, key=TRAIN, data_set=data_set), data_set.weight)
        for data_set in config.data.train_sets
    ]
    target = config.data.curriculum
    curriculum = None if target is None else load_function(target, key=CURRICULUM, source=inputs.source(CURRICULUM))
    return PromptStream(sets, seed=config.seed, curriculum=curriculum)


def evaluation_prompts(config: Config, inputs: RunInputs) -> list[Prompt]:
    """Return the evaluation prompts of all sets, one set after another; an empty list without evaluation data."""
    return [
        prompt
        for data_set in config.data.eval_sets
        for prompt in _load(config, inputs, key=EVAL, data_set=data_set)[: config.eval.prompts]
    ]


def _load(config: Config, inputs: RunInputs, *, key: str, data_set: DataSetConfig) -> list[Prompt]:
    chat = ChatTokens(run_tokenizer(config, inputs), end_ids=(), max_length=config.data.max_prompt_tokens)
    prompts = load_prompts(
        data_set.path,
        content=inputs.read_data(data_key(key, data_set.name)),
        encode=chat.encode_prompt,
        max_prompt_tokens=config.data.max_prompt_tokens,
        keys=DataKeys(*config.data.keys_of(data_set)),
        source=data_set.name,
    )
    check_vocabulary(prompts, path=data_set.path, vocabulary=vocabulary_size(config.model.path))
    return prompts
