"""The table of saved tensors, and where runs of flat buffers lie in the model's own state: no megatron needed."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3MoeConfig

import hwrl
from hwrl.comm import Comm, connect_store, serve_store, store_address
from hwrl.errors import DataError
from hwrl.models import load_model_config
from hwrl.safetensors_files import TensorFiles
from hwrl.saved_names import SavedNames
from hwrl.testing.processes import run_processes
from hwrl_megatron.layout import Layout, rank_nbytes, saved_tensors
from hwrl_megatron.loading import load_weights
from hwrl_megatron.weights import MappedWeight, map_weights
from tests.support.megatron_models import CONFIGS, write_model

SMALL: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 6, "vocab_size": 8}
MODELS = {
    "experts": Qwen3MoeConfig(
        **SMALL, num_hidden_layers=2, head_dim=3, num_experts=4, moe_intermediate_size=4, norm_topk_prob=True
    ),
    "biases": Qwen2Config(**SMALL, num_hidden_layers=2, intermediate_size=4, head_dim=3, tie_word_embeddings=True),
}
LAYOUTS = [(1, 1, 1, 1), (2, 1, 1, 1), (1, 2, 1, 2), (2, 2, 2, 1)]
"""Sizes: tensor, data, stages, experts."""


@dataclass
class Parameters:
    """The parameters of one rank's GPTModel: each as large as its saved tensors together."""

    config: Any
    layout: Layout

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        rows: dict[str, list[tuple[int, ...]]] = {}
        for saved in saved_tensors(self.config, self.layout):
            if saved.is_on(self.layout):
                shape = list(saved.shape)
                if saved.dim is not None:
                    shape[saved.dim] //= self.layout.tensor
                rows.setdefault(saved.parameter, []).append(tuple(shape))
        for name, parts in rows.items():
            yield name, nn.Parameter(torch.empty(sum(part[0] for part in parts), *parts[0][1:], dtype=torch.float64))


def own_state(config: Any) -> dict[str, torch.Tensor]:
    """Return the state of a transformers model on the meta device."""
    with torch.device("meta"):
        return dict(AutoModelForCausalLM.from_config(config).state_dict())


