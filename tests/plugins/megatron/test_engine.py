"""The Megatron engine on one rank, beside transformers' own forward pass and the FSDP2 engine."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

import hwrl
from hwrl.checkpoint import CheckpointManager
from hwrl.errors import ConfigError, MemoryStateError, UnsupportedError
from hwrl.interfaces import Batch, EngineSettings, LoraSettings, TrainEngine
from hwrl.train import FsdpEngine, PolicyLoss
from tests.support.megatron_models import CONFIGS, SIZES, write_model


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
    torch.testing.assert_close(engine.logprobs(batch)[batch.mask], wanted, atol=2e-5, rtol=1e-5)
    assert_close(copies(engine), copies(other), atol=0.0)
    for seed in range(4):
        metrics, expected = (one.train_batch(batch_of(7, seed=seed), loss=PolicyLoss("tis")) for one in (engine, other))
        assert metrics == pytest.approx(expected, rel=1e-4, abs=1e-6)
    # The gradient of a key's bias is rounding alone, which AdamW makes into a step of a size between 0 and 1e-2.
    assert_close(copies(engine), copies(other), atol=5e-4)
    described = {name: (tensor.shape, tensor.dtype) for name, tensor in engine.weights_metadata()}
    assert described == {name: (tensor.shape, tensor.dtype) for name, tensor in engine.named_weights()}
    engine.export(tmp_path / "exported")
    exported = hf_logprobs(tmp_path / "exported", batch, temperature=0.8)
    torch.testing.assert_close(engine.logprobs(batch)[batch.mask], exported, atol=2e-5, rtol=1e-5)


def test_activation_checkpointing_changes_no_step(model_directory: Path, megatron: Make) -> None:
    after = []
    for lean in (False, True, "auto"):
        engine = megatron(model_directory, activation_checkpointing=lean)
        engine.train_batch(batch_of(7, seed=1), loss=PolicyLoss("tis"))
        after.append(copies(engine))
    assert_close(after[0], after[1], atol=0.0)
    assert_close(after[0], after[2], atol=0.0)


def test_compilation_is_refused_by_name(model_directory: Path, megatron: Make) -> None:
    with pytest.raises(ConfigError, match=r"train\.compile=true"):
        megatron(model_directory, compile=True)


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


@pytest.mark.parametrize("name", ["qwen3", "qwen2-tied-with-padding"])
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
        assert_close(copies(after), wanted, atol=5e-4)


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


# -- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"hidden_act": "gelu"}, "its activation is gelu"),
        ({"use_sliding_window": True, "max_window_layers": 0}, "its attention has a sliding window"),
        ({"attention_bias": True}, "its layers have biases"),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
            "its rotary embedding is scaled",
        ),
    ],
)
def test_a_model_that_would_be_computed_wrongly_is_refused(
    tmp_path: Path, megatron: Make, change: dict[str, Any], why: str
) -> None:
    config = {key: value for key, value in SIZES.items() if key != "rope_theta"}
    directory = write_model(tmp_path / "demo", Qwen3Config(**config, **change))
    with pytest.raises(ConfigError) as caught:
        megatron(directory)
    assert caught.value.why == why
    assert "train.engine=fsdp" in caught.value.fix


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
