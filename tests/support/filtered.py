"""The distribution that an engine must sample from, worked out slowly in float64."""

from __future__ import annotations

from typing import Any

import numpy as np

from hwrl.interfaces import Sampling

FILTERS: dict[str, dict[str, Any]] = {
    "top_p": {"top_p": 0.6},
    "top_k": {"top_k": 5},
    "min_p": {"min_p": 0.2},
    "all": {"top_p": 0.7, "top_k": 6, "min_p": 0.05, "temperature": 1.7},
    "one": {"top_k": 1},
}
"""Settings of ``Sampling`` for a vocabulary of about 16 tokens."""


def distribution(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    """Return the filtered distribution (float64) over ``logits`` of one place, one filter after the other."""
    shares = np.exp(logits.astype(np.float64) / sampling.temperature)
    shares /= shares.sum()
    shares[shares < sampling.min_p * shares.max()] = 0
    if sampling.top_k > 0:
        shares[shares < np.sort(shares)[-min(sampling.top_k, len(shares))]] = 0
    shares /= shares.sum()
    kept, total = np.zeros(len(shares), dtype=bool), 0.0
    for token in np.argsort(-shares):
        if total < sampling.top_p:
            kept[token], total = True, total + shares[token]
    shares[~kept & (shares < shares[kept].min())] = 0
    renormalised: np.ndarray = shares / shares.sum()
    return renormalised
