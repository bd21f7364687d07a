"""Start vLLM, and turn hwrl's sampling parameters into vLLM's."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hwrl.errors import ConfigError, EngineError, HwrlError, UnsupportedError
from hwrl.interfaces import RolloutSettings, Sampling
from hwrl_vllm.causes import Causes
from hwrl_vllm.lora import require_dtype
from hwrl_vllm.options import engine_arguments, keys_in, rope_arguments
from hwrl_vllm.orphans import OWNER

_PLUGINS = "VLLM_PLUGINS"


def vllm_sampling(wanted: Sampling, eos_ids: Sequence[int]) -> Any:
    """Return ``wanted`` as vLLM's SamplingParams. Raises EngineError if vLLM refuses a value or would change it."""
    from vllm import SamplingParams

    try:
        sampling = SamplingParams(
            temperature=wanted.temperature,
            max_tokens=wanted.max_new_tokens,
            top_p=wanted.top_p,
            top_k=max(wanted.top_k, 0),  # 0 keeps all tokens
            min_p=wanted.min_p,
            seed=wanted.seed,
            stop_token_ids=[*eos_ids, *wanted.stop_token_ids],  # hwrl itself looks for stop texts, by StopFinder
            ignore_eos=True,  # vLLM would read other ids from the model's configuration
            logprobs=0,  # the chosen token's, and no others
            detokenize=False,
        )
        if sampling.temperature != wanted.temperature:
            raise ValueError(f"it would sample at temperature {sampling.temperature}")
        if wanted.is_filtered and (sampling.top_p, sampling.min_p) != (wanted.top_p, wanted.min_p):
            raise ValueError(f"it would sample with top_p={sampling.top_p} and min_p={sampling.min_p}")
    except Exception as exc:  # since vLLM 0.28 these errors are not ValueErrors
        raise EngineError(
            f"vLLM cannot generate {wanted.max_new_tokens} tokens at temperature {wanted.temperature}",
            why=f"{exc}; the request is {wanted}",
            fix="set rollout.temperature to a value that vLLM leaves unchanged, for example 1.0",
        ) from exc
    return sampling


def start_vllm(settings: RolloutSettings, options: Mapping[str, Any], *, inline: bool, causes: Causes) -> Any:
    """Start vLLM and return its ``LLMEngine``, with the engine core in this process if ``inline``. Blocks.

    Raises ConfigError if vLLM refuses an argument, UnsupportedError for ``settings.free_cache_engine`` where vLLM has
    no sleep mode, torch.OutOfMemoryError if a device has too little memory, and EngineError if vLLM fails otherwise.
    The errors have the reasons in ``causes``. Sets environment variables, for this process and those that it starts.
    """
    # With "1" vLLM for CPUs would put even a single worker into a process of its own. Whether the engine core has a
    # process of its own is decided by the argument enable_multiprocessing in _make.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"  # this process has threads, and may have used the device
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # replicas and trainer share the host's cores
    os.environ[OWNER] = str(os.getpid())
    if "hwrl" not in os.environ.get(_PLUGINS, "hwrl").split(","):
        os.environ[_PLUGINS] += ",hwrl"  # hwrl's plugin ends vLLM's processes after their owner
    try:
        return _make(settings, options, inline=inline)
    except (HwrlError, torch.OutOfMemoryError):  # Backend.allocating translates the second
        raise
    except Exception as exc:
        cause = causes.of(exc)
        if cause.is_out_of_memory:
            raise torch.OutOfMemoryError(cause.text) from exc
        if cause.is_of_a_value:
            fix = f"correct {keys_in(cause.text, options)}"
            raise ConfigError("vLLM refuses its engine arguments", why=cause.text, fix=fix) from exc
        fix = "fix the error in the reason, or the last one that vLLM's processes printed"
        raise EngineError("vLLM does not start", why=cause.text, fix=fix) from exc


def _make(settings: RolloutSettings, options: Mapping[str, Any], *, inline: bool) -> Any:
    from vllm import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    known = {field.name for field in dataclasses.fields(EngineArgs)}
    arguments = engine_arguments(settings, options, known=known)  # first: the backend knows the device's traps by name
    require_dtype(settings)
    _require_sampling(settings)
    _require_sleep_mode(settings)
    arguments |= rope_arguments(settings)
    return LLMEngine.from_engine_args(EngineArgs(**arguments), enable_multiprocessing=not inline)


def _require_sleep_mode(settings: RolloutSettings) -> None:
    from vllm.platforms import current_platform

    if settings.free_cache_engine and not current_platform.is_sleep_mode_available():
        raise UnsupportedError(
            "vLLM cannot sleep on this device",
            why=f"its platform {current_platform.device_name!r} has no sleep mode",
            fix="make the engine without settings.free_cache_engine; in a run, rollout.free_cache_engine=false",
        )


def _require_sampling(settings: RolloutSettings) -> None:
    try:
        vllm_sampling(settings.sampling, settings.eos_ids)
    except EngineError as exc:
        raise ConfigError(
            f"rollout.temperature={settings.sampling.temperature} cannot be used with vLLM", why=exc.why, fix=exc.fix
        ) from exc
