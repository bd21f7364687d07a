"""What a worker of vLLM surely needs, by its options and its model; no vLLM needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DeepseekV3Config, MistralConfig, PretrainedConfig, Qwen3Config

import hwrl_vllm
from hwrl.errors import ConfigError
from hwrl.interfaces import RolloutSettings
from hwrl_vllm.memory import worker_memory

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
WEIGHTS, CACHE = "weights", "attention cache of one response, 64 tokens"


@pytest.mark.parametrize(
    ("config", "options", "certain"),
    [
        (Qwen3Config(**SIZES), {}, [WEIGHTS, CACHE]),
        (Qwen3Config(**SIZES), {"gpu_memory_utilization": 0.5}, [WEIGHTS, CACHE]),
        (Qwen3Config(**SIZES), {"quantization": "fp8"}, [CACHE]),
        (Qwen3Config(**SIZES), {"cpu_offload_gb": 4}, [CACHE]),
        (Qwen3Config(**SIZES), {"kv_cache_dtype": "fp8"}, [WEIGHTS]),
        (MistralConfig(**SIZES, sliding_window=16), {}, [WEIGHTS]),
        (DeepseekV3Config(**SIZES, n_routed_experts=8), {}, [WEIGHTS]),
    ],
)
def test_what_options_or_the_model_may_make_smaller_is_not_certain(
    config: PretrainedConfig, options: dict[str, Any], certain: list[str], tmp_path: Path
) -> None:
    config.save_pretrained(tmp_path)
    settings = RolloutSettings(model_directory=tmp_path, dtype=torch.bfloat16, eos_ids=[], max_running=4, max_length=64)
    causes = worker_memory(settings, options, device_nbytes=1 << 30)
    assert [one.cause for one in causes if one.certain] == certain
    assert all(one.nbytes > 0 for one in causes)


@pytest.mark.parametrize("options", [{"max_num_seqs": 8}, {"engine_core": "thread"}])
def test_a_plan_refuses_the_options_that_a_run_refuses(options: dict[str, Any], tmp_path: Path) -> None:
    Qwen3Config(**SIZES).save_pretrained(tmp_path)
    settings = RolloutSettings(model_directory=tmp_path, dtype=torch.bfloat16, eos_ids=[], max_running=4, max_length=64)
    assert hwrl_vllm.hwrl_engine_memory(settings, {"enforce_eager": True}, device_nbytes=1 << 30)
    with pytest.raises(ConfigError, match=r"rollout\.engine_options\."):
        hwrl_vllm.hwrl_engine_memory(settings, options, device_nbytes=1 << 30)
