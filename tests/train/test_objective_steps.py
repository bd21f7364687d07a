"""Steps with all terms of an objective: the same on one rank, on several, and on ranks that share rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hwrl
from hwrl.comm import serve_store, store_address
from hwrl.interfaces import LossInputs, PromptGroup
from hwrl.testing.processes import run_processes
from hwrl.train import (
    Algorithm,
    AsyncTrainer,
    FsdpEngine,
    Objective,
    Overlong,
    PolicyLoss,
    ReferenceModel,
    Rejection,
    UserLoss,
)
from tests.support.fsdp_training import batch_of, engine_on, full, groups_of, join, settings_on, without_padding
from tests.support.near import assert_near


def centred_surrogate(inputs: LossInputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """A user's loss that needs whole rows: its gradient at a token depends on all tokens of the row."""
    ratio = inputs.row_means(inputs.logprobs - inputs.behaviour).exp()[inputs.rows]
    surprise = inputs.row_sums(inputs.entropy * inputs.logprobs)[inputs.rows]
    return -ratio * inputs.advantages + 0.01 * surprise.square(), {"ratio": ratio}


SEQUENCES = Objective(PolicyLoss("gspo"), Rejection("seq_mean_k1", 0.6, 1.9), kl_coeff=0.1, entropy_coeff=0.02)
ALGORITHMS = {
    "sequences": Algorithm(SEQUENCES, mini_batches=2, aggregation="seq-mean-token-mean"),
    "tokens": Algorithm(
        Objective(PolicyLoss("cispo"), Rejection("token_k1", 0.6, 1.9), entropy_coeff=0.02),
        "reinforce_plus_plus",
        aggregation="seq-mean-token-sum-norm",
        loss_constant=6.0,
        overlong=Overlong(masks_truncated=True, buffer_tokens=3, max_tokens=6),
    ),
    "user": Algorithm(UserLoss(centred_surrogate, needs_entropy_gradient=True), aggregation="seq-mean-token-sum"),
}


def engine_with_reference(directory: Path, group: Any, **changes: Any) -> FsdpEngine:
    """Return an engine with a reference, from which the first step leads away."""
    settings, backend = settings_on(directory, learning_rate=1e-4, **changes), hwrl.get_backend()
    reference = ReferenceModel(settings, backend=backend, group=group)
    return FsdpEngine(settings, backend=backend, group=group, reference=reference)


def groups_at(step: int) -> list[PromptGroup]:
    """Return groups with behaviour log-probabilities of many ratios, and some truncated responses."""
    rng = np.random.default_rng(step)
    return [
        replace(
            group,
            logprobs=group.logprobs + 0.4 * rng.standard_normal(len(group.logprobs)).astype(np.float32),
            truncated=rng.random(group.size) < 0.2,
        )
        for group in groups_of(5, seed=step)
    ]


def steps(rank: int, directory: Path, address: str, ranks: int, context: int, name: str) -> dict[str, Any]:
    group = join(rank, address, ranks)
    engine = engine_with_reference(directory, group, context_parallel=context, micro_batch_tokens=30)
    gradients: list[list[torch.Tensor]] = []

    def keep_gradients(*_: object) -> None:
        gradients.append([full(one.grad).clone() for one in engine.model.parameters() if one.grad is not None])

    engine.optimizer.register_step_pre_hook(keep_gradients)
    trainer = AsyncTrainer(engine, algorithm=ALGORITHMS[name], max_staleness=2)
    trained = [trainer.step(groups_at(step)).metrics for step in range(2)]
    weights = {name: tensor.clone() for name, tensor in engine.named_weights()}
    engine.close()
    if group is not None:
        group.close()
    return {"metrics": trained, "weights": weights, "gradients": gradients}


