"""A step on packs is the step on padded rows: loss, metrics, gradients, log-probabilities."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hwrl.comm import serve_store, store_address
from hwrl.errors import DataError
from hwrl.interfaces import Batch, LossInputs
from hwrl.testing.processes import run_processes
from hwrl.train import PolicyLoss, UserLoss
from tests.support.fsdp_training import batch_of, engine_on, full, groups_of, join
from tests.support.packed_steps import assert_same_steps, steps_in_both_forms


def share(rank: int, ranks: int) -> Batch:
    """Return uneven shares, with a row that has no response and one that is longer than a small limit."""
    batch = batch_of(groups_of(5, seed=0)[rank::ranks])
    batch.mask[1] = False
    return replace(batch, proximal_logprobs=batch.behaviour_logprobs + 0.1 * batch.mask)


def both(
    rank: int, model_directory: Path, address: str, ranks: int, micro_batch_tokens: int, recomputes: bool
) -> list[dict[str, Any]]:
    group = join(rank, address, ranks)
    limits = {"micro_batch_tokens": micro_batch_tokens, "activation_checkpointing": recomputes}
    engine = engine_on(model_directory, group, temperature=0.8, **limits)

    def gradients() -> list[torch.Tensor]:
        return [full(parameter.grad).clone() for parameter in engine.model.parameters() if parameter.grad is not None]

    try:
        return steps_in_both_forms(engine, share(rank, ranks), gradients, loss=PolicyLoss("decoupled"))
    finally:
        if group is not None:
            group.close()


@pytest.mark.parametrize(("micro_batch_tokens", "recomputes"), [(6, False), (30, True), (10_000, False)])
def test_packs_take_the_step_of_padded_rows(model_directory: Path, micro_batch_tokens: int, recomputes: bool) -> None:
    assert_same_steps(both(0, model_directory, "", 1, micro_batch_tokens, recomputes))


@pytest.mark.parametrize("micro_batch_tokens", [30, pytest.param(10_000, marks=pytest.mark.extended)])
def test_two_ranks_with_packs_take_the_step_of_padded_rows(model_directory: Path, micro_batch_tokens: int) -> None:
    store = serve_store()
    for steps in run_processes(both, 2, model_directory, store_address(store), 2, micro_batch_tokens, False):
        assert_same_steps(steps)


def speechless_without_tokens(inputs: LossInputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = -inputs.advantages * inputs.logprobs
    return loss, {"surprise": -inputs.logprobs, "size": loss.abs()} if len(loss) else {}


def idle(rank: int, model_directory: Path, address: str) -> list[int]:
    """Take a step in packs on 20 rows or on one, then a step without tokens on one rank; return the first's passes."""
    group = join(rank, address, 2)
    engine = engine_on(model_directory, group, micro_batch_tokens=20)
    engine.packing_pays = lambda real_share: True  # type: ignore[method-assign] # also without a fused kernel
    batch = batch_of(groups_of(5, seed=0))
    mine = batch if rank == 0 else batch.select(torch.tensor([3]))
    passes = len(engine.plan(mine))
    assert torch.tensor(list(engine.train_batch(mine, loss=PolicyLoss()).values())).isfinite().all()
    with pytest.raises(DataError, match="other metrics on another rank"):
        engine.train_batch(replace(batch, mask=batch.mask & (rank == 0)), loss=UserLoss(speechless_without_tokens))
    assert group is not None
    group.close()
    return [passes]


def test_a_rank_with_fewer_rows_runs_as_many_packs(model_directory: Path) -> None:
    store = serve_store()
    first, second = run_processes(idle, 2, model_directory, store_address(store))
    assert first == second
    assert first[0] > 3
