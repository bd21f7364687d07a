"""Mixtures of experts in the FSDP2 engine: the same steps however they are computed, and each expert by its name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

import hwrl
from hwrl.comm import connect_store, serve_store, store_address
from hwrl.interfaces import LoraSettings
from hwrl.models import build_model
from hwrl.rollout import EmbeddedEngine
from hwrl.testing.processes import run_processes
from hwrl.train import PolicyLoss
from hwrl.weights import WeightLayout, WeightReceiver, WeightSender, WeightSource
from tests.support.fsdp_training import assert_same_training, batch_of, engine_on, full, groups_of, join, train
from tests.support.near import assert_near
from tests.support.packed_steps import assert_same_steps, steps_in_both_forms

EXPERT = "model.layers.1.mlp.experts.4.down_proj.weight"


def both_forms(rank: int, directory: Path, address: str, ranks: int, recomputes: bool) -> list[dict[str, Any]]:
    group = join(rank, address, ranks)
    engine = engine_on(directory, group, micro_batch_tokens=30, activation_checkpointing=recomputes)
    batch = batch_of(groups_of(5, seed=0)[rank::ranks])

    def gradients() -> list[torch.Tensor]:
        return [full(parameter.grad).clone() for parameter in engine.model.parameters() if parameter.grad is not None]

    try:
        return steps_in_both_forms(engine, batch, gradients, loss=PolicyLoss())
    finally:
        if group is not None:
            group.close()


@pytest.mark.parametrize(("ranks", "recomputes"), [(1, False), (1, True), (2, False)])
def test_packs_take_the_step_of_padded_rows(mixture_directory: Path, ranks: int, recomputes: bool) -> None:
    store = serve_store()
    found = run_processes(both_forms, ranks, mixture_directory, store_address(store), ranks, recomputes)
    for steps in found:
        assert_same_steps(steps)


def test_two_ranks_take_the_same_steps_as_one(mixture_directory: Path) -> None:
    alone = train(0, mixture_directory, "", 1, 3)
    store = serve_store()
    pair = run_processes(train, 2, mixture_directory, store_address(store), 2, 3)
    assert pair[0]["weights"].keys() == alone["weights"].keys()
    assert EXPERT in alone["weights"]
    for one in pair:
        assert_same_training({**one, "weights": pair[0]["weights"]}, alone)


def transfer(rank: int, directory: Path, address: str) -> Any:
    """Train on two ranks, and send the weights of each step; the third process receives them in an engine."""
    store = connect_store(address)
    if rank == 2:
        engine = EmbeddedEngine(build_model(directory, dtype=torch.float32), eos_ids=[], max_running=1, max_length=8)
        with WeightReceiver(store, replica="r0", backend=hwrl.get_backend()) as receiver:
            for version in (1, 2):
                engine.load_weights(receiver.receive(timeout_s=600.0).items(), version=version)
        return engine.model.state_dict()
    group = join(rank, address, 2)
    trainer = engine_on(directory, group)
    sender = WeightSender(store, group=group, backend=hwrl.get_backend(), bucket_nbytes=4096)
    weights = WeightSource(trainer.weights_metadata, trainer.named_weights)
    for version in (1, 2):
        trainer.train_batch(batch_of(groups_of(4, seed=version)[rank::2]), loss=PolicyLoss())
        sender.wait_for_receivers(1, timeout_s=600.0)
        sender.publish(version, weights)
    state = {name: full(tensor).clone() for name, tensor in trainer.model.state_dict().items()}
    assert group is not None
    group.close()
    return state


def test_experts_of_two_ranks_travel_by_name_into_the_packed_parameters_of_an_engine(mixture_directory: Path) -> None:
    store = serve_store()
    sent, _, received = run_processes(transfer, 3, mixture_directory, store_address(store), timeout_s=600)
    assert received.keys() == sent.keys()
    assert all(torch.equal(received[name], sent[name]) for name in sent)
    untrained = build_model(mixture_directory, dtype=torch.float32).state_dict()
    assert not torch.equal(received["model.norm.weight"], untrained["model.norm.weight"])


def test_the_sent_experts_are_views_of_the_parameter_and_no_tensors_are_tied(mixture_directory: Path) -> None:
    engine = engine_on(mixture_directory, None)
    whole = engine.model.model.layers[1].mlp.experts.down_proj
    weights = dict(engine.named_weights())
    assert weights[EXPERT].data_ptr() == whole[4].data_ptr()
    described = dict(engine.weights_metadata())
    assert [(name, one.shape, one.dtype) for name, one in described.items()] == [
        (name, one.shape, one.dtype) for name, one in weights.items()
    ]
    layout = WeightLayout.plan(engine.weights_metadata())
    assert all(entry.alias_of is None for entry in layout.entries)


def test_an_export_has_the_names_and_values_that_are_sent(mixture_directory: Path, tmp_path: Path) -> None:
    engine = engine_on(mixture_directory, None)
    engine.train_batch(batch_of(groups_of(4, seed=0)), loss=PolicyLoss())
    engine.export(tmp_path)
    file, sent = load_file(tmp_path / "model.safetensors"), dict(engine.named_weights())
    assert file.keys() == sent.keys()
    assert all(torch.equal(file[name], sent[name]) for name in file)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in engine.model.state_dict().items())


def test_persistent_buffers_are_sent_with_the_parameters(tmp_path: Path) -> None:
    sizes = {"vocab_size": 16, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": 8, "kv_lora_rank": 8}
    experts = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2}
    config = AutoConfig.for_model(
        "deepseek_v3", **sizes, **heads, **experts, moe_intermediate_size=24, first_k_dense_replace=1
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    engine = engine_on(tmp_path, None)
    engine.model.register_buffer("scratch", torch.tensor([4.0]), persistent=False)
    sent = dict(engine.named_weights())
    assert sent.keys() == load_file(tmp_path / "model.safetensors").keys()
    assert "model.layers.1.mlp.gate.e_score_correction_bias" in sent


def test_experts_run_one_after_the_other_where_the_device_cannot_multiply_groups(
    mixture_directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    batch = batch_of(groups_of(3, seed=0))
    grouped = engine_on(mixture_directory, None)
    assert grouped.model.config._experts_implementation == "grouped_mm"
    assert not caplog.records

    def lacks(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("the device has no such operation")

    monkeypatch.setattr(torch.nn.functional, "grouped_mm", lacks)
    engine = engine_on(mixture_directory, None)
    assert "Experts run one after the other: the device has no such operation" in caplog.text
    looped = engine.logprobs(batch)
    monkeypatch.undo()
    assert_near(looped, grouped.logprobs(batch))


def test_an_adapter_trains_beside_the_experts_and_the_base_keeps_its_names(mixture_directory: Path) -> None:
    whole = dict(engine_on(mixture_directory, None).named_weights())
    engine = engine_on(mixture_directory, None, lora=LoraSettings(rank=2, alpha=4.0))
    engine.train_batch(batch_of(groups_of(4, seed=0)), loss=PolicyLoss())
    base = dict(engine.named_weights())
    assert base.keys() == dict(engine.weights_metadata()).keys() == whole.keys()
    assert all(torch.equal(base[name], whole[name]) for name in whole)
    assert {name.split(".")[6] for name, _ in engine.named_adapter()} == {"q_proj", "k_proj", "v_proj", "o_proj"}
