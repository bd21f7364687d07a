"""The memory of the embedded engine, by cause, before there is one: :func:`embedded_memory`."""

from __future__ import annotations

from hwrl.interfaces import MemoryCause, RolloutSettings
from hwrl.lora import described_model
from hwrl.models import load_model_config
from hwrl.rollout.slots import cache_token_nbytes

_TABLES = 16
"""Bytes of one place in the engine's tables: token, log-probability, draw and version."""
_PREFILL_TOKENS = 1 << 14


def model_nbytes(settings: RolloutSettings) -> int:
    """Return the bytes of the model's parameters in ``settings.dtype``. Reads its configuration only."""
    model = described_model(settings.model_directory, dtype=settings.dtype, lora=settings.lora)
    numel: int = sum(parameter.numel() for parameter in model.parameters())
    return numel * settings.dtype.itemsize


def embedded_memory(settings: RolloutSettings) -> tuple[MemoryCause, ...]:
    """Return the memory of a replica with the embedded engine."""
    whole = load_model_config(settings.model_directory)
    config, places = whole.get_text_config(), settings.max_running * settings.max_length
    cache = places * cache_token_nbytes(whole, itemsize=settings.dtype.itemsize)
    widest = 4 * config.hidden_size + 2 * (getattr(config, "intermediate_size", None) or 4 * config.hidden_size)
    prefill = max(_PREFILL_TOKENS, settings.max_length) * widest * settings.dtype.itemsize
    logits = settings.max_running * config.vocab_size * 12  # float32, and twice more to sample from them
    return (
        MemoryCause("weights", model_nbytes(settings)),
        MemoryCause(f"attention cache of {settings.max_running} x {settings.max_length:,} tokens", cache),
        MemoryCause("tables of tokens", places * _TABLES),
        MemoryCause("a pass over prompts, logits", prefill + logits, phases=("step",), certain=False),
    )
