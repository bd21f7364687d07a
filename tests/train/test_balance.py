"""Rows go to mini-batches in order and to ranks by cost, and a step on balanced ranks is the step of one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hwrl.comm import serve_store, store_address
from hwrl.errors import EngineError
from hwrl.interfaces import Batch
from hwrl.testing.processes import run_processes
from hwrl.train import Algorithm, AsyncTrainer, PolicyLoss, TrainedStep, read_model_flops
from hwrl.train.batches import divide_rows, imbalance
from tests.support.fsdp_training import engine_on, groups_of, join
from tests.support.near import assert_near

GROUP = 8
PROMPT = 128


def lengths_of(rows: int, *, seed: int) -> list[int]:
    """Return the tokens of ``rows`` rows: responses of a mean of about 1,024, long or short with their prompt."""
    rng = np.random.default_rng(seed)
    of_prompts = rng.lognormal(np.log(1024) - 0.32, 0.75, rows // GROUP).repeat(GROUP)
    responses = np.clip(of_prompts * rng.lognormal(0.0, 0.28, rows), 16, 4096 - PROMPT)
    lengths: list[int] = (responses.astype(int) + PROMPT).tolist()
    return lengths


def round_robin(rows: int, shares: int) -> list[list[list[int]]]:
    """Return the division that deals whole groups in turn."""
    return [[[row for row in range(rows) if row // GROUP % shares == share] for share in range(shares)]]


def padded_tokens(lengths: list[int]) -> int:
    """Return the padded tokens of the micro-batches of rows with ``lengths``."""
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    batch = Batch(mask.long(), mask, mask.float(), torch.zeros(len(lengths)))
    return sum(len(part) * max(lengths[row] for row in part) for part in batch.micro_batches(max_tokens=16384))


def slowest_over_mean(division: list[list[list[int]]], lengths: list[int]) -> float:
    seconds = [padded_tokens([lengths[row] for row in share]) for share in division[0]]
    return max(seconds) * len(seconds) / sum(seconds)


@pytest.mark.parametrize(("rows", "shares"), [(256, 4), (256, 8), pytest.param(1024, 8, marks=pytest.mark.extended)])
def test_ranks_finish_together_whatever_the_lengths_where_whole_groups_in_turn_do_not(rows: int, shares: int) -> None:
    dealt, balanced = [], []
    for seed in range(5):
        lengths = lengths_of(rows, seed=seed)
        division = divide_rows(lengths, mini_batches=1, shares=shares)
        assert imbalance(division, lengths) < 1.01
        dealt.append(slowest_over_mean(round_robin(rows, shares), lengths))
        balanced.append(slowest_over_mean(division, lengths))
    assert max(balanced) < 1.1
    assert np.mean(dealt) > (1.15 if rows == 256 else 1.1)


@pytest.mark.parametrize("shares", [1, 2, 3, 5])
def test_mini_batches_hold_the_same_rows_on_any_number_of_ranks_and_no_rank_goes_empty(shares: int) -> None:
    costs = [900, *[1] * 16]
    division = divide_rows(costs, mini_batches=3, shares=shares)
    rows = [sorted(row for share in part for row in share) for part in division]
    assert rows == [list(range(6)), list(range(6, 12)), list(range(12, 17))]
    assert all(share == sorted(share) and share for part in division for share in part)


def test_the_costliest_share_of_each_mini_batch_counts() -> None:
    costs = [3, 1, 1, 3]
    assert imbalance([[[0], [1]], [[2], [3]]], costs) == 6 / 4
    assert imbalance([[[0, 2], [1, 3]]], costs) == 1.0


def test_a_step_without_a_row_for_each_rank_in_each_mini_batch_is_refused() -> None:
    assert divide_rows([1] * 6, mini_batches=3, shares=2) == [[[0], [1]], [[2], [3]], [[4], [5]]]
    with pytest.raises(EngineError, match=r"too few responses(.|\n)*2 ranks(.|\n)*3 mini-batches"):
        divide_rows([1] * 5, mini_batches=3, shares=2)


def train(rank: int, model_directory: Path, address: str, ranks: int) -> dict[str, Any]:
    """Take two steps of two epochs in three mini-batches; return the metrics and the weights."""
    group = join(rank, address, ranks)
    engine = engine_on(model_directory, group)
    trainer = AsyncTrainer(
        engine,
        algorithm=Algorithm(PolicyLoss("decoupled"), ppo_epochs=2, mini_batches=3),
        max_staleness=5,
        flops=read_model_flops(model_directory, frozen=False),
    )
    steps = [trainer.step(groups_of(5, seed=step)) for step in range(2)]
    weights = {name: tensor.cpu().clone() for name, tensor in engine.named_weights()}
    if group is not None:
        group.close()
    return {"steps": steps, "weights": weights}


def without_speed(step: TrainedStep) -> dict[str, float]:
    return {name: value for name, value in step.metrics.items() if not name.startswith("perf/")}


def test_balanced_ranks_take_the_steps_of_one_rank_mini_batch_by_mini_batch(model_directory: Path) -> None:
    alone = train(0, model_directory, "", 1)
    store = serve_store()
    pair = run_processes(train, 2, model_directory, store_address(store), 2)
    for name, tensor in alone["weights"].items():
        assert_near(pair[0]["weights"][name], tensor, share=1e-3)  # AdamW magnifies rounding
    for one in pair:
        for step, wanted in zip(one["steps"], alone["steps"], strict=True):
            assert (step.tokens, step.flops) == (wanted.tokens, wanted.flops)
            assert 1.0 < step.metrics["perf/imbalance"] < 1.5
            assert wanted.metrics["perf/imbalance"] == 1.0
            assert without_speed(step) == pytest.approx(without_speed(wanted), rel=2e-3, abs=1e-5)
