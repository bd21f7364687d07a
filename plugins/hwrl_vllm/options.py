"""vLLM's engine arguments: what hwrl decides, and what the user can set under ``rollout.engine_options``."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from typing import Any

from hwrl.errors import ConfigError
from hwrl.rollout.engine import RolloutSettings
from hwrl_vllm.lora import lora_arguments

_HAVE_KEYS = {
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
}

_FIXED: dict[str, Any] = {
    "load_format": "dummy",  # the weights come from the trainer
    "skip_tokenizer_init": True,  # prompts and responses are token ids
    "generation_config": "vllm",  # a model's own sampling defaults would change the policy
    "logprobs_mode": "processed_logprobs",  # at the temperature of sampling, as the trainer computes them
    # A token that was scheduled before an update must not come out after it.
    "async_scheduling": False,
    "pipeline_parallel_size": 1,
    "data_parallel_size": 1,
    "worker_extension_cls": "hwrl_vllm.worker.WeightLoading",
    "disable_log_stats": True,
}
"""Arguments on which the engine's promises rest."""


def engine_arguments(
    settings: RolloutSettings, options: Mapping[str, Any], *, device: Mapping[str, Any], known: Collection[str]
) -> dict[str, Any]:
    """Return the arguments of an engine: hwrl's, those that the ``device`` needs, and ``options``, the user's.

    ``known`` are the names that the installed vLLM has. Raises ConfigError for an option that is not among them, or
    that hwrl decides.
    """
    for name in options:
        _check(name, known)
    return {
        **_FIXED,
        "model": str(settings.model_directory),
        "dtype": str(settings.dtype).removeprefix("torch."),
        "seed": settings.seed,
        "max_num_seqs": settings.max_running,
        "max_model_len": settings.max_length,
        "enable_sleep_mode": settings.may_sleep,
        "tensor_parallel_size": settings.tensor_parallel,
        # In this process, or where they can open its memory; vLLM itself would ask Ray for some.
        "distributed_executor_backend": "uni" if settings.tensor_parallel == 1 else "mp",
        **(lora_arguments(settings.lora.rank, tensor_parallel=settings.tensor_parallel) if settings.lora else {}),
        **device,
        **options,
    }


def _check(name: str, known: Collection[str]) -> None:
    if name in _HAVE_KEYS:
        why, fix = "hwrl has a key for it", f"set {_HAVE_KEYS[name]}"
    elif name in _FIXED:
        why, fix = f"updates and log-probabilities are right only with {_FIXED[name]!r}", "remove it"
    elif name not in known:
        close = difflib.get_close_matches(name, known, n=1)
        why = "this version of vLLM has no such engine argument"
        fix = f"did you mean {close[0]!r}?" if close else "remove it"
    else:
        return
    raise ConfigError(f"rollout.engine_options.{name} cannot be set", why=why, fix=fix)
