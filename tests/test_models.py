"""A model directory is used as it is, or refused with the reason; nothing in it is executed."""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPTJConfig, LlamaConfig, OPTConfig, PretrainedConfig

from hwrl.errors import ConfigError, DataError
from hwrl.models import (
    build_meta_model,
    build_model,
    cache_argument,
    load_generation_config,
    load_model,
    load_model_config,
    load_tokenizer,
    model_identity,
    vocabulary_size,
)
from hwrl.run.demo import write_demo


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("demo")
    write_demo(directory, seed=1, prompts=16)
    return directory / "model"


@pytest.fixture
def model(demo: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(demo, tmp_path / "model"))


def weights(model: Path) -> dict[str, torch.Tensor]:
    return load_file(model / "model.safetensors")


def store(model: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})


def configure(model: Path, **values: object) -> None:
    path = model / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def drop_two(model: Path) -> None:
    names = ("model.norm.weight", "lm_head.weight")
    store(model, {name: tensor for name, tensor in weights(model).items() if name not in names})


def add_one(model: Path) -> None:
    store(model, {**weights(model), "model.extra.weight": torch.ones(2)})


def reshape_one(model: Path) -> None:
    store(model, {**weights(model), "model.norm.weight": torch.ones(2)})


def cut(model: Path) -> None:
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def hold_a_class(model: Path) -> None:
    (model / "model.safetensors").unlink()
    torch.save({"lm_head.weight": Path}, model / "pytorch_model.bin")


def hold_no_archive(model: Path) -> None:
    (model / "model.safetensors").unlink()
    (model / "pytorch_model.bin").write_bytes(b"garbage")


def hold_an_adapter(model: Path) -> None:
    (model / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "elsewhere"}))


def tie(model: Path) -> None:
    configure(model, tie_word_embeddings=True)


def misconfigure(model: Path) -> None:
    configure(model, num_hidden_layers="two")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (drop_two, r"it lacks lm_head\.weight and 1 more"),
        (add_one, r"has, but the model does not, model\.extra\.weight"),
        (reshape_one, r"another shape model\.norm\.weight \(\[2\] there, \[64\] here\)"),
        (tie, "tie_word_embeddings=true"),
        (cut, "SafetensorError(.|\n)*fix: name a directory"),
        (hold_no_archive, r"a \.bin file is damaged"),
        (hold_a_class, "holds other objects than tensors"),
        (hold_an_adapter, r"adapter_config\.json(.|\n)*fix: merge the adapter"),
        (misconfigure, "num_hidden_layers"),
    ],
)
def test_a_damaged_model_is_refused_by_name(model: Path, damage: Callable[[Path], None], message: str) -> None:
    load_model(model, dtype=torch.float32)
    damage(model)
    with pytest.raises(DataError, match=message):
        load_model(model, dtype=torch.float32)


@pytest.mark.parametrize(
    "name",
    ["config.json", "chat_template.jinja", "additional_chat_templates/x.jinja", "x.bin", "tokenizer_config.json"],
)
@pytest.mark.parametrize("kind", ["link", "pipe", "device", "directory"])
def test_what_is_no_file_is_not_taken_for_missing_nor_waited_for(model: Path, name: str, kind: str) -> None:
    """transformers would go on without it: without the chat template of a cache that lacks a file, for example."""
    path = model / name
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    if kind in ("link", "device"):
        path.symlink_to("/dev/zero" if kind == "device" else "missing")
    else:
        os.mkfifo(path) if kind == "pipe" else path.mkdir()
    for use in (load_model_config, load_tokenizer, model_identity):
        with pytest.raises(DataError, match=f"{name} cannot be read"):
            use(model)


def test_a_tied_output_layer_is_not_missing(model: Path) -> None:
    tie(model)
    store(model, {name: tensor for name, tensor in weights(model).items() if name != "lm_head.weight"})
    loaded = load_model(model, dtype=torch.float32)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


@pytest.mark.parametrize(
    "load",
    [
        lambda path: load_model(path, dtype=torch.float32),
        lambda path: build_model(path, dtype=torch.float32),
        load_generation_config,
        load_tokenizer,
        vocabulary_size,
    ],
)
def test_code_in_a_model_directory_is_never_run_nor_asked_for(
    model: Path, load: Callable[[Path], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    configure(model, model_type="evil", auto_map={"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"})
    (model / "tokenizer_config.json").write_text(json.dumps({"auto_map": {"AutoTokenizer": ["evil.Tokenizer", None]}}))
    (model / "evil.py").write_text(f"open({str(model / 'ran')!r}, 'w')\n")
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 9))
    with pytest.raises(DataError, match="hwrl runs no code from a model directory"):
        load(model)
    assert not (model / "ran").exists()
    assert sys.stdin.tell() == 0, "no question was answered"


class _Renamed(torch.nn.Module):
    def forward(self, input_ids: torch.Tensor, cache: object = None) -> torch.Tensor:
        return input_ids


def test_the_cache_has_the_name_of_the_installed_transformers(demo: Path) -> None:
    """In 5.24 it is ``cache``. The model of the installed version takes the argument without a warning."""
    assert cache_argument(_Renamed()) == "cache"
    model = load_model(demo, dtype=torch.float32)
    with torch.inference_mode():
        model(torch.tensor([[3, 4]]), **{cache_argument(model): None})


SIZES = {"vocab_size": 48, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
GPT = {"vocab_size": 48, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 20}
TABLES: dict[str, tuple[PretrainedConfig, str]] = {
    "learned": (GPT2Config(**GPT), r"n_positions=20, the rows of transformer\.wpe\.weight"),
    "learned, with an offset": (
        OPTConfig(**SIZES, ffn_dim=48, word_embed_proj_dim=32, max_position_embeddings=20),
        r"max_position_embeddings=20, the rows of model\.decoder\.embed_positions\.weight",
    ),
    "computed": (GPTJConfig(**GPT, rotary_dim=8), r"n_positions=20, the rows of .*embed_positions"),
}


@pytest.mark.parametrize("name", TABLES)
def test_a_model_without_positions_for_the_longest_row_is_refused_by_the_limits_name(name: str, tmp_path: Path) -> None:
    config, why = TABLES[name]
    config.save_pretrained(tmp_path)
    build_meta_model(tmp_path, dtype=torch.float32, max_length=20)
    with pytest.raises(ConfigError, match=rf"may have 21 tokens, and its config\.json has {why}(.|\n)*max_new_tokens"):
        build_meta_model(tmp_path, dtype=torch.float32, max_length=21)


def test_rotation_has_positions_for_any_row(tmp_path: Path) -> None:
    LlamaConfig(**SIZES, intermediate_size=48, max_position_embeddings=20).save_pretrained(tmp_path)
    build_meta_model(tmp_path, dtype=torch.float32, max_length=21)
