"""The critic: values from hidden states, PPO's loss by hand, two ranks equal one, and it goes on where it was saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import hwrl
from hwrl.checkpoint import CheckpointManager
from hwrl.comm import serve_store, store_address
from hwrl.interfaces import Batch, LoraSettings
from hwrl.models import load_model
from hwrl.testing.processes import run_processes
from hwrl.train import CriticEngine, ValueLoss
from tests.support.fsdp_training import batch_of, full, groups_of, join, settings_on, without_padding
from tests.support.near import assert_near

LORA = LoraSettings(rank=4, alpha=8.0)


def critic_on(model_directory: Path, group: Any = None, **changes: Any) -> CriticEngine:
    settings = settings_on(model_directory, **changes)
    return CriticEngine(settings, backend=hwrl.get_backend(), group=group, gamma=0.99, lam=0.95)


def rewards_of(batch: Batch) -> torch.Tensor:
    """Return rewards for each row's last token, larger for a larger first digit of its prompt."""
    rewards = torch.zeros(batch.tokens.shape)
    rewards[torch.arange(batch.rows), batch.lengths() - 1] = (batch.tokens[:, 0] - 3) / 10
    return rewards


def take_steps(critic: CriticEngine, first: int, count: int, *, groups: int = 5) -> list[dict[str, float]]:
    """Estimate and fit this rank's shares of the batches ``first`` …"""
    shares = slice(critic.data_parallel_rank, None, critic.data_parallel_size)
    metrics = []
    for number in range(first, first + count):
        batch = batch_of(groups_of(groups, seed=number)[shares])
        batch, found = critic.estimate(batch, rewards_of(batch))
        with critic.on_device(optimizer=True):
            metrics.append(found | critic.fit(batch))
    return metrics


def weights_of(critic: CriticEngine) -> dict[str, torch.Tensor]:
    return {name: full(one.detach()).clone() for name, one in critic.model.named_parameters()}


def test_values_are_products_of_the_states_before_the_tokens(model_directory: Path) -> None:
    critic, batch = critic_on(model_directory), batch_of(groups_of(5, seed=0))
    plain = load_model(model_directory, dtype=torch.float32).eval()
    with torch.no_grad():
        states = plain.model(batch.tokens).last_hidden_state
        wanted = states @ critic.model.lm_head.value_weight
    shifted = torch.cat([torch.zeros(batch.rows, 1), wanted[:, :-1]], 1) * batch.mask
    estimated, metrics = critic.estimate(batch, rewards_of(batch))
    assert estimated.values is not None and estimated.returns is not None
    assert_near(estimated.values, shifted)
    assert 0 < shifted[batch.mask].abs().mean() < 0.1
    whitened = estimated.advantages[batch.mask]
    assert whitened.mean().item() == pytest.approx(0, abs=1e-5)
    assert whitened.std(correction=0).item() == pytest.approx(1, rel=1e-4)
    returns, values = estimated.returns[batch.mask], estimated.values[batch.mask]
    explained = 1 - (returns - values).var(correction=0) / returns.var(correction=0)
    assert metrics["explained_variance"] == pytest.approx(explained.item(), rel=1e-3, abs=1e-5)
    assert metrics["return_mean"] == pytest.approx(returns.mean().item(), rel=1e-5)


def test_the_loss_is_the_larger_of_the_plain_and_the_clipped_error() -> None:
    values = torch.tensor([0.1, 0.5, 0.5, -0.5], requires_grad=True)
    before, returns = torch.zeros(4), torch.tensor([1.0, 1.0, 0.0, 0.2])
    loss, metrics = ValueLoss(0.2)(values, before=before, returns=returns)
    # Inside the clip range: ½·0.9². Too far towards the return: ½·0.8² of the clipped value. Away: ½·0.5² and ½·0.7².
    assert loss.tolist() == pytest.approx([0.405, 0.32, 0.125, 0.245])
    assert metrics["clipped"].tolist() == [False, True, False, False]
    loss.sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == pytest.approx([-0.9, 0.0, 0.5, -0.7])


@pytest.mark.parametrize("changes", [{"learning_rate": 3e-3}, {"lora": LORA}], ids=["whole", "adapter"])
def test_the_critic_learns_what_states_tell_about_the_return(model_directory: Path, changes: dict[str, Any]) -> None:
    critic = critic_on(model_directory, warmup_steps=0, total_steps=1000, micro_batch_tokens=4096, **changes)
    metrics = take_steps(critic, 0, 42, groups=16)
    assert metrics[0]["explained_variance"] < 0.1
    assert sum(step["explained_variance"] for step in metrics[-6:]) / 6 > 0.6
    assert metrics[-1]["loss"] < metrics[0]["loss"] / 4


def on_ranks(rank: int, model_directory: Path, address: str, ranks: int, changes: dict[str, Any]) -> dict[str, Any]:
    group = join(rank, address, ranks)
    critic = critic_on(model_directory, group, **changes)
    metrics = take_steps(critic, 0, 3)
    with critic.on_device(optimizer=False):
        weights = weights_of(critic)
    critic.close()
    if group is not None:
        group.close()
    return {"metrics": metrics, "weights": weights}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"param_offload": True, "optimizer_offload": True, "lora": LORA},
        {"context_parallel": 2},
        pytest.param({"host_step": True}, marks=pytest.mark.extended),
    ],
    ids=["whole", "adapter", "shared packs", "host"],
)
def test_two_ranks_train_the_critic_of_one(model_directory: Path, changes: dict[str, Any]) -> None:
    (alone,) = run_processes(on_ranks, 1, model_directory, "", 1, changes | {"context_parallel": 1})
    store = serve_store()
    pair = run_processes(on_ranks, 2, model_directory, store_address(store), 2, changes)
    for one in pair:
        for mine, wanted in zip(one["metrics"], alone["metrics"], strict=True):
            assert without_padding(mine) == pytest.approx(without_padding(wanted), rel=1e-3, abs=1e-5)
        assert_near(one["weights"], alone["weights"], share=1e-3)


def test_the_critic_goes_on_where_it_was_saved(model_directory: Path, tmp_path: Path) -> None:
    straight = critic_on(model_directory)
    take_steps(straight, 0, 2)
    with CheckpointManager(tmp_path) as manager:
        with straight.saved_state() as (state, offloader):
            manager.save(2, state, offloader=offloader)
        resumed = critic_on(model_directory)
        state = resumed.state_dict()
        assert manager.resume(state) is not None
    resumed.load_state_dict(state)
    assert take_steps(straight, 2, 2) == take_steps(resumed, 2, 2)
    wanted = weights_of(straight)
    assert all(torch.equal(one, wanted[name]) for name, one in weights_of(resumed).items())


def test_a_critic_of_bfloat16_takes_the_steps_of_float32(model_directory: Path) -> None:
    exact, coarse = (
        take_steps(critic_on(model_directory, dtype=dtype), 0, 3) for dtype in (torch.float32, torch.bfloat16)
    )
    for one, other in zip(exact, coarse, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=0.05)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=0.1)
