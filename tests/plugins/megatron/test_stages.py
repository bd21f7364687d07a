"""The Megatron engine with pipeline stages and with experts on several ranks, beside one rank of the FSDP2 engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3MoeConfig

import hwrl
from hwrl.checkpoint import CheckpointManager
from hwrl.comm import Comm, connect_store, serve_store, store_address
from hwrl.interfaces import TrainEngine
from hwrl.testing.processes import run_processes
from hwrl.train import FsdpEngine, PolicyLoss
from tests.support.fsdp_training import without_padding
from tests.support.megatron_batches import batch_of, settings_in
from tests.support.megatron_models import EXPERTS, SIZES, to_another_format, with_saved_names, write_model

MODELS = {
    "tied": Qwen3Config(**{**SIZES, "num_hidden_layers": 4}, tie_word_embeddings=True, pad_token_id=7),
    "experts": Qwen3MoeConfig(**SIZES, **EXPERTS, norm_topk_prob=True),
}
SCHEDULES = {
    "tied": [{"tensor_parallel": 2, "pipeline_parallel": 2}, {"pipeline_parallel": 4}, {"pipeline_parallel": 2}],
    "experts": [
        {"pipeline_parallel": 2, "expert_parallel": 2},
        {"tensor_parallel": 2, "expert_parallel": 2},
        {"tensor_parallel": 2, "pipeline_parallel": 2},
    ],
}
"""The layouts that go on from each other's checkpoints; each takes two steps."""


def steps(engine: TrainEngine, directory: Path, first: int, group: Any) -> dict[str, Any]:
    """Go on from the last checkpoint of ``directory``, take two steps and save."""
    share = slice(engine.data_parallel_rank, None, engine.data_parallel_size)
    with CheckpointManager(directory / "checkpoints", group=group, timeout_s=600) as manager:
        state = engine.state_dict()
        if manager.resume(state) is not None:
            engine.load_state_dict(state)
        before = engine.logprobs(batch_of(slice(None), seed=98))
        loss = PolicyLoss("tis")
        metrics = [engine.train_batch(batch_of(share, seed=step), loss=loss) for step in range(first, first + 2)]
        manager.save(first + 2, engine.state_dict())
    weights = {name: tensor.clone() for name, tensor in engine.named_weights()}
    described = [(name, tuple(tensor.shape)) for name, tensor in engine.weights_metadata()]
    assert not weights or described == [(name, tuple(tensor.shape)) for name, tensor in weights.items()]
    return {"logprobs": before, "metrics": metrics, "weights": weights}


def run_layouts(rank: int, root: Path, address: str) -> dict[str, list[dict[str, Any]]]:
    """Run all schedules on one of four ranks: starting processes takes longer than the steps."""
    from hwrl_megatron import hwrl_train_engine

    group = Comm().init_default(store=connect_store(address), rank=rank, size=4)
    found: dict[str, list[dict[str, Any]]] = {model: [] for model in SCHEDULES}
    for model, layouts in SCHEDULES.items():
        for number, options in enumerate(layouts):
            engine = hwrl_train_engine(
                settings=settings_in(root / model, param_offload=True, optimizer_offload=True),
                options=options,
                backend=hwrl.get_backend(),
                group=group,
            )
            with engine.on_device(optimizer=True):
                found[model].append(steps(engine, root / model, 2 * number, group))
            engine.close()
    group.close()
    return found


def assert_same(found: list[dict[str, Any]], expected: dict[str, Any], directory: Path, *, atol: float) -> None:
    """Raise unless each rank of ``found`` computed what one rank of the other engine did; the first has the weights."""
    for one in found:
        torch.testing.assert_close(one["logprobs"], expected["logprobs"], atol=atol, rtol=1e-5)
        for mine, theirs in zip(one["metrics"], expected["metrics"], strict=True):
            assert without_padding(mine) == pytest.approx(without_padding(theirs), rel=2e-4, abs=1e-5)
    assert [bool(one["weights"]) for one in found] == [True, False, False, False]
    for name, tensor in with_saved_names(directory, expected["weights"]).items():
        # Not element by element: where a gradient is nearly zero AdamW makes a step of its last bits.
        assert (found[0]["weights"][name] - tensor).norm() <= 1e-3 * tensor.norm(), name


def test_every_layout_takes_the_steps_of_one_rank_and_goes_on_from_anothers_checkpoint(tmp_path: Path) -> None:
    wanted: dict[str, list[dict[str, Any]]] = {}
    for model, layouts in SCHEDULES.items():
        divided = write_model(tmp_path / "divided" / model, MODELS[model])
        if model == "tied":
            to_another_format(divided)  # so that one rank reads it for all
        straight = tmp_path / "straight" / model
        write_model(straight, MODELS[model])
        engine = FsdpEngine(settings_in(straight), backend=hwrl.get_backend(), group=None)
        wanted[model] = [steps(engine, straight, 2 * number, None) for number in range(len(layouts))]
    store = serve_store()
    ranks = run_processes(run_layouts, 4, tmp_path / "divided", store_address(store), timeout_s=3000)
    for model, expected in wanted.items():
        for number, one in enumerate(expected):
            found = [rank[model][number] for rank in ranks]
            assert_same(found, one, tmp_path / "straight" / model / "model", atol=1e-5 if number == 0 else 1e-3)
