"""The FSDP2 engine on one and on two real ranks: the same steps, the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hwrl
from hwrl.comm import Comm, connect_store, serve_store, store_address
from hwrl.errors import DataError
from hwrl.rollout.groups import PromptGroup, Response
from hwrl.run.demo import write_demo
from hwrl.testing.processes import run_processes
from hwrl.train.batch import Batch, collate
from hwrl.train.fsdp import FsdpEngine
from hwrl.train.losses import PolicyLoss, group_advantages


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("demo")
    write_demo(directory, seed=3, prompts=16)
    return directory / "model"


def groups_of(count: int, *, seed: int) -> list[PromptGroup]:
    rng = np.random.default_rng(seed)
    groups = []
    for number in range(count):
        responses = []
        for _ in range(4):
            length = int(rng.integers(1, 7))
            responses.append(
                Response(
                    rng.integers(3, 13, size=length).astype(np.int32),
                    np.full(length, -2.7, dtype=np.float32),
                    np.zeros(length, dtype=np.int32),
                    truncated=False,
                )
            )
        groups.append(
            PromptGroup.join(
                responses,
                sequence_number=number,
                lease_id=number,
                prompt_ids=rng.integers(3, 13, size=int(rng.integers(2, 6))).astype(np.int32),
                rewards=rng.random(4).tolist(),
                metrics={},
            )
        )
    return groups


def batch_of(groups: list[PromptGroup]) -> Batch:
    return collate(groups, advantages=group_advantages(groups, estimator="grpo"))


def engine_on(model_directory: Path, group: Any, *, micro_batch_tokens: int = 64) -> FsdpEngine:
    return FsdpEngine(
        model_directory,
        backend=hwrl.get_backend(),
        group=group,
        learning_rate=1e-2,
        total_steps=10,
        warmup_steps=2,
        min_learning_rate_ratio=0.1,
        micro_batch_tokens=micro_batch_tokens,
    )


def train(rank: int, model_directory: Path, address: str, ranks: int, steps: int) -> dict[str, Any]:
    """Take ``steps`` steps on this rank's share of each batch; return figures, weights, log-probabilities."""
    group = None
    if ranks > 1:
        group = Comm().init_default(store=connect_store(address), rank=rank, size=ranks)
    engine = engine_on(model_directory, group)
    figures = []
    for step in range(steps):
        share = groups_of(5, seed=step)[rank::ranks]  # uneven: one rank has more parts than the other
        figures.append(engine.train_batch(batch_of(share), loss=PolicyLoss("ppo_clip")))
    weights = {name: tensor.clone() for name, tensor in engine.named_weights()}
    logprobs = engine.logprobs(batch_of(groups_of(3, seed=99)))
    if group is not None:
        group.close()
    return {"figures": figures, "weights": weights, "logprobs": logprobs}


def test_two_ranks_take_the_same_steps_as_one(model_directory: Path) -> None:
    alone = train(0, model_directory, "", 1, 4)
    store = serve_store()
    pair = run_processes(train, 2, model_directory, store_address(store), 2, 4)
    for one in pair:
        assert one["weights"].keys() == alone["weights"].keys()
        for name, tensor in alone["weights"].items():
            torch.testing.assert_close(one["weights"][name], tensor, atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(one["logprobs"], alone["logprobs"], atol=2e-4, rtol=1e-4)
        for figures, wanted in zip(one["figures"], alone["figures"], strict=True):
            assert figures == pytest.approx(wanted, rel=2e-3, abs=1e-5)


def test_the_step_does_not_depend_on_how_it_is_cut_into_parts(model_directory: Path) -> None:
    whole, parts = (engine_on(model_directory, None, micro_batch_tokens=tokens) for tokens in (10_000, 16))
    batch = batch_of(groups_of(5, seed=0))
    first, second = (engine.train_batch(batch, loss=PolicyLoss("tis")) for engine in (whole, parts))
    assert first == pytest.approx(second, rel=1e-4)
    for (_, one), (_, other) in zip(whole.named_weights(), parts.named_weights(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def test_state_goes_on_where_it_was_saved(model_directory: Path) -> None:
    straight, before, after = (engine_on(model_directory, None) for _ in range(3))
    batches = [batch_of(groups_of(4, seed=seed)) for seed in range(4)]
    for batch in batches:
        straight.train_batch(batch, loss=PolicyLoss())
    for batch in batches[:2]:
        before.train_batch(batch, loss=PolicyLoss())
    after.load_state_dict(before.state_dict())
    for batch in batches[2:]:
        after.train_batch(batch, loss=PolicyLoss())
    assert after.scheduler.get_last_lr() == straight.scheduler.get_last_lr()
    for (_, one), (_, other) in zip(straight.named_weights(), after.named_weights(), strict=True):
        assert torch.equal(one, other)


def test_the_exported_model_is_what_transformers_loads(model_directory: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    engine = engine_on(model_directory, None)
    engine.train_batch(batch_of(groups_of(4, seed=0)), loss=PolicyLoss())
    engine.export(tmp_path / "model")
    loaded = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "model").named_parameters())
    assert all(torch.equal(loaded[name], tensor) for name, tensor in engine.named_weights())
    assert AutoTokenizer.from_pretrained(tmp_path / "model")("12>")["input_ids"] == [2, 4, 5, 13]


def test_a_directory_without_a_model_is_said(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no model"):
        engine_on(tmp_path, None)
