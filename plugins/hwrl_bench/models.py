"""Models for benchmarks: shapes of Qwen3 with tied embeddings. No weights are on the disk."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from hwrl import Backend


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a model of Qwen3, under the names in its configuration file."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int = 128

    @property
    def layer_parameters(self) -> int:
        """The number of parameters in all layers, without embeddings and the last norm."""
        queries, keys = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        attention = 2 * self.hidden_size * queries + 2 * self.hidden_size * keys
        norms = 2 * self.hidden_size + 2 * self.head_dim
        return self.num_hidden_layers * (attention + 3 * self.hidden_size * self.intermediate_size + norms)

    def write(self, directory: Path) -> None:
        """Write the model's configuration to ``directory``. Imports no package."""
        config = {
            **vars(self),
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "tie_word_embeddings": True,
            "max_position_embeddings": 40960,
            "rope_theta": 1000000.0,
            "pad_token_id": 0,
            "eos_token_id": 1,
            "bos_token_id": 2,
        }
        (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


MODELS = {
    "tiny": ModelShape(512, 64, 128, 2, 4, 2, head_dim=32),
    "135m": ModelShape(49152, 576, 1536, 30, 9, 3, head_dim=64),
    "0.6b": ModelShape(151936, 1024, 3072, 28, 16, 8),
    "1.7b": ModelShape(151936, 2048, 6144, 28, 16, 8),
    "4b": ModelShape(151936, 2560, 9728, 36, 32, 8),
}
"""135m has the sizes of SmolLM2-135M; 4b has 398 tensors, 8.04 GB as bfloat16."""


def random_model(directory: Path, *, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Any:
    """Return the model of ``directory`` on ``device``. The same seed, dtype and kind of device give the same weights.

    Weights are normal with deviation 0.02, around 1 in norms. Zeros would be dishonest: a device multiplies them at
    less power, and so faster.
    """
    import torch

    from hwrl.models import build_model

    with device:
        model = build_model(directory, dtype=dtype)
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.02)
    return model.eval()


@contextlib.contextmanager
def random_weights(backend: Backend, *, on_host: bool) -> Iterator[None]:
    """Inside, transformers' loader of models returns :func:`random_model`, and reads no weights.

    To write and load 8 GB for each way would take longer than the measurement. Everything else of the loading is as
    without this. The model is on the device, or, with ``on_host``, in host memory, where the loader puts it: an engine
    may look at how much of the device is free.
    """
    from transformers import AutoModelForCausalLM

    def from_pretrained(directory: Path, *, dtype: torch.dtype, **_: Any) -> tuple[Any, dict[str, list[str]]]:
        model = random_model(directory, dtype=dtype, device=backend.device())
        if on_host:
            model = model.cpu()
            backend.empty_cache()
        return model, {"missing_keys": [], "unexpected_keys": [], "mismatched_keys": []}

    original = AutoModelForCausalLM.from_pretrained
    AutoModelForCausalLM.from_pretrained = from_pretrained
    try:
        yield
    finally:
        AutoModelForCausalLM.from_pretrained = original
