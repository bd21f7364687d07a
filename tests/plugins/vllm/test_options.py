"""What a user may tell vLLM's engine; needs no vLLM."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

import hwrl_npu
from hwrl.errors import ConfigError
from hwrl.rollout.engine import RolloutSettings
from hwrl_vllm.options import engine_arguments

SETTINGS = RolloutSettings(
    model_directory=Path("/m"), dtype=torch.bfloat16, eos_ids=[1], max_running=8, max_length=64, seed=3
)


def arguments(options: dict[str, Any], device: dict[str, Any] | None = None) -> dict[str, Any]:
    known = ["enforce_eager", "gpu_memory_utilization", "additional_config"]
    return engine_arguments(SETTINGS, options, device=device or {}, known=known)


def test_an_engine_is_told_what_the_configuration_says_and_what_updates_need() -> None:
    given = arguments({})
    assert (given["model"], given["dtype"], given["seed"]) == ("/m", "bfloat16", 3)
    assert (given["max_num_seqs"], given["max_model_len"], given["load_format"]) == (8, 64, "dummy")
    assert (given["tensor_parallel_size"], given["distributed_executor_backend"]) == (1, "uni")


def test_workers_of_a_replica_are_processes_of_its_own() -> None:
    given = engine_arguments(dataclasses.replace(SETTINGS, tensor_parallel=2), {}, device={}, known=[])
    assert (given["tensor_parallel_size"], given["distributed_executor_backend"]) == (2, "mp")


def test_the_users_options_go_before_the_devices() -> None:
    device = {"additional_config": {"for": "updates"}, "enforce_eager": True}
    given = arguments({"enforce_eager": False}, device)
    assert (given["additional_config"], given["enforce_eager"]) == ({"for": "updates"}, False)


def test_on_npus_weights_are_in_no_format_that_an_update_cannot_write() -> None:
    device = hwrl_npu.hwrl_engine_args("vllm")
    assert device is not None and hwrl_npu.hwrl_engine_args("another") is None
    assert arguments({}, device)["additional_config"] == {"weight_nz_mode": 0}


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("enforce_eagre", "did you mean 'enforce_eager'"),
        ("max_num_seqs", r"set rollout\.max_running"),
        ("tensor_parallel_size", r"set rollout\.tensor_parallel"),
        ("logprobs_mode", "right only with 'processed_logprobs'"),
        ("no_such_thing_at_all", "has no such engine argument"),
    ],
)
def test_an_option_that_is_not_the_users_is_refused_with_the_remedy(name: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match=rf"rollout\.engine_options\.{name} cannot be set(.|\n)*{remedy}"):
        arguments({name: 1})
