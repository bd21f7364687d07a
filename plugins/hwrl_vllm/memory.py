"""The memory that one of vLLM's workers will need, by cause, before it starts: :func:`worker_memory`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hwrl.errors import ConfigError
from hwrl.interfaces import MemoryCause, RolloutSettings
from hwrl.models import load_model_config
from hwrl.rollout import cache_token_nbytes, model_nbytes

_SMALLER_WEIGHTS = {"quantization", "quantization_config", "cpu_offload_gb"}
"""vLLM's arguments that may make the weights on a device smaller than the worker's share."""
_SMALLER_CACHE = {"kv_cache_dtype", "decode_context_parallel_size"}
"""vLLM's arguments that may make a token's entry in the attention cache smaller."""
_UTILIZATION = 0.92
"""vLLM's default for ``gpu_memory_utilization``."""


def worker_memory(settings: Any, options: Mapping[str, Any], *, device_nbytes: int) -> tuple[MemoryCause, ...]:
    """Return the memory of one worker in three parts.

    They are its share of the weights, the attention cache of one response of ``max_length``, and what vLLM takes beyond
    them. vLLM needs the first two at least; each is certain unless an option or the architecture may make it smaller.
    With ``kv_cache_memory_bytes`` the cache has that size. Otherwise vLLM takes the share ``gpu_memory_utilization`` of
    the device for everything, activations too. Raises ConfigError if an option is not a positive number.
    """
    assert isinstance(settings, RolloutSettings), "the plugin has no train engine"
    ranks = settings.tensor_parallel
    weights = -(-model_nbytes(settings) // ranks)
    config = load_model_config(settings.model_directory)
    token_nbytes = cache_token_nbytes(config, itemsize=settings.dtype.itemsize) / _cache_ranks(config, ranks)
    one = int(token_nbytes * settings.max_length)
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
    """Return among how many ranks the cache is divided: a key-value head is not divided."""
    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    return min(ranks, int(heads))


def _caches_all(text: Any) -> bool:
    """Return whether each layer caches the keys and values of all tokens, not of a window and not a latent vector."""
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
