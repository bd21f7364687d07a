"""vLLM's engine arguments: hwrl sets some of them, and the user sets others under ``rollout.engine_options``."""

from __future__ import annotations

import ast
import multiprocessing
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hwrl.discovery import engine_args
from hwrl.errors import ConfigError, did_you_mean
from hwrl.interfaces import Capability
from hwrl_vllm.lora import lora_arguments

if TYPE_CHECKING:
    from hwrl.interfaces import Backend, RolloutSettings

_HWRL_KEYS = {
    "model": "model.path",
    "dtype": "model.dtype",
    "seed": "seed",
    "max_num_seqs": "rollout.max_running",
    "tensor_parallel_size": "rollout.tensor_parallel",
    "distributed_executor_backend": "rollout.tensor_parallel",
    "enable_lora": "model.lora_rank",
    "enable_sleep_mode": "rollout.free_cache_engine",
    "max_lora_rank": "model.lora_rank",
    "max_loras": "model.lora_rank",
    "fully_sharded_loras": "rollout.tensor_parallel",
    "max_model_len": "data.max_prompt_tokens or rollout.max_new_tokens",
    "lora_dtype": "model.dtype",
    "lora_target_modules": "model.target_modules",
    "device_ids": "rollout.tensor_parallel",
}
"""hwrl's configuration key for each argument that hwrl sets from the configuration."""

_FIXED: dict[str, Any] = {
    "load_format": "dummy",  # the weights come from the trainer
    "skip_tokenizer_init": True,  # prompts and responses are token ids
    "generation_config": "vllm",  # a model's own sampling defaults would change the policy
    "logprobs_mode": "processed_logprobs",  # log-probabilities of the distribution that vLLM samples from
    "async_scheduling": None,  # vLLM decides: it is on, unless another argument forbids it
    "stream_interval": 1,  # hwrl gives a token the version at its output, so vLLM may hold no token back
    "pipeline_parallel_size": 1,
    "data_parallel_size": 1,
    "worker_extension_cls": "hwrl_vllm.worker.WeightLoading",
    "scheduler_cls": "hwrl_vllm.scheduler.make_scheduler",
    "disable_log_stats": True,
}
"""Arguments with a fixed value. The engine keeps its promises only with these values."""

_DRAFT = "a draft model would get no weights, and drafted tokens may have other log-probabilities than the policy"
_OTHER_MODEL = "the replica would compute another model than the trainer, which only reads model.path"
_OTHER_POLICY = "only the keys of rollout may shape the sampling: temperature, top_p, top_k and min_p"
_ELSEWHERE = "a cache outside the engine may hold results of other weights"
_MOVED = "it moves weights to other places, and an update would miss them"
_OTHER_WORKERS = "hwrl places a replica's workers: in its process, or on rollout.tensor_parallel devices of its machine"

_REFUSED = {
    "async_scheduling": "it is on where vLLM supports it, and updates wait for the step that has begun",
    "trust_remote_code": "hwrl runs no code from a model directory",
    "worker_cls": "updates and sleep need vLLM's own workers",
    "enable_return_routed_experts": "the log-probabilities of a step take its place",
    "scheduler_cls": "versions are correct only with a scheduler that can pause and finish its steps",
    "logits_processors": _OTHER_POLICY,
    "watermark_config": _OTHER_POLICY,
    "override_generation_config": _OTHER_POLICY,
    **dict.fromkeys(["speculative_config", "spec_method", "spec_model", "spec_tokens"], _DRAFT),
    **dict.fromkeys(["hf_overrides", "hf_config_path", "model_class_overrides", "model_weights"], _OTHER_MODEL),
    **dict.fromkeys(["kv_transfer_config", "kv_offloading_backend", "kv_offloading_size"], _ELSEWHERE),
    **dict.fromkeys(["enable_eplb", "enable_elastic_ep", "offload_backend", "offload_group_size"], _MOVED),
    **dict.fromkeys(["nnodes", "node_rank", "prefill_context_parallel_size"], _OTHER_WORKERS),
}
"""Why the user may not set an argument. A value of the user's would break a promise of the engine."""

_ENGINE_CORES = ("process", "inline")
"""The values of hwrl's own option ``engine_core``."""


def engine_arguments(
    settings: RolloutSettings, options: Mapping[str, Any], *, known: Collection[str]
) -> dict[str, Any]:
    """Return the arguments of an engine: hwrl's own, those that the device needs, and the user's ``options``.

    ``known`` has the names of all engine arguments of the installed vLLM. Raises the errors of :func:`check_options`,
    and ConfigError for what cannot go with the device. The device's backend may set environment variables.
    """
    check_options(options, known=known)
    of_vllm = {name: value for name, value in options.items() if name != "engine_core"}
    return {
        **_FIXED,
        "model": str(settings.model_directory),
        "dtype": str(settings.dtype).removeprefix("torch."),
        "seed": settings.seed,
        "max_num_seqs": settings.max_running,
        "max_model_len": settings.max_length,
        "enable_sleep_mode": settings.free_cache_engine,
        "tensor_parallel_size": settings.tensor_parallel,
        # The workers must open this process's memory, so they run on this machine. vLLM itself might choose Ray.
        "distributed_executor_backend": "uni" if settings.tensor_parallel == 1 else "mp",
        **(lora_arguments(settings.lora.rank, tensor_parallel=settings.tensor_parallel) if settings.lora else {}),
        **engine_args("vllm", of_vllm, settings=settings, key="rollout.engine_options"),
    }


