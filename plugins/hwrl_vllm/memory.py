"""The memory of one of vLLM's workers, by cause, before there is one: :func:`worker_memory`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hwrl.errors import ConfigError
from hwrl.interfaces import MemoryCause, RolloutSettings
from hwrl.models import load_model_config
from hwrl.rollout import cache_token_nbytes, model_nbytes

_SMALLER_WEIGHTS = {"quantization", "quantization_config", "cpu_offload_gb"}
"""vLLM's arguments with which a worker may have less than its share of the weights on its device."""
_SMALLER_CACHE = {"kv_cache_dtype", "decode_context_parallel_size"}
_UTILIZATION = 0.92
"""vLLM's default of ``gpu_memory_utilization``."""


def worker_memory(settings: Any, options: Mapping[str, Any], *, device_nbytes: int) -> tuple[MemoryCause, ...]:
    """Return the memory of one worker: its share of the weights, and what vLLM takes for its cache and passes.

    vLLM takes ``gpu_memory_utilization`` of the device for all of it, or ``kv_cache_memory_bytes`` for the cache. Its
    cache must hold one request of the greatest length. Both are estimates if options or the architecture may make them
    smaller. Raises ConfigError for options that are no such numbers.
    """
    assert isinstance(settings, RolloutSettings), "the plugin has no train engine"
    ranks = settings.tensor_parallel
    weights = -(-model_nbytes(settings) // ranks)
    config = load_model_config(settings.model_directory)
    of_token = cache_token_nbytes(config, itemsize=settings.dtype.itemsize) / _cache_ranks(config, ranks)
    one = int(of_token * settings.max_length)
    name = f"attention cache of one response, {settings.max_length:,} tokens"
    least = (
        MemoryCause("weights", weights, certain=not options.keys() & _SMALLER_WEIGHTS),
        MemoryCause(name, one, certain=not options.keys() & _SMALLER_CACHE and _caches_all(config.get_text_config())),
    )
    fixed = options.get("kv_cache_memory_bytes")
    share = options.get("gpu_memory_utilization", _UTILIZATION)
    if fixed is not None:
        rest = _number(fixed, "kv_cache_memory_bytes") - one
    else:
        rest = int(_number(share, "gpu_memory_utilization") * device_nbytes) - weights - one
    more = f"vLLM's further cache and passes, room for {max(0, rest) // max(1, one)} more such responses"
    return (*least, MemoryCause(more, max(0, int(rest)), certain=False))


def _cache_ranks(config: Any, ranks: int) -> int:
    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    return min(ranks, int(heads))


def _caches_all(text: Any) -> bool:
    """Return whether each layer caches the keys and values of all tokens, and not a window or a latent vector."""
    other_layers = set(getattr(text, "layer_types", None) or ()) - {"full_attention"}
    return not (other_layers or getattr(text, "sliding_window", None) or getattr(text, "kv_lora_rank", None))


def _number(value: object, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
        raise ConfigError(
            f"rollout.engine_options.{name}={value!r} cannot be planned with",
            why="it is no positive number",
            fix=f"correct {name}",
        )
    return float(value)
