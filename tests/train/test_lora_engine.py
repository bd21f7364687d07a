"""The FSDP2 engine with an adapter: the base never changes, two ranks equal one, PEFT loads what it exports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hwrl.checkpoint import CheckpointManager
from hwrl.comm import serve_store, store_address
from hwrl.interfaces import Batch, LoraSettings
from hwrl.models import load_model, model_identity
from hwrl.testing.processes import run_processes
from hwrl.train import FsdpEngine, PolicyLoss
from tests.support.fsdp_training import batch_of, engine_on, groups_of, join, without_padding
from tests.support.near import assert_near

LORA = LoraSettings(rank=4, alpha=8.0)


def take_steps(engine: FsdpEngine, first: int, count: int) -> list[dict[str, float]]:
    """Train on this rank's shares of the batches ``first`` …"""
    shares = slice(engine.data_parallel_rank, None, engine.data_parallel_size)
    return [
        engine.train_batch(batch_of(groups_of(4, seed=number)[shares]), loss=PolicyLoss())
        for number in range(first, first + count)
    ]


def train(rank: int, model_directory: Path, address: str, ranks: int) -> dict[str, Any]:
    group = join(rank, address, ranks)
    engine = engine_on(model_directory, group, lora=LORA, param_offload=True, optimizer_offload=True)
    with engine.on_device(optimizer=True):
        metrics = take_steps(engine, 0, 3)
        result: dict[str, Any] = {
            "metrics": metrics,
            "base": {name: tensor.clone() for name, tensor in engine.named_weights()},
            "adapter": {name: tensor.clone() for name, tensor in engine.named_adapter()},
        }
    described = {name: tuple(tensor.shape) for name, tensor in engine.adapter_metadata()}
    assert rank or described == {name: tuple(tensor.shape) for name, tensor in result["adapter"].items()}
    engine.close()
    if group is not None:
        group.close()
    return result


def test_two_ranks_train_the_adapter_of_one_and_neither_touches_the_base(model_directory: Path) -> None:
    (one,) = run_processes(train, 1, model_directory, "", 1)
    store = serve_store()
    two = run_processes(train, 2, model_directory, store_address(store), 2)
    assert not two[1]["adapter"] and not two[1]["base"]
    for mine, theirs in zip(one["metrics"], two[0]["metrics"], strict=True):
        assert without_padding(mine) == pytest.approx(without_padding(theirs), rel=1e-3, abs=1e-5)
    assert_near(two[0]["adapter"], one["adapter"], share=1e-3)
    begun = dict(engine_on(model_directory, None, lora=LORA).named_adapter())
    assert all(not torch.equal(one["adapter"][name], begun[name]) for name in begun)
    original = load_model(model_directory, dtype=torch.float32).state_dict()
    for base in (one["base"], two[0]["base"]):
        assert base.keys() == original.keys()
        assert all(torch.equal(base[name], original[name]) for name in base)


def whole(batch: Batch, model: Any) -> torch.Tensor:
    """Return the log-probability of each token that the mask shows, by one forward pass of ``model``."""
    with torch.no_grad():
        logprobs = model(input_ids=batch.tokens[:, :-1]).logits.log_softmax(-1)
    chosen = logprobs.gather(2, batch.tokens[:, 1:, None])[..., 0]
    return torch.cat([torch.zeros(batch.rows, 1), chosen], 1) * batch.mask


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # PEFT asks transformers for it
def test_the_exported_adapter_is_what_peft_loads(model_directory: Path, tmp_path: Path) -> None:
    from peft import PeftModel

    engine = engine_on(model_directory, None, lora=LORA)
    take_steps(engine, 0, 3)
    engine.export(tmp_path)
    model = PeftModel.from_pretrained(load_model(model_directory, dtype=torch.float32), str(tmp_path)).eval()
    batch = batch_of(groups_of(4, seed=9))
    torch.testing.assert_close(engine.logprobs(batch), whole(batch, model))
    assert not (tmp_path / "model.safetensors").exists(), "the base is not exported"


def test_a_checkpoint_holds_the_adapter_alone_and_training_goes_on_as_if_never_ended(
    model_directory: Path, tmp_path: Path
) -> None:
    engine = engine_on(model_directory, None, lora=LORA)
    take_steps(engine, 0, 2)
    with CheckpointManager(tmp_path) as manager:
        with engine.saved_state() as (state, _):
            manager.save(2, state, weight_version=2)
        expected = take_steps(engine, 2, 2)
        again = engine_on(model_directory, None, lora=LORA, seed=99)
        state = again.state_dict()
        adapter_nbytes = sum(tensor.nbytes for tensor in state["model"].values())
        assert adapter_nbytes == sum(tensor.nbytes for _, tensor in engine.named_adapter())
        assert manager.resume(state) is not None
        again.load_state_dict(state)
    assert take_steps(again, 2, 2) == expected


def test_the_identity_of_a_base_is_that_of_its_weights(model_directory: Path, tmp_path: Path) -> None:
    model = load_model(model_directory, dtype=torch.float32)
    model.save_pretrained(tmp_path / "same")
    with torch.no_grad():
        model.model.norm.weight[3] += 1e-3
    model.save_pretrained(tmp_path / "other")
    assert model_identity(tmp_path / "same") == model_identity(tmp_path / "same")
    assert model_identity(tmp_path / "same") != model_identity(tmp_path / "other")
    assert engine_on(model_directory, None, lora=LORA).base == model_identity(model_directory)
    assert engine_on(model_directory, None).base is None
