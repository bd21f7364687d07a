"""The FSDP2 engine on one and on two real ranks: the same steps, the same weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.fsdp import FSDPModule
from transformers import AutoModelForCausalLM, GPT2Config, GptOssConfig
from transformers.models.qwen3 import Qwen3PreTrainedModel

from hwrl.checkpoint import CheckpointManager
from hwrl.comm import serve_store, store_address
from hwrl.errors import CommAbortedError, DataError, EngineError
from hwrl.interfaces import Batch, LossInputs
from hwrl.models import build_model, load_model, load_tokenizer
from hwrl.run.demo import write_demo
from hwrl.testing.processes import run_processes
from hwrl.train import FsdpEngine, PolicyLoss, UserLoss
from tests.support.fsdp_training import (
    assert_same_training,
    batch_of,
    engine_on,
    full,
    groups_of,
    join,
    micro_batch,
    train,
    without_padding,
)
from tests.support.near import assert_near
from tests.support.packed_models import PACKED, SIZES, random_model


@pytest.mark.parametrize("recomputes", [False, True])
def test_two_ranks_take_the_same_steps_as_one(model_directory: Path, recomputes: bool) -> None:
    alone = train(0, model_directory, "", 1, 4)
    store = serve_store()
    pair = run_processes(train, 2, model_directory, store_address(store), 2, 4, recomputes)
    assert pair[0]["weights"].keys() == alone["weights"].keys()
    assert not pair[1]["weights"]  # only the first rank, which sends them, has them whole
    for one in pair:
        assert_same_training({**one, "weights": pair[0]["weights"]}, alone)


def kept_nbytes(engine: FsdpEngine, batch: Batch) -> int:
    """Return the bytes that a forward pass keeps for its backward pass."""
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        engine.forward(micro_batch(batch))
    own = {parameter.untyped_storage().data_ptr() for parameter in engine.model.parameters()}
    return sum(nbytes for place, nbytes in kept.items() if place not in own)


def test_activation_checkpointing_keeps_less_and_changes_no_step(model_directory: Path) -> None:
    plain, lean = (engine_on(model_directory, None, activation_checkpointing=lean) for lean in (False, True))
    batch = batch_of(groups_of(5, seed=0))
    assert kept_nbytes(lean, batch) < kept_nbytes(plain, batch) / 2
    for engine in (plain, lean):
        engine.train_batch(batch, loss=PolicyLoss())
    for (name, one), (_, other) in zip(plain.named_weights(), lean.named_weights(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, msg=name)


def write_gpt2(directory: Path) -> Path:
    """Write a GPT-2, whose layers are where Qwen's are not."""
    config = GPT2Config(n_layer=3, n_embd=32, n_head=2, vocab_size=32, n_positions=64, bos_token_id=1, eos_token_id=1)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return directory


def shard(rank: int, directories: list[Path], address: str) -> tuple[list[str], dict[str, torch.Tensor]]:
    """Return the modules that are sharded by themselves, and the whole weights; take a step, too."""
    group = join(rank, address, 2)
    assert group is not None
    engine = engine_on(directories[rank], group)
    modules = [name for name, module in engine.model.named_modules() if isinstance(module, FSDPModule)]
    weights = {name: full(tensor).cpu().clone() for name, tensor in engine.model.state_dict().items()}
    engine.train_batch(batch_of(groups_of(2, seed=0)[rank::2]), loss=PolicyLoss())
    group.close()
    return modules, weights


def test_each_layer_is_sharded_wherever_a_model_has_them_and_one_rank_reads_the_weights(tmp_path: Path) -> None:
    directories = [write_gpt2(tmp_path / name) for name in ("first", "second")]
    (directories[1] / "model.safetensors").unlink()
    wanted = load_model(directories[0], dtype=torch.float32).state_dict()
    store = serve_store()
    for modules, weights in run_processes(shard, 2, directories, store_address(store)):
        assert modules == ["", *(f"transformer.h.{layer}" for layer in range(3))]
        assert weights.keys() == wanted.keys()
        assert all(torch.equal(weights[name], wanted[name]) for name in wanted)


def test_a_model_whose_layers_nobody_knows_is_refused(model_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Qwen3PreTrainedModel, "_no_split_modules", [])
    with pytest.raises(EngineError, match="cannot be trained layer by layer"):
        engine_on(model_directory, None)


