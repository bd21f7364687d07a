"""The prompts of a run, in a process of a replica: read, compared with the run's inputs, tokenised, ordered."""

from __future__ import annotations

import functools
from typing import Any

from hwrl.models import encode_prompt, load_tokenizer, use_chat_template, vocabulary_size
from hwrl.rollout import DataKeys, Prompt, PromptSet, PromptStream, check_vocabulary, load_prompts
from hwrl.run.config import Config, DataSetConfig
from hwrl.run.identity import CURRICULUM, EVAL, TEMPLATE, TRAIN, RunInputs, data_key
from hwrl.user_code import load_function


def run_tokenizer(config: Config, inputs: RunInputs) -> Any:
    """Return the model's tokenizer with the run's chat template and its options, for everything in a replica.

    Raises ConfigError for an option without effect.
    """
    tokenizer, template = load_tokenizer(config.model.path), config.data.chat_template
    if config.data.chat_template_file is not None:
        template = inputs.read(TEMPLATE).decode()
    use_chat_template(tokenizer, template, options=config.data.chat_template_kwargs)
    return tokenizer


def training_prompts(config: Config, inputs: RunInputs) -> PromptStream:
    """Return the stream of prompts to train on."""
    sets = [
        PromptSet(one.name, _load(config, inputs, key=TRAIN, one=one), one.weight) for one in config.data.train_sets
    ]
    target = config.data.curriculum
    curriculum = None if target is None else load_function(target, key=CURRICULUM, source=inputs.source(CURRICULUM))
    return PromptStream(sets, seed=config.seed, curriculum=curriculum)


def evaluation_prompts(config: Config, inputs: RunInputs) -> list[Prompt]:
    """Return the prompts for evaluations, set after set: none if the configuration has no evaluation data."""
    return [
        prompt
        for one in config.data.eval_sets
        for prompt in _load(config, inputs, key=EVAL, one=one)[: config.eval.prompts]
    ]


def _load(config: Config, inputs: RunInputs, *, key: str, one: DataSetConfig) -> list[Prompt]:
    tokenizer = run_tokenizer(config, inputs)
    prompts = load_prompts(
        one.path,
        content=inputs.read_data(data_key(key, one.name)),
        encode=functools.partial(encode_prompt, tokenizer),
        max_prompt_tokens=config.data.max_prompt_tokens,
        keys=DataKeys(*config.data.keys_of(one)),
        source=one.name,
    )
    check_vocabulary(prompts, path=one.path, vocabulary=vocabulary_size(config.model.path))
    return prompts
