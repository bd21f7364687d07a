"""Agents with a base_url on real vLLM while its weights change, and vLLM's parsers of tool calls."""

from __future__ import annotations

import importlib.util
import itertools
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from hwrl.errors import UnsupportedError
from tests.plugins.vllm.serving import END, Policy, engine_of
from tests.support.chat_models import STYLES
from tests.support.trained_agents import Witness, check_tokens, train_agents, workflow_of_the_page

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM: make test-vllm"),
    pytest.mark.filterwarnings("default"),  # vLLM warns of its own use of what is deprecated
]
STYLE = STYLES["chatml"]
ADD: dict[str, Any] = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}


def write_model(directory: Path, *, vocabulary: int) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}
    ends = {"bos_token_id": 0, "eos_token_id": END, "tie_word_embeddings": False}
    config = AutoConfig.for_model("qwen3", vocab_size=vocabulary, max_position_embeddings=512, **sizes, **heads, **ends)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)


def test_an_agents_tokens_are_the_engines_bit_for_bit_over_weight_updates(tmp_path: Path) -> None:
    workflow, tokenizer = workflow_of_the_page(), STYLE.tokenizer()
    write_model(tmp_path, vocabulary=len(tokenizer))
    policy, versions = Policy(tmp_path), itertools.count()
    engine = engine_of(tmp_path, max_length=400)
    witness = Witness(engine)

    def update() -> None:
        engine.load_weights(policy.change().items(), version=next(versions))

    try:
        update()
        rows = train_agents(engine, workflow, tokenizer=tokenizer, end_ids=[END], update=update, steps_per_update=4)
        check_tokens(rows, witness, turns=2, chat=STYLE.chat())
        parse = engine.tool_parser("pythonic", tokenizer=tokenizer)
        assert [(call.name, call.arguments) for call in parse("[add(a=1)]", [ADD]).tool_calls] == [("add", '{"a": 1}')]
        assert parse("No call.", [ADD]).content == "No call."
        with pytest.raises(UnsupportedError, match="none of that name") as refused:
            engine.tool_parser("penguin", tokenizer=tokenizer)
        assert "pythonic" in refused.value.fix
        with pytest.raises(UnsupportedError, match="bot token"):
            engine.tool_parser("llama3_json", tokenizer=tokenizer)
    finally:
        engine.close()
