"""The Megatron engine on one rank, beside transformers' own forward pass and the FSDP2 engine."""

from __future__ import annotations

import contextlib
import gc
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

import hwrl
from hwrl.checkpoint import CheckpointManager
from hwrl.errors import ConfigError, DataError, MemoryStateError, UnsupportedError
from hwrl.interfaces import Batch, EngineSettings, LoraSettings, TrainEngine
from hwrl.train import FsdpEngine, PolicyLoss
from hwrl_megatron.memory import engine_memory
from hwrl_megatron.options import MegatronOptions
from hwrl_megatron.supported import make_layout
from tests.support.megatron_models import CONFIGS, EXPERTS, SIZES, to_another_format, with_saved_names, write_model
from tests.support.near import assert_near


@pytest.fixture
def model_directory(tmp_path: Path) -> Path:
    return write_model(tmp_path / "demo", CONFIGS["qwen3"])


def batch_of(rows: int, *, seed: int, vocabulary: int = 32) -> Batch:
    """Return ``rows`` rows of several lengths, of which the first two tokens are the prompt."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(4, 12, (rows,), generator=generator)
    places = torch.arange(12)
    mask = (places >= 2) & (places < lengths[:, None])
    tokens = torch.randint(0, vocabulary, (rows, 12), generator=generator) * (places < lengths[:, None])
    behaviour = torch.full((rows, 12), -3.3) * mask
    return Batch(tokens, mask, behaviour, torch.randn(rows, generator=generator))


def settings_for(model_directory: Path, **changes: Any) -> EngineSettings:
    settings = EngineSettings(
        model_directory=model_directory,
        learning_rate=1e-2,
        total_steps=10,
        warmup_steps=2,
        min_learning_rate_ratio=0.1,
        weight_decay=0.1,
        micro_batch_tokens=40,
        temperature=0.8,
    )
    return replace(settings, **changes)


Make = Callable[..., TrainEngine]


@pytest.fixture
def megatron() -> Iterator[Make]:
    """A function that makes an engine as ``train.engine=megatron`` does, after the last one was closed."""
    from hwrl_megatron import hwrl_train_engine

    made: list[TrainEngine] = []

    def make(model_directory: Path, **changes: Any) -> TrainEngine:
        while made:
            made.pop().close()
        settings = settings_for(model_directory, **changes)
        made.append(hwrl_train_engine(settings=settings, options={}, backend=hwrl.get_backend(), group=None))
        return made[-1]

    yield make
    while made:
        made.pop().close()


def fsdp(model_directory: Path, **changes: Any) -> FsdpEngine:
    return FsdpEngine(settings_for(model_directory, **changes), backend=hwrl.get_backend(), group=None)


def copies(engine: TrainEngine) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in engine.named_weights()}


def assert_close(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], *, atol: float) -> None:
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], atol=atol, rtol=1e-4)


def hf_logprobs(directory: Path, batch: Batch, *, temperature: float) -> torch.Tensor:
    logits = AutoModelForCausalLM.from_pretrained(directory).eval()(batch.tokens[:, :-1]).logits
    logprobs: torch.Tensor = (
        (logits.float() / temperature).log_softmax(-1).gather(2, batch.tokens[:, 1:, None])[:, :, 0]
    )
    return logprobs[batch.mask[:, 1:]].detach()


@pytest.mark.parametrize("name", CONFIGS)
def test_it_computes_steps_and_exports_what_transformers_does(tmp_path: Path, megatron: Make, name: str) -> None:
    directory = write_model(tmp_path / "demo", CONFIGS[name])
    engine, other, batch = megatron(directory), fsdp(directory), batch_of(7, seed=1)
    wanted = hf_logprobs(directory, batch, temperature=0.8)
    assert_near(engine.logprobs(batch)[batch.mask], wanted)
    assert_close(copies(engine), with_saved_names(directory, copies(other)), atol=0.0)
    for seed in range(4):
        metrics, expected = (one.train_batch(batch_of(7, seed=seed), loss=PolicyLoss("tis")) for one in (engine, other))
        assert metrics == pytest.approx(expected, rel=1e-4, abs=1e-6)
    # The gradient of a key's bias is rounding alone, which AdamW makes into a step of a size between 0 and 1e-2.
    assert_close(copies(engine), with_saved_names(directory, copies(other)), atol=5e-4)
    described = {name: (tensor.shape, tensor.dtype) for name, tensor in engine.weights_metadata()}
    assert described == {name: (tensor.shape, tensor.dtype) for name, tensor in engine.named_weights()}
    engine.export(tmp_path / "exported")
    exported = hf_logprobs(tmp_path / "exported", batch, temperature=0.8)
    assert_near(engine.logprobs(batch)[batch.mask], exported)


def test_a_closed_engine_gives_up_its_groups(tmp_path: Path, megatron: Make) -> None:
    def loops() -> int:
        number = 0
        for name in Path("/proc/self/task").glob("*/comm"):
            with contextlib.suppress(OSError):  # a thread that has just ended
                number += name.read_text() == "gloo_tcp_loop\n"
        return number

    gc.collect()
    before = loops()
    engine = megatron(write_model(tmp_path / "demo", CONFIGS["qwen3"]))
    made = loops() - before
    engine.close()
    gc.collect()
    assert made > 10 and loops() - before < 5  # torch and Megatron keep two or three


@pytest.mark.parametrize("form", ["several files", "another format"])
def test_it_loads_what_transformers_does(
    tmp_path: Path, megatron: Make, form: str, caplog: pytest.LogCaptureFixture
) -> None:
    directory = write_model(tmp_path / "demo", CONFIGS["qwen3-experts"], max_shard_size="20KB")
    assert len(list(directory.glob("model-*.safetensors"))) > 2
    if form == "another format":
        to_another_format(directory)
    batch = batch_of(7, seed=1)
    wanted = hf_logprobs(directory, batch, temperature=0.8)
    assert_near(megatron(directory).logprobs(batch)[batch.mask], wanted)
    assert ("one rank reads all" in caplog.text) == (form == "another format")


def test_files_that_do_not_fit_the_model_are_an_error(model_directory: Path, megatron: Make) -> None:
    tensors = load_file(model_directory / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, model_directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(DataError, match=r"lacks .*up_proj"):
        megatron(model_directory)


def test_activation_checkpointing_changes_no_step(model_directory: Path, megatron: Make) -> None:
    after = []
    for lean in (False, True, "auto"):
        engine = megatron(model_directory, activation_checkpointing=lean)
        engine.train_batch(batch_of(7, seed=1), loss=PolicyLoss("tis"))
        after.append(copies(engine))
    assert_close(after[0], after[1], atol=0.0)
    assert_close(after[0], after[2], atol=0.0)


def test_bfloat16_computes_in_it_and_keeps_small_steps(tmp_path: Path, megatron: Make) -> None:
    directory = write_model(tmp_path / "demo", CONFIGS["qwen3"], dtype=torch.bfloat16)
    settings: dict[str, Any] = {"dtype": torch.bfloat16, "learning_rate": 1e-5, "warmup_steps": 0}
    engine, other, batch = megatron(directory, **settings), fsdp(directory, **settings), batch_of(7, seed=1)
    torch.testing.assert_close(engine.logprobs(batch), other.logprobs(batch), atol=0.1, rtol=0.02)
    before = master_weights(engine)
    for _ in range(4):
        engine.train_batch(batch, loss=PolicyLoss("tis"))
    after = master_weights(engine)
    moved = torch.cat([(after[name] - before[name]).abs().flatten() for name in before])
    assert 5e-6 < moved.mean() < 6e-5, "bfloat16 alone would have rounded most of it away"
    for name, tensor in engine.named_weights():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor.cpu(), after[name].to(torch.bfloat16))


def master_weights(engine: TrainEngine) -> dict[str, torch.Tensor]:
    """Return what the checkpoint holds as the model, put together."""
    whole = {}
    for name, pieces in engine.state_dict()["model"].items():
        whole[name] = torch.full(pieces.shape, torch.nan)
        for offset, piece in pieces.pieces.items():
            place = tuple(slice(start, start + size) for start, size in zip(offset, piece.shape, strict=True))
            whole[name][place] = piece
    return whole


@pytest.mark.parametrize("name", ["qwen3", "qwen2-tied-with-padding", "qwen3-experts"])
def test_a_checkpoint_goes_on_in_either_engine(tmp_path: Path, megatron: Make, name: str) -> None:
    model_directory = write_model(tmp_path / "demo", CONFIGS[name])
    batches = [batch_of(6, seed=seed) for seed in range(4)]
    straight = fsdp(model_directory)
    for batch in batches:
        straight.train_batch(batch, loss=PolicyLoss())
    wanted = copies(straight)
    for number, (first, second) in enumerate([(megatron, fsdp), (fsdp, megatron), (megatron, megatron)]):
        before = first(model_directory)
        for batch in batches[:2]:
            before.train_batch(batch, loss=PolicyLoss())
        with CheckpointManager(tmp_path / str(number)) as manager:
            manager.save(2, before.state_dict())
            after = second(model_directory)
            state = after.state_dict()
            assert manager.resume(state) is not None
        after.load_state_dict(state)
        for batch in batches[2:]:
            after.train_batch(batch, loss=PolicyLoss())
        found, expected = (with_saved_names(model_directory, weights) for weights in (copies(after), wanted))
        assert_close(found, expected, atol=5e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_offloaded_is_really_away_and_training_is_the_same(
    model_directory: Path, megatron: Make, dtype: torch.dtype
) -> None:
    batch = batch_of(6, seed=0)
    plain = megatron(model_directory, dtype=dtype)
    metrics = [plain.train_batch(batch, loss=PolicyLoss()) for _ in range(2)]
    wanted = copies(plain)
    engine: Any = megatron(model_directory, dtype=dtype, param_offload=True, optimizer_offload=True)
    for expected in metrics:
        with engine.on_device(optimizer=True) as moved:
            assert engine.train_batch(batch, loss=PolicyLoss()) == expected
        assert moved.load.nbytes > 0
        assert device_nbytes(engine) == 0
        with pytest.raises(MemoryStateError):
            engine.logprobs(batch)
    with engine.on_device(optimizer=False):
        assert_close(copies(engine), wanted, atol=0.0)
        assert 0 < device_nbytes(engine) < 0.5 * moved.load.nbytes


def device_nbytes(engine: Any) -> int:
    """Return the memory of parameters, gradients, float32 copies and moments, each storage once."""
    tensors = [*engine.model.module.parameters(), *(buffer.grad_data for buffer in engine.model.buffers)]
    for group in engine.optimizer.param_groups:
        tensors += group["params"]
    for state in engine.optimizer.optimizer.state.values():
        tensors += [state["exp_avg"], state["exp_avg_sq"]]
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_planned_bytes_are_those_of_the_engine(tmp_path: Path, megatron: Make, dtype: torch.dtype) -> None:
    config = Qwen3MoeConfig(**{**SIZES, "vocab_size": 2048}, **EXPERTS)  # so that little of a buffer is padding
    directory = write_model(tmp_path / "demo", config, dtype=dtype)
    options = MegatronOptions()
    causes = engine_memory(settings_for(directory, dtype=dtype), options, ranks=1, device_nbytes=1 << 30)
    planned = {one.cause: one.nbytes for one in causes}
    engine: Any = megatron(directory, dtype=dtype)
    engine.train_batch(batch_of(6, seed=0), loss=PolicyLoss())
    parameters = sum(buffer.param_data.nbytes for buffer in engine.model.buffers)
    gradients = sum(4 * buffer.grad_data.numel() for buffer in engine.model.buffers)
    assert planned["parameters"] == pytest.approx(parameters, rel=0.02)
    assert planned["gradients"] == pytest.approx(gradients, rel=0.02)
    assert planned["optimizer state"] == pytest.approx(device_nbytes(engine) - parameters, rel=0.02)


@pytest.mark.parametrize(("setting", "recomputed"), [(True, 2), (False, 0), ("auto", 1)])
def test_a_stage_plans_the_passes_that_it_has_under_way(model_directory: Path, setting: Any, recomputed: int) -> None:
    settings = settings_for(model_directory, activation_checkpointing=setting, micro_batch_tokens=1000)
    kept, scores = 17 * 4 * 32 * 1000, 16 * 32 * 1000
    state = 16 * sum(one.numel() for one in AutoModelForCausalLM.from_pretrained(model_directory).parameters())
    room = state + scores + 7 * kept // 2  # a backward pass of a layer needs twice what a layer keeps
    plain = engine_memory(settings, MegatronOptions(), ranks=1, device_nbytes=room)
    assert any(f"{recomputed} of 2 layers" in one.cause for one in plain), plain
    settings = replace(settings, activation_checkpointing=False)  # so the first stage, not the last one, needs most
    staged = engine_memory(settings, MegatronOptions(pipeline_parallel=2), ranks=2, device_nbytes=room)
    assert any("activations of 2 × 1,000 tokens" in one.cause for one in staged), staged
    assert sum(one.nbytes for one in staged if one.cause == "parameters") < state // 4


# -- refusals -------------------------------------------------------------------------------------------------------


def rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "factor": 2.0, "rope_theta": 1e4, **more}}


PLAIN = {key: value for key, value in SIZES.items() if key != "rope_theta"}
REFUSED = {
    "its architecture is gpt2": GPT2Config(vocab_size=32, n_embd=32, n_layer=1, n_head=2),
    "its architecture is deepseek_v3": DeepseekV3Config(vocab_size=32, num_hidden_layers=1),
    "its architecture is gemma3_text": Gemma3TextConfig(vocab_size=32, num_hidden_layers=1),
    "its activation is gelu": Qwen3Config(**PLAIN, hidden_act="gelu"),
    "its attention has a sliding window": Qwen3Config(
        **PLAIN, use_sliding_window=True, sliding_window=8, max_window_layers=1
    ),
    "its layers have biases": Qwen3Config(**PLAIN, attention_bias=True),
    "its rotary embedding is scaled by linear": Qwen3Config(**PLAIN, **rope("linear")),
    "its rotary embedding is scaled by yarn": Qwen3Config(**PLAIN, **rope("yarn", original_max_position_embeddings=16)),
    "its rotary embedding rotates a part of each head": LlamaConfig(
        **PLAIN, **rope("default", partial_rotary_factor=0.5)
    ),
    "some of its layers have experts and some have none": Qwen3MoeConfig(**SIZES, **EXPERTS, mlp_only_layers=[1]),
    "its tokens go to one expert each, with the weight 1": Qwen3MoeConfig(
        **SIZES, **{**EXPERTS, "num_experts_per_tok": 1}, norm_topk_prob=True
    ),
}


@pytest.mark.parametrize("why", REFUSED)
def test_a_model_that_would_be_computed_wrongly_is_refused_before_anything_starts(
    tmp_path: Path, megatron: Make, why: str
) -> None:
    REFUSED[why].save_pretrained(tmp_path)  # without weights: nothing reads them
    with pytest.raises(ConfigError) as caught:
        megatron(tmp_path)
    assert caught.value.why == why
    assert "train.engine=fsdp" in caught.value.fix
    assert not torch.distributed.is_initialized()


def test_quantized_weights_are_refused(model_directory: Path, megatron: Make) -> None:
    path = model_directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(ConfigError, match="its weights are quantized"):
        megatron(model_directory)


@pytest.mark.parametrize(
    ("config", "options", "text"),
    [
        ("qwen3", {"pipeline_parallel": 4}, "pipeline_parallel=4 does not divide the model"),
        ("qwen3", {"tensor_parallel": 4}, "its key-value heads: 2"),
        ("qwen3", {"expert_parallel": 2}, "its experts: 1"),
        ("qwen3-experts", {"expert_parallel": 4}, "its experts: 6"),
        ("qwen3", {"tensor_parallel": 2, "pipeline_parallel": 4}, "each copy of the model needs 8 ranks"),
        ("qwen3-experts", {"pipeline_parallel": 2, "expert_parallel": 3}, "there are 2"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(config: str, options: dict[str, int], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_layout(CONFIGS[config], MegatronOptions(**options), rank=0, ranks=4)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    "change", [{"compile": True}, {"host_step": True}, {"context_parallel": 2}, {"shard_ranks": 2}]
)
def test_settings_of_other_engines_are_refused_by_name(
    model_directory: Path, megatron: Make, change: dict[str, Any]
) -> None:
    refused = pytest.raises(ConfigError, match=rf"train\.{next(iter(change))}=(true|2)")
    with refused:
        megatron(model_directory, **change)
    with refused:
        engine_memory(settings_for(model_directory, **change), MegatronOptions(), ranks=1, device_nbytes=1 << 30)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"tensor_paralel": 2}, "did you mean 'tensor_parallel'?"),
        ({"tensor_parallel": 0}, "give 1 or more"),
        ({"tensor_parallel": "two"}, "give 1 or more"),
        ({"tensor_parallel": 2}, "set train.ranks to 2 or a multiple of it"),
    ],
)
def test_an_option_that_is_wrong_is_said(model_directory: Path, options: dict[str, Any], text: str) -> None:
    from hwrl_megatron import hwrl_train_engine

    with pytest.raises(ConfigError) as caught:
        hwrl_train_engine(
            settings=settings_for(model_directory), options=options, backend=hwrl.get_backend(), group=None
        )
    assert text in caught.value.fix


def test_an_adapter_is_refused(model_directory: Path, megatron: Make) -> None:
    with pytest.raises(UnsupportedError, match="trains no adapter"):
        megatron(model_directory, lora=LoraSettings(rank=4, alpha=8.0))


def test_a_preparation_after_the_import_of_megatron_is_an_error() -> None:
    code = (
        "import sys, types; sys.modules['megatron.core'] = types.ModuleType('megatron.core')\n"
        "import hwrl, hwrl_megatron; hwrl.set_backend('cpu'); hwrl_megatron.prepare_process()"
    )
    ended = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, check=False)
    assert "BackendUnavailableError: Megatron-core cannot be prepared for cpu" in ended.stderr
    assert "it is too late to redirect it" in ended.stderr
    assert "fix: call hwrl_megatron.prepare_process() before anything imports megatron" in ended.stderr


def test_without_megatron_core_it_is_said_what_to_install() -> None:
    code = (
        "import importlib.util, sys; find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *rest: None if name == 'megatron' else find(name, *rest)\n"
        "from hwrl_megatron import hwrl_train_engine\n"
        "assert not {'torch', 'megatron'} & set(sys.modules)\n"
        "hwrl_train_engine(settings=None, options={}, backend=None, group=None)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, check=False)
    assert "EngineError: train.engine=megatron cannot be used" in ended.stderr
    assert "fix: pip install hwrl[megatron]" in ended.stderr
