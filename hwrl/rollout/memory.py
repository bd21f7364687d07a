"""Compute the memory that an embedded engine will need, by cause: :func:`embedded_memory`."""

from __future__ import annotations

from hwrl.interfaces import MemoryCause, RolloutSettings
from hwrl.lora import described_model
from hwrl.models import load_model_config
from hwrl.rollout.slots import cache_token_nbytes

_TABLES = 16
"""Bytes of one token in the engine's tables: its id, log-probability, random number and version."""
_PREFILL_TOKENS = 1 << 14
"""The engine's default of ``prefill_tokens``."""


def model_nbytes(settings: RolloutSettings) -> int:
    """Return the bytes of the model's parameters in ``settings.dtype``. Reads only the model's configuration."""
    model = described_model(settings.model_directory, dtype=settings.dtype, lora=settings.lora)
    numel: int = sum(parameter.numel() for parameter in model.parameters())
    return numel * settings.dtype.itemsize


def embedded_memory(settings: RolloutSettings) -> tuple[MemoryCause, ...]:
    """Return what a replica with the embedded engine needs, cause by cause. Reads only the model's configuration."""
    whole = load_model_config(settings.model_directory)
    config, places = whole.get_text_config(), settings.max_running * settings.max_length
    cache = places * cache_token_nbytes(whole, itemsize=settings.dtype.itemsize)
    widest = 4 * config.hidden_size + 2 * (getattr(config, "intermediate_size", None) or 4 * config.hidden_size)
    prefill = max(_PREFILL_TOKENS, settings.max_length) * widest * settings.dtype.itemsize
    logits = settings.max_running * config.vocab_size * 12  # float32: the logits, and two copies for sampling
    return (
        MemoryCause("weights", model_nbytes(settings)),
        MemoryCause(f"attention cache of {settings.max_running} x {settings.max_length:,} tokens", cache),
        MemoryCause("tables of tokens", places * _TABLES),
        MemoryCause("a pass over prompts, logits", prefill + logits, phases=("step",), certain=False),
    )