def numbered(name: str, state: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return a tensor of the state ``name``, whose elements are all different from each other and any other's."""
    shape = state[name].shape
    return torch.arange(shape.numel(), dtype=torch.float64).view(shape) + 1e6 * list(state).index(name)


def load_all(config: Any, sizes: tuple[int, ...]) -> list[list[MappedWeight]]:
    """Return the weights on each rank, loaded with the files' tensors."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    state, names = dict(model.state_dict()), SavedNames.of(model)
    files = {part: view for name in state for part, view in names.parts(name, numbered(name, state))}
    tensor, data, stages, experts = sizes
    mapped = []
    for rank in range(tensor * data * stages):
        layout = Layout(rank, tensor, data, stages, experts)
        weights = map_weights(cast("nn.Module", Parameters(config, layout)), config, layout)
        with torch.no_grad():
            for weight in weights:
                weight.load(files[weight.saved.name][weight.slices()])
        mapped.append(weights)
    return mapped


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("sizes", LAYOUTS)
def test_rectangles_of_all_runs_cover_the_models_own_tensors_with_their_own_elements(
    sizes: tuple[int, ...], model: str
) -> None:
    config = MODELS[model]
    if model == "biases" and sizes[3] > 1:
        return
    state, draw = own_state(config), random.Random(str(sizes))
    seen = {name: torch.zeros(tensor.shape) for name, tensor in state.items()}
    for weight in itertools.chain(*load_all(config, sizes)):
        flat, name = weight.parameter.detach().flatten(), weight.saved.own_name
        whole = numbered(name, state)
        assert torch.equal(weight.dense().flatten(), whole[weight.own_slices()].flatten())
        cuts = sorted({draw.randint(0, len(flat)) for _ in range(3)} | {0, len(flat)})
        for start, stop in itertools.pairwise(cuts):
            for offset, elements, shape in weight.rectangles(start, stop):
                assert start <= elements.start < elements.stop <= stop
                place = tuple(slice(at, at + size) for at, size in zip(offset, shape, strict=True))
                assert torch.equal(flat[elements].view(shape), whole[place])
                seen[name][place] += 1
    if config.tie_word_embeddings:
        del seen["lm_head.weight"]
    for name, times in seen.items():
        assert (times >= 1).all(), name
        if sizes == (1, 1, 1, 1):
            assert (times == 1).all(), name


@pytest.mark.parametrize("model", CONFIGS)
def test_the_tables_names_and_shapes_are_those_of_transformers(model: str) -> None:
    config = CONFIGS[model]
    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(config)
    state, names = own_state(config), SavedNames.of(whole)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    files = {part: tuple(view.shape) for name in state for part, view in names.parts(name, state[name])}
    for stages in (1, 2):
        table = list(saved_tensors(config, Layout(stages=stages)))
        assert {one.name: one.shape for one in table} == {n: s for n, s in files.items() if n not in tied}
        own = {name: tuple(tensor.shape) for name, tensor in state.items() if name not in tied}
        assert {one.own_name: one.own_shape for one in table} == own
        copies = [one.name for one in table if one.copy]
        assert copies == (["model.embed_tokens.weight"] if tied and stages > 1 else [])
        assert len(table) - len(copies) == len({one.name for one in table}), "each tensor is sent once"


def test_bytes_of_a_rank_are_those_of_its_parameters() -> None:
    config = MODELS["experts"]
    layout = Layout(rank=3, tensor=2, data=2, stages=1, experts=2)
    numel = [parameter.numel() for _, parameter in Parameters(config, layout).named_parameters()]
    named = dict(Parameters(config, layout).named_parameters())
    experts = sum(parameter.numel() for name, parameter in named.items() if ".local_experts." in name)
    assert experts > 0
    found = rank_nbytes(config, layout, dtype=torch.bfloat16)
    assert found["parameters"] == 2 * sum(numel)
    assert found["gradients"] == 4 * sum(numel)
    assert found["optimizer"] == 12 * (experts + (sum(numel) - experts) // 2)


@pytest.mark.parametrize("sizes", LAYOUTS)
def test_each_rank_reads_its_own_parts_only(sizes: tuple[int, ...], tmp_path: Path) -> None:
    directory = write_model(tmp_path / "demo", CONFIGS["qwen3-experts"], max_shard_size="20KB")
    config, read_nbytes = load_model_config(directory), []
    read = TensorFiles.read

    def counting(self: TensorFiles, name: str, index: Sequence[slice] = ()) -> torch.Tensor:
        found = read(self, name, index)
        read_nbytes.append(found.nbytes)
        return found

    tensor, data, stages, experts = sizes
    for rank in range(tensor * data * stages):
        layout = Layout(rank, tensor, data, stages, experts)
        weights = map_weights(cast("nn.Module", Parameters(config, layout)), config, layout)
        read_nbytes.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(TensorFiles, "read", counting)
            load_weights(weights, [], directory, group=None, backend=hwrl.get_backend())
        assert sum(read_nbytes) == sum(4 * weight.view.numel() for weight in weights)


def read_what_differs(rank: int, directory: Path, address: str) -> str:
    group = Comm().init_default(store=connect_store(address), rank=rank, size=2)
    config, layout = load_model_config(directory), Layout(rank, tensor=2)
    weights = map_weights(cast("nn.Module", Parameters(config, layout)), config, layout)
    with pytest.raises(DataError) as caught:
        load_weights(weights, [], directory, group=group, backend=hwrl.get_backend())
    group.close()
    return str(caught.value)


def test_an_error_that_one_rank_reads_is_one_on_all(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "demo", CONFIGS["llama-3-rope"])
    tensors = load_file(directory / "model.safetensors")
    head = tensors["model.embed_tokens.weight"].clone()
    head[-1] += 1  # the second rank's
    save_file({**tensors, "lm_head.weight": head}, directory / "model.safetensors", {"format": "pt"})
    store = serve_store()
    first, second = run_processes(read_what_differs, 2, directory, store_address(store), timeout_s=600)
    assert "another rank cannot load the model" in first
    assert "two tensors that differ" in second
