"""vLLM's engine arguments: what hwrl decides, what the user may."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any

from hwrl.errors import ConfigError
from hwrl.rollout.engine import RolloutSettings

_FROM_CONFIGURATION = {
    "model": "model.path",
    "dtype": "model.dtype",
    "seed": "seed",
    "max_num_seqs": "rollout.max_running",
    "max_model_len": "data.max_prompt_tokens and rollout.max_new_tokens",
}
"""Arguments for which hwrl has keys of its own."""

_FIXED: dict[str, Any] = {
    "load_format": "dummy",  # the weights come from the trainer
    "skip_tokenizer_init": True,  # prompts and responses are token ids
    "generation_config": "vllm",  # a model's own sampling defaults would change the policy
    "logprobs_mode": "processed_logprobs",  # those of the temperature of sampling, as the trainer computes them
    "async_scheduling": False,  # a token that was scheduled before an update would be stamped with the version after it
    "worker_extension_cls": "hwrl_vllm.worker.WeightLoading",
    "disable_log_stats": True,
}
"""Arguments on which the engine's promises rest."""


def engine_arguments(settings: RolloutSettings, options: Mapping[str, Any], *, known: type) -> dict[str, Any]:
    """Return the arguments for ``known``, vLLM's ``EngineArgs``, of which ``options`` are the user's.

    Raises ConfigError for an option that vLLM does not have, or that is hwrl's to set.
    """
    names = {field.name for field in dataclasses.fields(known)}
    for name in options:
        _check(name, names)
    return {
        "model": str(settings.model_directory),
        "dtype": str(settings.dtype).removeprefix("torch."),
        "seed": settings.seed,
        "max_num_seqs": settings.max_running,
        "max_model_len": settings.max_length,
        **_FIXED,
        **options,
    }


def _check(name: str, names: set[str]) -> None:
    key = f"rollout.engine_options.{name}"
    if name in _FROM_CONFIGURATION:
        raise ConfigError(
            f"{key} is not possible", why="hwrl has a key for it", fix=f"set {_FROM_CONFIGURATION[name]} instead"
        )
    if name in _FIXED:
        raise ConfigError(
            f"{key} is not possible",
            why=f"weight updates and log-probabilities need it to be {_FIXED[name]!r}",
            fix="leave it out",
        )
    if name not in names:
        close = difflib.get_close_matches(name, names, n=1)
        raise ConfigError(
            f"{key} is not possible",
            why="vLLM's EngineArgs has no such argument" + (f", but {close[0]}" if close else ""),
            fix="see vLLM's page on engine arguments",
        )
