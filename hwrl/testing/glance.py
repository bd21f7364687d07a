"""A small part of the conformance kit, for ``hwrl doctor``."""

from __future__ import annotations

import torch

from hwrl.interfaces import Backend
from hwrl.testing.compute import ATTENTIONS, why_refused, wrong_attention, wrong_training
from hwrl.testing.varlen import PACKED, wrong_varlen


def wrong_at_a_glance(backend: Backend) -> list[str]:
    """Check attention and all gradients in the usual dtypes, within a second; return the errors."""
    wrong = []
    for dtype in (torch.float32, torch.bfloat16):
        if dtype is torch.float32 or not why_refused(backend, dtype):
            wrong += wrong_attention(backend, ATTENTIONS["causal"], dtype)
            wrong += wrong_varlen(backend, PACKED["grouped"], dtype)
            wrong += wrong_training(backend, dtype, step=False)
    return wrong
