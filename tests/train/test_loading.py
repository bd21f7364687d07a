"""Each rank reads its own part of the weights: the same values, and no more host memory than it keeps."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config, Qwen3Config, Qwen3MoeConfig

import hwrl
from hwrl.comm import serve_store, store_address
from hwrl.errors import DataError
from hwrl.interfaces import EngineSettings, LoraSettings
from hwrl.models import build_meta_model, load_model
from hwrl.testing.processes import run_processes
from hwrl.train import FsdpEngine
from hwrl.train.loading import open_model, read_weights
from hwrl.train.sharding import ShardedModel, layers_of
from hwrl.train.state_memory import StateMemory
from tests.support.fsdp_training import engine_on, full, join

SMALL = {"vocab_size": 26, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 8}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
MIXTURE = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
CONFIGS: dict[str, Any] = {
    "tied": Qwen3Config(**SMALL, **HEADS, tie_word_embeddings=True),
    "mixture": Qwen3MoeConfig(**SMALL, **HEADS, **MIXTURE),
    "renamed": GPT2Config(
        n_layer=2, n_embd=16, n_head=2, vocab_size=26, n_positions=32, bos_token_id=1, eos_token_id=1
    ),
}


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models of each kind; the last one is in its files under names that only transformers knows."""
    found = {}
    for kind, config in CONFIGS.items():
        found[kind] = tmp_path_factory.mktemp(kind)
        AutoModelForCausalLM.from_config(config).save_pretrained(found[kind])
    path = found["renamed"] / "model.safetensors"
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})
    return found


def loaded_by(engine: FsdpEngine) -> dict[str, torch.Tensor]:
    parameters = {name: full(one.detach()).cpu().clone() for name, one in engine.model.named_parameters()}
    return {**parameters, **{name: buffer.cpu().clone() for name, buffer in engine.model.named_buffers()}}


def load_all(rank: int, directories: dict[str, Path], address: str, ranks: int) -> dict[str, Any]:
    """Return all that each engine has loaded; in the end the error about ranks with different files."""
    group = join(rank, address, ranks)
    engines = {kind: engine_on(directory, group) for kind, directory in directories.items()}
    found: dict[str, Any] = {kind: loaded_by(engine) for kind, engine in engines.items()}
    if group is not None:
        with pytest.raises(DataError) as caught:
            engine_on(directories["tied"] if rank else Path("nowhere"), group)
        found["error"] = str(caught.value)
        group.close()
    return found


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.extended), 4])
def test_ranks_load_what_transformers_loads(directories: dict[str, Path], ranks: int) -> None:
    store = serve_store()
    results = (
        [load_all(0, directories, "", 1)]
        if ranks == 1
        else run_processes(load_all, ranks, directories, store_address(store), ranks)
    )
    for kind, directory in directories.items():
        model = load_model(directory, dtype=torch.float32)
        wanted = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        for found in results:
            assert found[kind].keys() == wanted.keys(), kind
            assert all(torch.equal(found[kind][name], tensor) for name, tensor in wanted.items()), kind
    for rank, found in enumerate(results if ranks > 1 else []):
        assert ("another rank cannot load the model" if rank else "there is no directory nowhere") in found["error"]


def test_an_adapter_begins_with_the_same_values_as_on_a_real_model(directories: dict[str, Path]) -> None:
    from hwrl.lora import add_adapter

    lora = LoraSettings(rank=2, alpha=4.0)
    real = add_adapter(load_model(directories["tied"], dtype=torch.float32), lora, seed=5)
    wanted = {name: parameter for name, parameter in real.named_parameters() if parameter.requires_grad}
    engine = engine_on(directories["tied"], None, lora=lora, seed=5)
    found = {name: parameter for name, parameter in engine.model.named_parameters() if parameter.requires_grad}
    assert wanted and found.keys() == wanted.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
    assert engine.model.lm_head.weight is engine.model.model.embed_tokens.weight


# -- memory ---------------------------------------------------------------------------------------------------------

LARGE = Qwen3Config(
    vocab_size=256,
    hidden_size=512,
    intermediate_size=2048,
    num_hidden_layers=12,
    num_attention_heads=8,
    num_key_value_heads=8,
    head_dim=64,
    tie_word_embeddings=False,
)


def resident_nbytes(key: str) -> int:
    """Return a line of this process's memory: VmRSS now, VmHWM at its most."""
    found = re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


def load_and_measure(rank: int, directory: Path, address: str, ranks: int) -> tuple[int, int, int]:
    """Load a shard; return by how much the peak of host memory grew, and the bytes of the shard and of a layer."""
    group, backend = join(rank, address, ranks), hwrl.get_backend()
    assert group is not None
    build_meta_model(directory, dtype=torch.float32)  # imports the architecture
    before = resident_nbytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak
    model, reader = open_model(directory, group=group, backend=backend)
    layers = layers_of(model)
    settings = EngineSettings(model_directory=directory, learning_rate=0, total_steps=1)
    memory = StateMemory.of(model, layers, settings, ranks=ranks)
    layer = sum(parameter.numel() * 4 for parameter in layers[0].parameters())
    ShardedModel(
        model,
        layers,
        group=group,
        backend=backend,
        dtype=torch.float32,
        usable_nbytes=lambda: 0,
        memory=memory,
    )
    read_weights(model, reader, directory=directory, group=group, backend=backend)
    peak = resident_nbytes("VmHWM") - before
    group.close()
    return peak, memory.parameters, layer


def test_a_rank_needs_host_memory_for_its_shard_and_one_layer(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(LARGE, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    whole = 4 * sum(parameter.numel() for parameter in model.parameters())
    store = serve_store()
    for peak, shard, layer in run_processes(load_and_measure, 2, tmp_path, store_address(store), 2):
        slack = 16 << 20
        assert shard + layer + slack < 0.75 * whole, "the bound must mean something"
        on_host = shard if hwrl.get_backend().info.device_type == "cpu" else 0
        assert peak < on_host + layer + slack, f"{peak >> 20} MiB; shard {shard >> 20}, layer {layer >> 20}"