def test_the_step_does_not_depend_on_how_it_is_cut_into_parts(model_directory: Path) -> None:
    whole, parts = (engine_on(model_directory, None, micro_batch_tokens=tokens) for tokens in (10_000, 16))
    batch = batch_of(groups_of(5, seed=0))
    first, second = (engine.train_batch(batch, loss=PolicyLoss("tis")) for engine in (whole, parts))
    assert without_padding(first) == pytest.approx(without_padding(second), rel=1e-4)
    for (_, one), (_, other) in zip(whole.named_weights(), parts.named_weights(), strict=True):
        assert_near(one, other, share=1e-3)  # AdamW's first step magnifies rounding


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
    assert after.updates == straight.updates == 4
    for (_, one), (_, other) in zip(straight.named_weights(), after.named_weights(), strict=True):
        assert torch.equal(one, other)


def test_asking_for_the_state_before_the_first_step_changes_nothing(model_directory: Path) -> None:
    asked, other = engine_on(model_directory, None), engine_on(model_directory, None)
    asked.state_dict()
    for engine in (asked, other):
        engine.train_batch(batch_of(groups_of(4, seed=0)), loss=PolicyLoss())
        engine.train_batch(batch_of(groups_of(4, seed=1)), loss=PolicyLoss())
    for (_, one), (_, wanted) in zip(asked.named_weights(), other.named_weights(), strict=True):
        assert torch.equal(one, wanted)


def test_the_exported_model_is_what_transformers_loads(model_directory: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    engine = engine_on(model_directory, None)
    engine.train_batch(batch_of(groups_of(4, seed=0)), loss=PolicyLoss())
    engine.export(tmp_path / "model")
    loaded = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "model").named_parameters())
    assert all(torch.equal(loaded[name], tensor) for name, tensor in engine.named_weights())
    assert AutoTokenizer.from_pretrained(tmp_path / "model")("12>")["input_ids"] == [2, 4, 5, 13]


def test_an_fp8_model_is_read_and_exported_without_its_quantization(tmp_path: Path) -> None:
    random_model(PACKED["llama"]).save_pretrained(tmp_path)
    file, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    tensors, wanted = load_file(file), load_file(file)
    for name in [name for name in tensors if name.endswith("proj.weight")]:
        scale = tensors[name].abs().max() / 448
        tensors[name] = (tensors[name] / scale).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scale.reshape(1, 1)
        wanted[name] = tensors[name].float() * scale
    save_file(tensors, file, metadata={"format": "pt"})
    fp8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    config.write_text(json.dumps({**json.loads(config.read_text()), "quantization_config": fp8}))
    engine = engine_on(tmp_path, None)
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in engine.named_weights())
    write_demo(tmp_path / "demo", seed=1, prompts=16)
    load_tokenizer(tmp_path / "demo" / "model").save_pretrained(tmp_path)
    engine.export(tmp_path / "exported")
    assert "quantization_config" not in json.loads((tmp_path / "exported" / "config.json").read_text())
    exported = load_model(tmp_path / "exported", dtype=torch.float32)
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in exported.state_dict().items() if name in wanted)