def of_the_policy(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if name.startswith(("actor/", "reward/"))}


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("context", [1, 2])
def test_two_ranks_take_the_steps_of_one(model_directory: Path, name: str, context: int) -> None:
    alone = steps(0, model_directory, "", 1, 1, name)
    store = serve_store()
    together = run_processes(steps, 2, model_directory, store_address(store), 2, context, name)
    first = of_the_policy(alone["metrics"][0])
    if name != "user":
        assert 0 < first["actor/rejected"] < 0.5
        assert ("actor/kl" in first) == (name == "sequences")
    for one in together:
        for metrics, wanted in zip(one["metrics"], alone["metrics"], strict=True):
            assert of_the_policy(metrics) == pytest.approx(of_the_policy(wanted), rel=1e-4, abs=1e-5)
        assert_near(one["gradients"], alone["gradients"])
    assert_near(together[0]["weights"], alone["weights"], share=1e-3)


class Whole(Objective):
    """An objective that hides its locality, so that gradients are computed after all scores."""

    token_local = False


def test_gradients_with_the_scores_are_those_computed_later(model_directory: Path) -> None:
    found = []
    for kind in (Objective, Whole):
        engine = engine_on(model_directory, None, learning_rate=1e-3)
        engine.scorer.chunk_logits = 5 * 16
        loss = kind(PolicyLoss(), Rejection("token_k1", 0.5, 1.5), entropy_coeff=0.1)
        metrics = [engine.train_batch(batch_of(groups_at(step)), loss=loss) for step in range(2)]
        found.append((metrics, dict(engine.named_weights())))
    assert found[0][0][1] == pytest.approx(found[1][0][1], rel=1e-4, abs=1e-5)
    assert_near(found[0][1], found[1][1], share=1e-3)


def test_the_entropy_bonus_raises_the_entropy(model_directory: Path) -> None:
    entropies = []
    for coefficient in (0.0, 10.0):
        engine = engine_on(model_directory, None)
        loss = Objective(PolicyLoss(), entropy_coeff=coefficient)
        metrics = [without_padding(engine.train_batch(batch_of(groups_of(4, seed=0)), loss=loss)) for _ in range(6)]
        entropies.append([one["entropy"] for one in metrics])
    assert entropies[0][0] == entropies[1][0], "the coefficient alone differs"
    assert entropies[1][-1] > entropies[0][-1]


def test_a_step_of_truncated_rows_only_changes_nothing(model_directory: Path) -> None:
    engine = engine_on(model_directory, None)
    before = {name: tensor.clone() for name, tensor in engine.named_weights()}
    algorithm = Algorithm(PolicyLoss(), overlong=Overlong(masks_truncated=True), aggregation="seq-mean-token-mean")
    trainer = AsyncTrainer(engine, algorithm=algorithm, max_staleness=0)
    groups = [replace(group, truncated=np.ones(group.size, dtype=np.bool_)) for group in groups_of(2, seed=0)]
    metrics = trainer.step(groups).metrics
    assert metrics["actor/grad_norm"] == 0 and metrics["actor/loss"] == 0
    torch.testing.assert_close(dict(engine.named_weights()), before)


def weighted_by_entropy(inputs: LossInputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """A user's loss that reads the entropy as a constant."""
    return -inputs.advantages * inputs.entropy * inputs.logprobs, {}


def test_a_token_local_loss_reads_the_same_entropy_as_one_of_whole_rows(model_directory: Path) -> None:
    trained = []
    for token_local in (False, True):
        engine = engine_on(model_directory, None)
        engine.train_batch(batch_of(groups_at(0)), loss=UserLoss(weighted_by_entropy, token_local=token_local))
        trained.append(dict(engine.named_weights()))
    assert_near(trained[1], trained[0], share=1e-3)


def test_groups_whose_turns_have_different_rewards_count_as_such(model_directory: Path) -> None:
    trainer = AsyncTrainer(engine_on(model_directory, None), algorithm=Algorithm(PolicyLoss()), max_staleness=0)
    equal = [replace(group, rewards=np.full(group.size, 0.1, np.float32)) for group in groups_of(2, seed=0)]
    of_turns = replace(equal[1], token_rewards=np.arange(len(equal[1].token_ids), dtype=np.float32))
    assert trainer.step([equal[0], of_turns]).metrics["groups/zero_variance_ratio"] == 0.5
