"""transformers' Trainer on a tiny model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.support.tiny_model import tiny_model


class Rows(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.arange(index, index + 8) % 16
        return {"input_ids": tokens, "labels": tokens}


def make_trainer(directory: Path, **settings: Any) -> Any:
    """Five steps are an epoch of one rank; dropout uses the random numbers."""
    from transformers import Trainer, TrainingArguments

    model = tiny_model()
    model.set_attn_implementation("eager")
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.2
    defaults = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "max_steps": 8,
        "save_steps": 1,
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
    }
    return Trainer(
        model, args=TrainingArguments(str(directory), **defaults | settings), train_dataset=Rows(), eval_dataset=Rows()
    )