def test_experts_of_four_bits_are_read_as_plain_ones(tmp_path: Path) -> None:
    """GPT-OSS is published in MXFP4: blocks of 32 numbers with one scale."""
    sizes = {**SIZES, "hidden_size": 64, "intermediate_size": 64}
    random_model(GptOssConfig(**sizes, num_local_experts=4)).save_pretrained(tmp_path)
    file, config, wanted = tmp_path / "model.safetensors", tmp_path / "config.json", dict[str, torch.Tensor]()
    tensors = load_file(file)
    numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    numbers = torch.cat([numbers, -numbers])
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        scales = torch.randint(120, 128, (experts, outputs, inputs // 32), dtype=torch.uint8)
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = blocks, scales
        pairs = torch.stack([numbers[(blocks & 15).long()], numbers[(blocks >> 4).long()]], -1).flatten(-2)
        wanted[name] = (pairs * torch.exp2(scales.float() - 127)[..., None]).flatten(2).transpose(1, 2)
    save_file(tensors, file, metadata={"format": "pt"})
    changes = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}
    config.write_text(json.dumps({**json.loads(config.read_text()), **changes}))
    found = dict(engine_on(tmp_path, None).named_weights())
    assert wanted and all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


def test_a_directory_without_a_model_is_said(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no loadable model"):
        engine_on(tmp_path, None)


def test_a_resumed_run_takes_its_own_settings_and_the_saved_place_in_the_schedule(model_directory: Path) -> None:
    saved = engine_on(model_directory, None)
    batch = batch_of(groups_of(4, seed=0))
    for _ in range(4):
        saved.train_batch(batch, loss=PolicyLoss())
    resumed = engine_on(model_directory, None, learning_rate=5e-3, betas=(0.8, 0.99), weight_decay=0.3)
    resumed.load_state_dict(saved.state_dict())
    (settings,) = resumed.optimizer.param_groups
    assert (settings["betas"], settings["weight_decay"]) == ((0.8, 0.99), 0.3)
    for _ in range(3):
        rates = [engine.train_batch(batch, loss=PolicyLoss())["learning_rate"] for engine in (saved, resumed)]
        assert rates[1] == pytest.approx(rates[0] / 2)


def test_no_gradient_is_left_after_a_step(model_directory: Path) -> None:
    engine = engine_on(model_directory, None)
    engine.train_batch(batch_of(groups_of(4, seed=0)), loss=PolicyLoss())
    assert all(parameter.grad is None for parameter in engine.model.parameters())


def plain_formula(engine: FsdpEngine, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probability and entropy of the response tokens, from the logits of all positions."""
    distribution = engine.model(batch.tokens[:, :-1]).logits.log_softmax(-1)
    logprobs = distribution.gather(2, batch.tokens[:, 1:, None])[:, :, 0]
    entropy = -(distribution.exp() * distribution).sum(-1)
    return logprobs[batch.mask[:, 1:]], entropy[batch.mask[:, 1:]]


def gradients_of(engine: FsdpEngine, logprobs: torch.Tensor) -> list[torch.Tensor]:
    weights = torch.linspace(-1, 1, len(logprobs))
    parameters = list(engine.model.parameters())
    return list(torch.autograd.grad((logprobs * weights).sum(), parameters))


@pytest.mark.parametrize("chunk", [1 << 25, 100])
def test_logprobs_in_chunks_equal_the_plain_formula(model_directory: Path, chunk: int) -> None:
    engine, batch = engine_on(model_directory, None, micro_batch_tokens=10_000), batch_of(groups_of(5, seed=0))
    wanted, wanted_entropy = plain_formula(engine, batch)
    engine.scorer.chunk_logits = chunk
    logprobs, entropy = engine.forward(micro_batch(batch))
    assert_near(logprobs, wanted)
    assert_near(entropy, wanted_entropy)
    for one, other in zip(gradients_of(engine, logprobs), gradients_of(engine, wanted), strict=True):
        assert_near(one, other)
    assert_near(engine.logprobs(batch)[batch.mask], wanted.detach())


def small_steps(rank: int, model_directory: Path, address: str, ranks: int) -> dict[str, Any]:
    """Take steps in bfloat16 with a learning rate that bfloat16 parameters would round away."""
    group = join(rank, address, ranks)
    engine = engine_on(model_directory, group, learning_rate=1e-6, warmup_steps=0, dtype=torch.bfloat16)
    before = [full(parameter.detach()).clone() for parameter in engine.model.parameters()]
    for step in range(3):
        metrics = engine.train_batch(batch_of(groups_of(5, seed=step)[rank::ranks]), loss=PolicyLoss())
    after = [full(parameter.detach()) for parameter in engine.model.parameters()]
    changed = sum(int((one != other).sum()) for one, other in zip(before, after, strict=True))
    dtypes = {str(tensor.dtype) for _, tensor in engine.named_weights()}
    if group is not None:
        group.close()
    return {"changed": changed / sum(map(torch.numel, after)), "dtypes": dtypes, "grad_norm": metrics["grad_norm"]}


def test_small_steps_change_the_parameters_of_a_model_that_computes_in_bfloat16(model_directory: Path) -> None:
    results = [small_steps(0, model_directory, "", 1)]
    store = serve_store()
    results += run_processes(small_steps, 2, model_directory, store_address(store), 2)
    assert [result["dtypes"] for result in results] == [{"torch.bfloat16"}, {"torch.bfloat16"}, set()]
    for result in results:
        assert result["changed"] > 0.5
        assert result["grad_norm"] == pytest.approx(results[0]["grad_norm"], rel=0.05)


def test_the_exported_model_has_the_dtype_that_was_computed_in(model_directory: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    engine = engine_on(model_directory, None, dtype=torch.bfloat16)
    engine.export(tmp_path / "model")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="auto")
    assert loaded.dtype == torch.bfloat16
    assert all(torch.equal(dict(loaded.named_parameters())[name], tensor) for name, tensor in engine.named_weights())


def diverge(rank: int, model_directory: Path, address: str) -> str:
    """Train on rows of which only the first rank's hold a NaN; before, with a loss that fails on this rank only."""
    group = join(rank, address, 2)
    assert group is not None
    engine = engine_on(model_directory, group)
    batch = batch_of(groups_of(4, seed=0)[rank::2])

    def fail(inputs: LossInputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        if rank == 0:
            raise ValueError("of the first rank")
        return -inputs.logprobs, {"mine": inputs.logprobs}

    with pytest.raises(DataError if rank == 0 else CommAbortedError, match=r"of the first rank|on another rank"):
        engine.train_batch(batch, loss=UserLoss.of(fail))
    assert engine.updates == 0
    engine.train_batch(batch, loss=PolicyLoss())
    if rank == 0:
        batch.behaviour_logprobs[0] = float("nan")
    with pytest.raises(EngineError) as caught:
        engine.train_batch(batch, loss=PolicyLoss())
    group.close()
    return str(caught.value)


def test_gradients_that_are_not_finite_on_one_rank_are_an_error_on_all(model_directory: Path) -> None:
    store = serve_store()
    messages = run_processes(diverge, 2, model_directory, store_address(store))
    assert all("norm of the gradients is nan" in message for message in messages)


def dropout_directory(tmp_path: Path) -> Path:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=16, n_positions=32, n_embd=32, n_layer=1, n_head=2, resid_pdrop=0.5)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    return tmp_path


def test_dropout_makes_no_noise_in_logprobs_or_steps(tmp_path: Path) -> None:
    engine = engine_on(dropout_directory(tmp_path), None)
    batch = batch_of(groups_of(3, seed=0))
    assert torch.equal(engine.logprobs(batch), engine.logprobs(batch))
    losses = [engine.train_batch(batch, loss=PolicyLoss())["loss"]]
    again = engine_on(tmp_path, None)
    assert again.train_batch(batch, loss=PolicyLoss())["loss"] == losses[0]


def test_a_built_model_has_the_generation_settings_of_its_directory(model_directory: Path, tmp_path: Path) -> None:
    directory = tmp_path / "model"
    shutil.copytree(model_directory, directory)
    (directory / "generation_config.json").write_text('{"eos_token_id": [1, 7]}')
    model, loaded = build_model(directory, dtype=torch.float32), load_model(directory, dtype=torch.float32)
    assert model.generation_config.eos_token_id == [1, 7]
    assert model.config._attn_implementation == loaded.config._attn_implementation == "sdpa"
    model.load_state_dict(loaded.state_dict())
    tokens = torch.arange(12)[None]
    torch.testing.assert_close(model(tokens).logits, loaded.eval()(tokens).logits)


def test_a_built_model_shares_the_weights_that_are_tied(tmp_path: Path) -> None:
    model = build_model(dropout_directory(tmp_path), dtype=torch.float32)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def save_offloaded(rank: int, model_directory: Path, directory: Path, address: str, ranks: int) -> dict[str, Any]:
    """Save what is offloaded, take a step while that is written, and take the same step after a resume."""
    group = join(rank, address, ranks)
    steps = [batch_of(groups_of(4, seed=seed)[rank::ranks]) for seed in range(2)]
    engine = engine_on(model_directory, group, param_offload=True, optimizer_offload=True)
    with engine.on_device(optimizer=True):
        engine.train_batch(steps[0], loss=PolicyLoss())
    with CheckpointManager(directory, async_save=True, group=group) as manager:
        with engine.saved_state() as (state, offloader):
            report = manager.save(1, state, offloader=offloader)
        with engine.on_device(optimizer=True):
            engine.train_batch(steps[1], loss=PolicyLoss())
            went_on = {name: tensor.clone() for name, tensor in engine.named_weights()}
        manager.wait()
        resumed = engine_on(model_directory, group)
        state = resumed.state_dict()
        assert manager.resume(state) is not None
    resumed.load_state_dict(state)
    resumed.train_batch(steps[1], loss=PolicyLoss())
    again = dict(resumed.named_weights())
    if group is not None:
        group.close()
    same = went_on.keys() == again.keys() and all(torch.equal(went_on[name], again[name]) for name in again)
    return {"same": same, "staged_nbytes": report.staged_nbytes, "lent_nbytes": report.lent_nbytes}


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_offloaded_engine_is_saved_from_the_host(model_directory: Path, tmp_path: Path, ranks: int) -> None:
    store = serve_store()
    for found in run_processes(save_offloaded, ranks, model_directory, tmp_path, store_address(store), ranks):
        assert found["same"]
        assert found["staged_nbytes"] == 0 < found["lent_nbytes"]


def uneven_parts(rank: int, model_directory: Path, address: str, ranks: int) -> float:
    """Take a step with every row in a part of its own: the first rank has 12 parts, the second 8."""
    group = join(rank, address, ranks)
    engine = engine_on(model_directory, group, micro_batch_tokens=1)
    share = groups_of(5, seed=0)[rank::ranks]
    grad_norm = engine.train_batch(batch_of(share), loss=PolicyLoss())["grad_norm"]
    if group is not None:
        group.close()
    return grad_norm


def test_a_rank_with_fewer_parts_goes_along_with_the_others(model_directory: Path) -> None:
    alone = uneven_parts(0, model_directory, "", 1)
    store = serve_store()
    pair = run_processes(uneven_parts, 2, model_directory, store_address(store), 2, timeout_s=300)
    assert pair == pytest.approx([alone, alone], rel=1e-3)
