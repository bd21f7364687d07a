"""The form of a LoRA adapter: :class:`LoraSettings`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class LoraSettings:
    """The layers that get an adapter, and its rank and scale.

    An adapted layer computes W·x + ``alpha`` / ``rank`` · B·A·x. A has ``rank`` rows and B has ``rank`` columns; only
    A and B are trained. ``target_modules`` follows PEFT: "all-linear" (every linear layer but the output layer), the
    ends of layer names, or one regular expression.
    """

    rank: int
    alpha: float
    target_modules: str | tuple[str, ...] = "all-linear"

    def peft_config(self) -> dict[str, Any]:
        """Return the adapter's form as PEFT writes it to ``adapter_config.json``."""
        targets = self.target_modules
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "r": self.rank,
            "lora_alpha": self.alpha,
            "target_modules": targets if isinstance(targets, str) else list(targets),
            "lora_dropout": 0.0,
            "bias": "none",
        }
