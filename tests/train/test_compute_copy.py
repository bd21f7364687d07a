"""The copy that computes in bfloat16: equal to the cast masters, float32 gradients, no memory while offloaded."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from hwrl.errors import MemoryStateError
from hwrl.interfaces import LoraSettings
from hwrl.train import FsdpEngine, PolicyLoss
from hwrl.train.compute_copy import ComputeCopy
from tests.support.fsdp_training import batch_of, engine_on, groups_of
from tests.support.tiny_model import tiny_model

BATCH = batch_of(groups_of(4, seed=0))


def in_bfloat16(model_directory: Path, **changes: object) -> FsdpEngine:
    return engine_on(model_directory, None, dtype=torch.bfloat16, **changes)


def assert_cast(engine: FsdpEngine) -> None:
    """Require the computing model, and the published weights, to be the cast masters."""
    computing = dict(engine.compute_model.named_parameters())
    published = dict(engine.named_weights())
    for name, master in engine.model.named_parameters():
        assert master.dtype == torch.float32
        assert torch.equal(computing[name], master.to(torch.bfloat16)), name
        assert torch.equal(published[name], computing[name]), name


def copied_nbytes() -> int:
    """Return the bytes of all parameters of this process in bfloat16, so those of its copies."""
    gc.collect()
    parameters = (one for one in gc.get_objects() if isinstance(one, torch.nn.Parameter))
    return sum(one.untyped_storage().nbytes() for one in parameters if one.dtype == torch.bfloat16)


def test_the_copy_is_the_cast_masters_after_an_update_a_restored_state_and_an_offload(model_directory: Path) -> None:
    engine = in_bfloat16(model_directory, param_offload=True, optimizer_offload=True)
    other = in_bfloat16(model_directory)
    with engine.on_device(optimizer=True):
        before = dict(engine.named_weights())["lm_head.weight"].clone()
        engine.train_batch(BATCH, loss=PolicyLoss())
        assert_cast(engine)
        assert not torch.equal(before, dict(engine.named_weights())["lm_head.weight"])
        assert_cast(other)
        other.load_state_dict(engine.state_dict())
    assert_cast(other)
    with engine.on_device(optimizer=False):
        assert_cast(engine)
        for (name, one), (_, copied) in zip(engine.named_weights(), other.named_weights(), strict=True):
            assert torch.equal(one, copied), name


def test_the_copy_holds_no_memory_and_refuses_to_run_while_the_masters_are_offloaded(model_directory: Path) -> None:
    others = copied_nbytes()
    engine = in_bfloat16(model_directory, param_offload=True)
    assert copied_nbytes() == others
    with engine.on_device(optimizer=True):
        engine.train_batch(BATCH, loss=PolicyLoss())
        with engine.on_device(optimizer=False):
            pass
        engine.logprobs(BATCH)
        assert copied_nbytes() - others == sum(2 * one.numel() for one in engine.model.parameters())
    assert copied_nbytes() == others
    with pytest.raises(MemoryStateError, match="offloaded"):
        engine.logprobs(BATCH)


def test_offloaded_weights_can_be_described(model_directory: Path) -> None:
    engine = in_bfloat16(model_directory, param_offload=True)
    described = dict(engine.weights_metadata())
    with engine.on_device(optimizer=False):
        weights = dict(engine.named_weights())
    assert {name: (each.shape, each.dtype) for name, each in described.items()} == {
        name: (each.shape, each.dtype) for name, each in weights.items()
    }


def test_published_weights_share_the_copys_memory(model_directory: Path) -> None:
    engine = in_bfloat16(model_directory)
    own = {one.data_ptr() for one in engine.compute_model.parameters()}
    assert {tensor.data_ptr() for _, tensor in engine.named_weights()} == own


def test_a_model_in_float32_has_no_copy(model_directory: Path) -> None:
    engine = engine_on(model_directory, None)
    assert engine.compute_model is engine.model


@pytest.mark.parametrize("tied", [False, True])
def test_gradients_of_many_passes_add_up_in_float32(tied: bool) -> None:
    masters = tiny_model(tied=tied).eval()
    copied = ComputeCopy(masters, dtype=torch.bfloat16)
    alone = tiny_model(tied=tied).eval()
    for parameter in alone.parameters():  # not the buffers
        parameter.data = parameter.data.to(torch.bfloat16)
    wanted = {name: torch.zeros(one.shape) for name, one in masters.named_parameters()}
    for number in range(20):
        tokens = torch.randint(2, 16, (2, 9), generator=torch.Generator().manual_seed(number))
        for model in (copied.model, alone):
            model(tokens).logits.float().log_softmax(-1)[..., 3].sum().backward()
        for name, one in alone.named_parameters():
            wanted[name] += one.grad.float()
            one.grad = None
    for name, master in masters.named_parameters():
        assert torch.equal(master.grad, wanted[name]), name
        assert dict(copied.model.named_parameters())[name].grad is None


def test_ties_and_buffers_are_those_of_the_masters() -> None:
    masters = tiny_model(tied=True)
    copied = ComputeCopy(masters, dtype=torch.bfloat16).model
    assert copied.get_output_embeddings().weight is copied.get_input_embeddings().weight
    for (name, one), (_, shared) in zip(masters.named_buffers(), copied.named_buffers(), strict=True):
        assert one is shared and one.dtype == torch.float32, name


def test_an_adapter_trains_on_a_frozen_model_that_exists_once_in_bfloat16(model_directory: Path) -> None:
    engine = in_bfloat16(model_directory, lora=LoraSettings(rank=4, alpha=8.0))
    before = {name: tensor.clone() for name, tensor in engine.named_weights()}
    adapter = {name: tensor.clone() for name, tensor in engine.named_adapter()}
    engine.train_batch(BATCH, loss=PolicyLoss())
    engine.train_batch(BATCH, loss=PolicyLoss())
    masters, computing = dict(engine.model.named_parameters()), dict(engine.compute_model.named_parameters())
    for name, one in masters.items():
        assert one.requires_grad == (one is not computing[name]) == (one.dtype == torch.float32), name
        assert one.grad is None and computing[name].grad is None
    assert all(torch.equal(before[name], tensor) for name, tensor in engine.named_weights())
    assert all(not torch.equal(adapter[name], tensor) for name, tensor in engine.named_adapter())
