"""The same training step in packs and in padded rows."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import pytest
import torch

from hwrl.interfaces import Batch, TokenLoss
from hwrl.train import FsdpEngine, OutputScorer
from tests.support.near import assert_near


def steps_in_both_forms(
    engine: FsdpEngine, batch: Batch, gradients: Callable[[], list[torch.Tensor]], *, loss: TokenLoss
) -> list[dict[str, Any]]:
    """Take one step in packs and one in rows, at a rate of 0; return metrics, gradients and log-probabilities."""
    taken: list[dict[str, Any]] = []

    def keep_gradients(*_: object) -> None:
        taken[-1]["gradients"] = gradients()

    engine.settings = replace(engine.settings, learning_rate=0.0)  # so that both steps start at the same weights
    for optimizer in _torch_optimizers(engine.optimizer):
        optimizer.register_step_pre_hook(keep_gradients)
    for packs in (True, False):
        engine.packing_pays = lambda real_share, packs=packs: packs  # type: ignore[misc,method-assign] # on every backend
        if not packs:
            engine.scorer.for_loss = _forgetting(engine.scorer)  # type: ignore[method-assign] # an independent way
        assert (engine.plan(batch)[0].boundaries is not None) == packs
        taken.append({})
        taken[-1]["metrics"] = engine.train_batch(batch, loss=loss)
        taken[-1]["logprobs"] = engine.logprobs(batch)
        engine.updates = 0
    return taken


def _torch_optimizers(optimizer: Any) -> list[torch.optim.Optimizer]:
    """Return torch's optimizers: ``optimizer`` itself, or those inside one of Megatron-core."""
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    return [getattr(part, "optimizer", part) for part in parts]


def _forgetting(scorer: OutputScorer) -> Any:
    """Return ``scorer.for_loss``, but without the gradients: the backward pass computes them."""
    for_loss = scorer.for_loss

    def without_gradients(_: object, *, entropy_gradient: bool) -> AbstractContextManager[None]:
        return for_loss(None, entropy_gradient=entropy_gradient)

    return without_gradients


def assert_same_steps(steps: list[dict[str, Any]]) -> None:
    packs, rows = steps
    assert packs["metrics"].pop("padding_share") <= rows["metrics"].pop("padding_share")
    assert packs["metrics"] == pytest.approx(rows["metrics"], rel=1e-4, abs=1e-5)
    assert_near(packs["logprobs"], rows["logprobs"])
    assert len(packs["gradients"]) > 1
    for one, other in zip(packs["gradients"], rows["gradients"], strict=True):
        assert_near(one, other)