def rope_arguments(settings: RolloutSettings) -> dict[str, Any]:
    """Return the engine arguments for the trainer's rotary frequencies, where vLLM would take others.

    vLLM stretches "dynamic" frequencies for all rows, as for the longest that they allow. Its "longrope" depends on
    ``max_model_len``, as the trainer's does on the run's longest row.
    """
    from hwrl.models import load_model_config, rope_changes

    config = load_model_config(settings.model_directory)
    text = config.get_text_config()
    changes = rope_changes(text, max_length=settings.max_length, always=True)
    if not changes:
        return {}
    return {"hf_overrides": changes if text is config else {"text_config": changes}}


def check_options(options: Mapping[str, Any], *, known: Collection[str] | None) -> None:
    """Raise ConfigError for an option that hwrl sets or refuses, and for one that is not ``known``.

    ``known`` has the names of vLLM's engine arguments. Where vLLM is not installed it is None: then this does not
    check whether a name is an argument of vLLM.
    """
    for name in options:
        if name != "engine_core":
            _check(name, known)
    _check_graphs(options.get("compilation_config"))
    engine_core = options.get("engine_core", "process")
    if engine_core not in _ENGINE_CORES:
        raise ConfigError(
            f"rollout.engine_options.engine_core={engine_core!r} is unknown",
            why=f"vLLM's engine core can be {' or '.join(_ENGINE_CORES)}",
            fix="remove it, to have it in a process of its own",
        )


def _check_graphs(compilation: Any) -> None:
    """Raise ConfigError for graphs of steps that also read prompts, which vLLM replays with wrong results."""
    if isinstance(compilation, Mapping) and str(compilation.get("cudagraph_mode")).upper() in ("FULL", "2"):
        raise ConfigError(
            "rollout.engine_options.compilation_config.cudagraph_mode=FULL cannot be used",
            why="replayed from one graph, steps that read prompts beside others' tokens come out wrong: vLLM 0.25.1 "
            "sampled most responses from another distribution (see pytorch/torchtitan#3668, too)",
            fix="set FULL_DECODE_ONLY; or FULL_AND_PIECEWISE, vLLM's default, which needs compilation",
        )


def runs_inline(options: Mapping[str, Any], backend: Backend) -> bool:
    """Return whether vLLM's engine core runs in this process.

    The option ``engine_core`` decides. By default the engine core has a process of its own if that process can open
    this process's memory. Daemons of :mod:`multiprocessing` may start no process, so there it runs inline.
    """
    can_start = backend.supports(Capability.DEVICE_IPC).usable and not multiprocessing.current_process().daemon
    return bool(options.get("engine_core", "process" if can_start else "inline") == "inline")


def known_arguments(package: Path) -> set[str]:
    """Return the names of vLLM's engine arguments. Parses the sources in ``package``: an import takes ten seconds."""
    module = ast.parse((package / "engine" / "arg_utils.py").read_text(encoding="utf-8"))
    (found,) = (node for node in module.body if isinstance(node, ast.ClassDef) and node.name == "EngineArgs")
    return {ast.unparse(node.target) for node in found.body if isinstance(node, ast.AnnAssign)}


def keys_in(message: str, options: Iterable[str]) -> str:
    """Return the configuration keys of the engine arguments that vLLM's ``message`` names, joined by "or".

    ``options`` has the names of the user's options. Without a match this returns "rollout.engine_options".
    """
    words = set(re.findall(r"\w+", message))
    # "model", "dtype" and "seed" are also plain English words, so only names with an underscore count.
    keys = [key for name, key in _HWRL_KEYS.items() if name in words and "_" in name]
    own = [f"rollout.engine_options.{name}" for name in options if name in words]
    return " or ".join([*keys, *own]) or "rollout.engine_options"


def _check(name: str, known: Collection[str] | None) -> None:
    if name in _HWRL_KEYS:
        why, fix = "hwrl has a key for it", f"set {_HWRL_KEYS[name]}"
    elif name in _REFUSED:
        why, fix = _REFUSED[name], "remove it"
    elif name in _FIXED:
        why, fix = f"updates and log-probabilities are right only with {_FIXED[name]!r}", "remove it"
    elif known is not None and name not in known:
        why = "this version of vLLM has no such engine argument"
        fix = did_you_mean(name, known, otherwise="remove it")
    else:
        return
    raise ConfigError(f"rollout.engine_options.{name} cannot be set", why=why, fix=fix)
