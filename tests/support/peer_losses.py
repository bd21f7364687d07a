"""Losses and advantages of other frameworks, called from their installed sources without importing the frameworks."""

from __future__ import annotations

import ast
import functools
import importlib.util
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

needs_verl = pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="verl is not installed")
needs_trl = pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="trl is not installed")


def _source(package: str, *parts: str) -> Path:
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.origin is not None, "else the test is skipped"
    return Path(spec.origin).parent.joinpath(*parts)


def _functions(path: Path, names: dict[str, Any], *, inside: str | None = None) -> dict[str, Any]:
    """Return the functions of the module at ``path``, or of its class ``inside``, run with ``names``, undecorated."""
    body = ast.parse(path.read_text()).body
    if inside is not None:
        (body,) = (node.body for node in body if isinstance(node, ast.ClassDef) and node.name == inside)
    functions: list[ast.stmt] = [node for node in body if isinstance(node, ast.FunctionDef)]
    for function in functions:
        assert isinstance(function, ast.FunctionDef)
        function.decorator_list = []
    future = ast.parse("from __future__ import annotations").body
    exec(compile(ast.Module([*future, *functions], type_ignores=[]), path, "exec"), names)
    return names


class NoConfig:
    """A class of which nothing is an instance."""


class VerlConfig(SimpleNamespace):
    """What verl's losses and advantages read."""

    clip_ratio = clip_ratio_low = 0.2
    clip_ratio_high = 0.28
    gamma = 1.0
    global_batch_info: dict[str, Any] = {}  # noqa: RUF012 - verl spreads it
    loss_scale_factor = None

    def get(self, key: str, default: Any = None) -> Any:
        """Return a value as verl's configurations do."""
        return getattr(self, key, default)


@functools.cache
def verl_algorithms() -> dict[str, Any]:
    """Return the functions of verl's module of algorithms, by name."""
    tensors = _functions(_source("verl", "utils", "torch_functional.py"), {"torch": torch})
    names = {
        "torch": torch,
        "np": np,
        "verl_F": SimpleNamespace(**tensors),
        "ActorConfig": VerlConfig,
        "AlgoConfig": NoConfig,
        "DictConfig": VerlConfig,
        "defaultdict": defaultdict,
    }
    return _functions(_source("verl", "trainer", "ppo", "core_algos.py"), names)


def _trl_inputs(columns: dict[str, torch.Tensor], mask: torch.Tensor) -> dict[str, torch.Tensor]:
    prompt = torch.zeros(len(mask), 1, dtype=torch.int64)
    return {
        "prompt_ids": prompt,
        "prompt_mask": prompt,
        "completion_ids": mask.long(),
        "completion_mask": mask,
        "advantages": columns["advantages"],
        "old_per_token_logps": columns["behaviour"],
        "ref_per_token_logps": columns["reference"],
        "num_items_in_batch": mask.sum(),
    }


def trl_loss(columns: dict[str, torch.Tensor], mask: torch.Tensor, **settings: Any) -> torch.Tensor:
    """Return the loss of TRL's GRPO trainer for padded ``columns`` (rows × length), with its ``settings``."""
    names = _functions(
        _source("trl", "trainer", "grpo_trainer.py"),
        {"torch": torch, "nanmax": max, "nanmin": min},
        inside="GRPOTrainer",
    )

    class Trainer(SimpleNamespace):
        """A trainer that has only what a loss reads."""

        def _get_per_token_logps_and_entropies(self, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor, None]:
            return columns["logprobs"], columns["entropy"], None

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(name)

    inputs = _trl_inputs(columns, mask)
    alone = SimpleNamespace(gather=lambda value: value, num_processes=1, reduce=lambda value, **_: value)
    trainer = Trainer(
        **{
            "beta": 0.0,
            "epsilon_low": 0.2,
            "epsilon_high": 0.28,
            "importance_sampling_level": "token",
            "max_completion_length": mask.shape[1],
            **settings,
        },
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=False,
        vllm_importance_sampling_correction=False,
        current_gradient_accumulation_steps=1,
        accelerator=alone,
        model=SimpleNamespace(training=True),
        args=SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1),
        _entropy_bonus_enabled=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
    )
    loss: torch.Tensor = names["_compute_loss"](trainer, None, inputs)
    return loss
