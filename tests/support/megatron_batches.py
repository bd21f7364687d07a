"""Batches and settings for the Megatron engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from hwrl.interfaces import Batch, EngineSettings

ROWS = 7


def batch_of(rows: slice, *, seed: int) -> Batch:
    """Return some of ``ROWS`` rows of several lengths, of which the first two tokens are the prompt."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(4, 12, (ROWS,), generator=generator)
    places = torch.arange(12)
    mask = (places >= 2) & (places < lengths[:, None])
    tokens = torch.randint(0, 16, (ROWS, 12), generator=generator) * (places < lengths[:, None])
    advantages = torch.randn(ROWS, generator=generator)
    return Batch(tokens[rows], mask[rows], (torch.full((ROWS, 12), -2.8) * mask)[rows], advantages[rows])


def settings_in(directory: Path, **changes: Any) -> EngineSettings:
    return EngineSettings(
        model_directory=directory / "model", learning_rate=1e-2, total_steps=9, micro_batch_tokens=24, **changes
    )
