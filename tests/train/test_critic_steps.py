"""The trainer with a critic: token rewards, steps of both engines, one checkpoint, and learning."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hwrl
from hwrl.checkpoint import CheckpointManager
from hwrl.comm import serve_store, store_address
from hwrl.interfaces import PromptGroup, Response, Segment, Trajectory
from hwrl.testing.processes import run_processes
from hwrl.train import Algorithm, AsyncTrainer, CriticEngine, Engines, FsdpEngine, PolicyLoss
from hwrl.train.batches import token_rewards
from tests.support.fsdp_training import batch_of, full, groups_of, join, settings_on
from tests.support.near import assert_near
from tests.support.single_turns import join_responses

OFFLOADED = {"param_offload": True, "optimizer_offload": True}


def engines_on(model_directory: Path, group: Any = None, **changes: Any) -> Engines:
    settings = settings_on(model_directory, warmup_steps=0, learning_rate=3e-3, total_steps=1000, **changes)
    backend = hwrl.get_backend()
    critic = CriticEngine(settings, backend=backend, group=group, lam=0.95)
    return Engines(FsdpEngine(settings, backend=backend, group=group), critic)


def trainer_of(engines: Engines, **algorithm: Any) -> AsyncTrainer:
    return AsyncTrainer(
        engines.policy,
        critic=engines.critic,
        algorithm=Algorithm(PolicyLoss(), "gae", **algorithm),
        max_staleness=10_000,
    )


def step(trainer: AsyncTrainer, groups: list[PromptGroup]) -> dict[str, float]:
    with trainer.stepping():
        trained = trainer.step(groups)
    return {**trained.metrics, **trainer.train_critic()}


def model_of(engines: Engines) -> Any:
    assert isinstance(engines.policy, FsdpEngine)
    return engines.policy.model


def weights_of(engines: Engines) -> dict[str, torch.Tensor]:
    assert engines.critic is not None
    with engines.on_device():
        both = {"policy": model_of(engines), "critic": engines.critic.model}
        return {
            f"{who} {name}": full(one.detach()).clone()
            for who, model in both.items()
            for name, one in model.named_parameters()
        }


def test_a_trajectorys_reward_is_at_its_last_token_and_adds_to_those_of_tokens() -> None:
    def ids(*tokens: int) -> Any:
        return np.array(tokens, dtype=np.int32)

    def turn(*tokens: int, reward: float | None = None) -> Segment:
        count = len(tokens)
        response = Response(ids(*tokens), np.zeros(count, np.float32), np.zeros(count, np.int32), truncated=False)
        return Segment.of_response(response, reward=reward)

    rows = [
        Trajectory(
            (Segment(ids(2, 3)), turn(4, 5, reward=0.25), Segment(ids(6)), turn(7, reward=0.5), Segment(ids(8)))
        ),
        Trajectory((Segment(ids(2, 3)), turn(9, 10))),
    ]
    places: dict[str, Any] = {"sequence_number": 0, "lease_id": 0, "incarnation": 0, "metrics": {}}
    group = PromptGroup.of_samples([[row] for row in rows], rewards=[1.0, -1.0], **places)
    single = groups_of(1, seed=0)[0]
    found = token_rewards([group, single])
    assert found[:6].tolist() == [0.0, 0.25, 0.0, 1.5, 0.0, -1.0]
    assert found[6:].sum().item() == pytest.approx(single.rewards.sum())


def take(rank: int, model_directory: Path, address: str, ranks: int, changes: dict[str, Any]) -> dict[str, Any]:
    group = join(rank, address, ranks)
    engines = engines_on(model_directory, group, **changes)
    trainer = trainer_of(engines, ppo_epochs=2, mini_batches=2)
    metrics = [step(trainer, groups_of(5, seed=seed)) for seed in range(2)]
    found = {"metrics": metrics, "weights": weights_of(engines)}
    engines.close()
    if group is not None:
        group.close()
    return found


@pytest.mark.parametrize("changes", [{}, OFFLOADED], ids=["resident", "offloaded"])
def test_two_ranks_take_the_steps_of_one(model_directory: Path, changes: dict[str, Any]) -> None:
    (alone,) = run_processes(take, 1, model_directory, "", 1, changes)
    store = serve_store()
    pair = run_processes(take, 2, model_directory, store_address(store), 2, changes)
    assert {"critic/loss", "critic/explained_variance", "critic/grad_norm", "actor/loss"} <= alone["metrics"][0].keys()
    for one in pair:
        for mine, wanted in zip(one["metrics"], alone["metrics"], strict=True):
            same = [name for name in wanted if name.startswith(("actor/", "critic/")) and "padding" not in name]
            assert {name: mine[name] for name in same} == pytest.approx(
                {name: wanted[name] for name in same}, rel=2e-3, abs=1e-5
            )
        assert_near(one["weights"], alone["weights"], share=1e-3)


@pytest.mark.parametrize("changes", [{}, OFFLOADED], ids=["resident", "offloaded"])
def test_a_checkpoint_has_policy_and_critic_of_one_step(
    model_directory: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    straight = engines_on(model_directory, **changes)
    trainer = trainer_of(straight)
    step(trainer, groups_of(5, seed=0))
    with CheckpointManager(tmp_path, async_save=True) as manager:
        with straight.saved_state() as (state, offloader):
            report = manager.save(1, state, offloader=offloader)
        step(trainer, groups_of(5, seed=1))
        manager.wait()
        resumed = engines_on(model_directory)
        state = resumed.state_dict()
        assert manager.resume(state) is not None
    assert (report.lent_nbytes > 8 * 100_800) == bool(changes)
    resumed.load_state_dict(state)
    step(trainer_of(resumed), groups_of(5, seed=1))
    wanted = weights_of(straight)
    assert all(torch.equal(one, wanted[name]) for name, one in weights_of(resumed).items())


def test_while_the_critic_warms_up_the_policy_stays(model_directory: Path) -> None:
    engines = engines_on(model_directory)
    trainer = trainer_of(engines, critic_warmup=1)
    before = weights_of(engines)
    metrics = [step(trainer, groups_of(5, seed=0)), step(trainer, groups_of(5, seed=1))]
    assert "actor/loss" not in metrics[0] and "critic/loss" in metrics[0] and "actor/loss" in metrics[1]
    first = engines_on(model_directory)
    step(trainer_of(first, critic_warmup=1), groups_of(5, seed=0))
    moved = {name.split()[0] for name, one in weights_of(first).items() if not torch.equal(one, before[name])}
    assert moved == {"critic"}


def test_rewards_lose_the_divergence_from_the_reference(model_directory: Path) -> None:
    settings, backend = settings_on(model_directory), hwrl.get_backend()
    critic = CriticEngine(settings, backend=backend, group=None, kl_coeff=0.5)
    batch = batch_of(groups_of(3, seed=0))
    known = replace(batch, reference_logprobs=batch.behaviour_logprobs - 0.25 * batch.mask)
    estimated, metrics = critic.estimate(known, torch.zeros(batch.tokens.shape))
    assert metrics["reference_kl"] == pytest.approx(0.25)
    assert estimated.returns is not None  # with λ = 1 a return is the sum of the rewards from here on
    left = batch.mask.flip(1).cumsum(1).flip(1) * batch.mask
    assert_near(estimated.returns, -0.125 * left.float())


def rollout(engines: Engines, rng: np.random.Generator, *, version: int) -> list[PromptGroup]:
    """Let the policy answer prompts of one digit with two tokens each: the digit, and then the next one, is right."""
    model = model_of(engines)
    digits = torch.from_numpy(rng.integers(3, 9, size=128))
    tokens = torch.stack([torch.full((128,), 2), digits, torch.full((128,), 13)], 1)
    chosen = []
    for _ in range(2):
        with torch.no_grad():
            scores = model(tokens).logits[:, -1].log_softmax(-1)
        tokens = torch.cat([tokens, torch.multinomial(scores.exp(), 1)], 1)
        chosen.append(scores.gather(1, tokens[:, -1:]))
    logprobs, rewards = torch.cat(chosen, 1), (tokens[:, 3:] == torch.stack([digits, digits + 1], 1)).float().mean(1)
    groups = []
    for number, row in enumerate(tokens.int().numpy()):
        response = Response(row[3:], logprobs[number].numpy(), np.full(2, version, np.int32), truncated=False)
        places: dict[str, Any] = {"sequence_number": number, "lease_id": number, "incarnation": 0, "metrics": {}}
        groups.append(join_responses([response], prompt_ids=row[:3], rewards=[float(rewards[number])], **places))
    return groups


def test_ppo_learns_from_one_answer_a_prompt(model_directory: Path) -> None:
    torch.manual_seed(0)
    engines, rng = engines_on(model_directory, micro_batch_tokens=4096), np.random.default_rng(0)
    trainer = trainer_of(engines, ppo_epochs=2)
    rewards = [step(trainer, rollout(engines, rng, version=trainer.version))["reward/mean"] for _ in range(35)]
    assert sum(rewards[:3]) / 3 < 0.2
    assert sum(rewards[-4:]) / 4 > 0.6
