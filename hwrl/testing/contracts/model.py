"""A tiny language model for the contracts of engines, with a reference on the host in double precision."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import torch

from hwrl.run.demo import ALPHABET, write_model

END = ALPHABET.index("<eos>")
"""The token that ends a response."""
VOCABULARY = len(ALPHABET)
_CONTRAST = 10.0
"""Larger weights make the probabilities far from uniform, so that a wrong position or mask changes them."""
_kept: list[tempfile.TemporaryDirectory[str]] = []  # deleted at the end of the process


@functools.cache
def model_directory(seed: int = 0) -> Path:
    """Return the directory of a tiny model with random weights, written once for this process and ``seed``."""
    from safetensors.torch import load_file, save_file

    _kept.append(tempfile.TemporaryDirectory(prefix="hwrl-conformance-"))
    directory = Path(_kept[-1].name)
    write_model(directory, alphabet=ALPHABET, seed=seed)
    weights = load_file(directory / "model.safetensors")
    weights = {name: tensor * _CONTRAST if tensor.ndim > 1 else tensor for name, tensor in weights.items()}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@functools.cache
def model_weights(seed: int = 0) -> dict[str, torch.Tensor]:
    """Return the model's tensors, float32 on the host, under the names in its files. Do not write to them."""
    from safetensors.torch import load_file

    found: dict[str, torch.Tensor] = load_file(model_directory(seed) / "model.safetensors")
    return found


def reference_model(seed: int = 0) -> Any:
    """Return a new transformers model with these weights, in double precision on the host."""
    from hwrl.models import load_model

    return load_model(model_directory(seed), dtype=torch.float64)


def reference_logprobs(model: Any, tokens: torch.Tensor, *, temperature: float = 1.0) -> torch.Tensor:
    """Return the log-probability of each token after the first: (rows, length - 1), differentiable."""
    logits = model(tokens).logits[:, :-1] / temperature
    found: torch.Tensor = logits.log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
    return found
