"""A model is read by parts: the same values as transformers', or the same refusal."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config, Qwen3Config, Qwen3MoeConfig

from hwrl.errors import DataError
from hwrl.model_files import ModelFiles
from hwrl.models import build_meta_model, load_model

SMALL = {"vocab_size": 24, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 8}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
MIXTURE = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 6}
CONFIGS: dict[str, Any] = {
    "untied": Qwen3Config(**SMALL, **HEADS, tie_word_embeddings=False),
    "tied": Qwen3Config(**SMALL, **HEADS, tie_word_embeddings=True),
    "transposed": GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=24, n_positions=32),
    "mixture": Qwen3MoeConfig(**SMALL, **HEADS, **MIXTURE),
}


@pytest.fixture(scope="module", params=CONFIGS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(request.param, tmp_path_factory.mktemp(request.param))


def write(kind: str, directory: Path, **saving: Any) -> Path:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(CONFIGS[kind]).save_pretrained(directory, **saving)
    return directory


def opened(directory: Path) -> ModelFiles:
    return ModelFiles(directory, build_meta_model(directory, dtype=torch.float32))


def test_every_part_has_the_values_that_transformers_loads(model: Path) -> None:
    files, wanted = opened(model), load_model(model, dtype=torch.float32).state_dict()
    assert files.why_whole is None
    for name, tensor in wanted.items():
        for dim in range(tensor.dim()):
            for ranks in (1, 2, 3):
                size = -(-tensor.shape[dim] // ranks)
                for start in range(0, tensor.shape[dim], size):
                    part = tensor.narrow(dim, start, min(size, tensor.shape[dim] - start))
                    out = torch.full(part.shape, torch.nan)
                    files.read(name, out, dim=dim, start=start)
                    assert torch.equal(out, part), (name, dim, start)


def test_a_meta_model_has_the_buffers_and_settings_of_a_loaded_one(model: Path) -> None:
    meta, loaded = build_meta_model(model, dtype=torch.float32), load_model(model, dtype=torch.float32)
    assert all(parameter.is_meta for parameter in meta.parameters())
    buffers = dict(meta.named_buffers())
    assert buffers.keys() == dict(loaded.named_buffers()).keys()
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in loaded.named_buffers())
    assert [name for name, _ in meta.named_parameters()] == [name for name, _ in loaded.named_parameters()]  # ties, too
    assert meta.config.dtype == loaded.config.dtype and meta.dtype == loaded.dtype
    assert torch.nn.Linear(2, 2).weight.device.type == "cpu", "only the model is on the meta device"


def test_several_files_are_read_and_cast(tmp_path: Path) -> None:
    write("mixture", tmp_path, max_shard_size="4KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    wanted = load_model(tmp_path, dtype=torch.float32).state_dict()["model.layers.1.mlp.experts.gate_up_proj"]
    out = torch.empty((2, *wanted.shape[1:]), dtype=torch.bfloat16)
    opened(tmp_path).read("model.layers.1.mlp.experts.gate_up_proj", out, start=3)
    assert torch.equal(out, wanted[3:].bfloat16())


def test_two_equal_copies_of_a_tied_tensor_are_one_and_others_are_refused(tmp_path: Path) -> None:
    tensors = load_file(write("tied", tmp_path) / "model.safetensors")
    inside = tensors["model.embed_tokens.weight"]
    out = torch.empty(4, 16)
    for values in (inside, inside + 1):
        save_file({**tensors, "lm_head.weight": values.clone()}, tmp_path / "model.safetensors", {"format": "pt"})
        files = opened(tmp_path)
        assert files.why_whole is None
        if values is inside:
            files.read("model.embed_tokens.weight", out, start=8)
            assert torch.equal(out, inside[8:12])
        else:
            with pytest.raises(DataError, match="tie_word_embeddings=true"):
                files.read("model.embed_tokens.weight", out, start=8)


def change(model: Path, do: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(model / "model.safetensors")
    do(tensors)
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})


def drop_an_expert(model: Path) -> None:
    change(model, lambda tensors: tensors.pop("model.layers.0.mlp.experts.3.up_proj.weight"))


def drop_a_norm(model: Path) -> None:
    change(model, lambda tensors: tensors.pop("model.norm.weight"))


def add_one(model: Path) -> None:
    change(model, lambda tensors: tensors.update({"model.extra.weight": torch.ones(2)}))


def reshape_one(model: Path) -> None:
    change(model, lambda tensors: tensors.update({"model.norm.weight": torch.ones(2)}))


def cut(model: Path) -> None:
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def replace_by_a_pipe(model: Path) -> None:
    (model / "model.safetensors").unlink()
    os.mkfifo(model / "model.safetensors")


def index_a_missing_file(model: Path) -> None:
    (model / "model.safetensors").unlink()
    weight_map = {"model.norm.weight": "model-00001-of-00001.safetensors"}
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def hold_an_adapter(model: Path) -> None:
    (model / "adapter_config.json").write_text("{}")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (drop_a_norm, r"it lacks model\.norm\.weight"),
        (drop_an_expert, r"it lacks model\.layers\.0\.mlp\.experts\.3\.up_proj\.weight"),
        (add_one, r"has, but the model does not, model\.extra\.weight"),
        (reshape_one, r"another shape model\.norm\.weight \(\[2\] there, \[16\] here\)"),
        (cut, "SafetensorError"),
        (replace_by_a_pipe, "no regular file"),
        (index_a_missing_file, "it is missing"),
        (hold_an_adapter, "merge the adapter"),
    ],
)
def test_files_that_do_not_fit_are_refused_before_they_are_read(
    tmp_path: Path, damage: Callable[[Path], None], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    damage(write("mixture", tmp_path))
    monkeypatch.setattr("hwrl.safetensors_files.TensorFiles.read", None)
    with pytest.raises(DataError, match=message):
        opened(tmp_path)


def test_files_under_other_names_are_left_to_transformers(tmp_path: Path) -> None:
    write("transposed", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    short = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    assert short.keys() != tensors.keys()
    save_file(short, tmp_path / "model.safetensors", metadata={"format": "pt"})
    load_model(tmp_path, dtype=torch.float32)  # as published GPT-2
    why = opened(tmp_path).why_whole
    assert why is not None and "transformers renames or converts" in why


def test_pickled_weights_are_left_to_transformers(tmp_path: Path) -> None:
    tensors = load_file(write("untied", tmp_path / "safe") / "model.safetensors")
    shutil.copy(tmp_path / "safe" / "config.json", tmp_path)
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    assert opened(tmp_path).why_whole == "it has no safetensors files"
