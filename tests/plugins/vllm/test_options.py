"""What a user may tell vLLM's engine."""

from __future__ import annotations

import dataclasses
import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from hwrl.discovery import get_backend
from hwrl.errors import ConfigError
from hwrl.interfaces import RolloutSettings
from hwrl.models import build_model
from hwrl_vllm.lora import lora_arguments
from hwrl_vllm.options import engine_arguments, keys_in, rope_arguments

needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM: make test-vllm")

SETTINGS = RolloutSettings(
    model_directory=Path("/m"), dtype=torch.bfloat16, eos_ids=[1], max_running=8, max_length=64, seed=3
)


def arguments(options: dict[str, Any]) -> dict[str, Any]:
    known = ["enforce_eager", "gpu_memory_utilization", "enable_chunked_prefill", "compilation_config"]
    return engine_arguments(SETTINGS, options, known=known)


def test_an_engine_is_told_what_the_configuration_says_and_what_updates_need() -> None:
    given = arguments({})
    assert (given["model"], given["dtype"], given["seed"]) == ("/m", "bfloat16", 3)
    assert (given["max_num_seqs"], given["max_model_len"], given["load_format"]) == (8, 64, "dummy")
    assert (given["tensor_parallel_size"], given["distributed_executor_backend"]) == (1, "uni")
    assert given["async_scheduling"] is None, "vLLM decides"


def test_workers_of_a_replica_are_processes_of_its_own() -> None:
    given = engine_arguments(dataclasses.replace(SETTINGS, tensor_parallel=2), {}, known=[])
    assert (given["tensor_parallel_size"], given["distributed_executor_backend"]) == (2, "mp")


@pytest.mark.skipif(get_backend().info.name != "cpu", reason="what the CPU needs")
def test_an_option_that_contradicts_the_device_is_refused_by_name() -> None:
    assert (
        arguments({})["enable_chunked_prefill"]
        is arguments({"enable_chunked_prefill": False})["enable_chunked_prefill"]
    )
    with pytest.raises(ConfigError, match=r"rollout\.engine_options\.enable_chunked_prefill=True(.|\n)*need False"):
        arguments({"enable_chunked_prefill": True})


@pytest.mark.parametrize(("max_length", "base"), [(16, 1e4), (40, 48760.54616817902)])
def test_vllm_rotates_as_the_trainer_does(max_length: int, base: float, tmp_path: Path) -> None:
    """vLLM itself would stretch dynamic frequencies for all rows; its longrope depends on max_model_len as hwrl's."""
    sizes = {"vocab_size": 48, "hidden_size": 64, "intermediate_size": 48, "num_attention_heads": 4}
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    LlamaConfig(**sizes, rope_parameters=rope, max_position_embeddings=16).save_pretrained(tmp_path)
    settings = dataclasses.replace(SETTINGS, model_directory=tmp_path, max_length=max_length)
    assert rope_arguments(settings) == {
        "hf_overrides": {
            "rope_parameters": {"rope_type": "default", "rope_theta": pytest.approx(base)},
            "max_position_embeddings": max_length,
        }
    }
    trainer = build_model(tmp_path, dtype=torch.float32, max_length=max_length).model.rotary_emb.inv_freq
    wanted = pytest.approx([base ** (-step / 8) for step in range(8)], rel=1e-5)
    assert trainer.tolist() == wanted


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("enforce_eagre", "did you mean 'enforce_eager'"),
        ("max_num_seqs", r"set rollout\.max_running"),
        ("tensor_parallel_size", r"set rollout\.tensor_parallel"),
        ("logprobs_mode", "right only with 'processed_logprobs'"),
        ("stream_interval", "right only with 1"),
        ("lora_target_modules", r"set model\.target_modules"),
        ("scheduler_cls", "a scheduler that can pause and finish its steps"),
        ("enable_return_routed_experts", "log-probabilities of a step take its place"),
        ("async_scheduling", "updates wait for the step that has begun"),
        ("logits_processors", r"only the keys of rollout may shape"),
        ("speculative_config", "a draft model would get no weights"),
        ("trust_remote_code", "hwrl runs no code from a model directory"),
        ("hf_overrides", "another model than the trainer"),
        ("kv_transfer_config", "outside the engine may hold results of other weights"),
        ("offload_group_size", "an update would miss them"),
        ("no_such_thing_at_all", "has no such engine argument"),
    ],
)
def test_an_option_that_is_not_the_users_is_refused_with_the_remedy(name: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match=rf"rollout\.engine_options\.{name} cannot be set(.|\n)*{remedy}"):
        arguments({name: 1})


def test_the_engine_core_is_hwrls_own_option_and_not_vllms() -> None:
    assert "engine_core" not in arguments({"engine_core": "inline"})
    with pytest.raises(ConfigError, match=r"engine_core='thread' is unknown(.|\n)*process or inline"):
        arguments({"engine_core": "thread"})


@pytest.mark.parametrize("mode", ["FULL", "full", 2])
def test_graphs_of_steps_that_also_read_prompts_are_refused(mode: object) -> None:
    with pytest.raises(ConfigError, match=r"cudagraph_mode=FULL cannot be used(.|\n)*FULL_DECODE_ONLY"):
        arguments({"compilation_config": {"mode": 0, "cudagraph_mode": mode}})
    arguments({"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}})


@pytest.mark.parametrize(
    ("message", "places"),
    [
        ("User-specified max_model_len (9) is greater than 8", "data.max_prompt_tokens or rollout.max_new_tokens"),
        ("max_num_seqs is more than block_size", "rollout.max_running or rollout.engine_options.block_size"),
        ("this model has no such dtype", "rollout.engine_options"),
    ],
)
def test_what_vllm_refuses_is_answered_with_the_keys_that_say_it(message: str, places: str) -> None:
    assert keys_in(message, ["block_size", "enforce_eager"]) == places


@needs_vllm
def test_the_arguments_of_the_installed_vllm_are_known_without_importing_it() -> None:
    code = (
        "import importlib.util, pathlib, sys\n"
        "from hwrl_vllm.options import known_arguments\n"
        "print(*known_arguments(pathlib.Path(importlib.util.find_spec('vllm').origin).parent))\n"
        "assert not {'vllm', 'torch'} & set(sys.modules)\n"
    )
    told = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, check=True).stdout.split()
    from vllm import EngineArgs

    assert {*told} == {field.name for field in dataclasses.fields(EngineArgs)}


@needs_vllm
def test_a_rank_for_which_vllm_has_no_room_is_refused_with_those_that_it_has() -> None:
    with pytest.raises(ConfigError, match=r"512(.|\n)*set model\.lora_rank to 512 or less"):
        lora_arguments(513, tensor_parallel=1)
    assert lora_arguments(9, tensor_parallel=1)["max_lora_rank"] == 16
