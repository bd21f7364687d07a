"""Where runs of a flat buffer lie in Hugging Face tensors: no megatron needed."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import Qwen3Config

from hwrl_megatron.weights import MappedWeight, map_weights

CONFIG = Qwen3Config(num_attention_heads=8, num_key_value_heads=4, head_dim=3, hidden_size=5)


def layers(ranks: int) -> nn.ModuleDict:
    """Return modules with the names and sizes of one rank's GPTModel, numbered through."""
    own = nn.ModuleDict(
        {
            "linear_qkv": nn.Linear(5, 16 * 3 // ranks),
            "linear_proj": nn.Linear(24 // ranks, 5, bias=False),
            "q_layernorm": nn.RMSNorm(3),
        }
    )
    mlp = nn.ModuleDict({"linear_fc1": nn.Linear(5, 28 // ranks, bias=False)})
    layer = nn.ModuleDict({"self_attention": own, "mlp": mlp})
    return nn.ModuleDict({"decoder": nn.ModuleDict({"layers": nn.ModuleList([layer])})})


def of_ranks(ranks: int) -> list[list[MappedWeight]]:
    """Return the weights on each rank, loaded from whole tensors whose elements are all different."""
    mapped = [map_weights(layers(ranks), CONFIG, rank=rank, ranks=ranks) for rank in range(ranks)]
    with torch.no_grad():
        for weights in mapped:
            for weight in weights:
                weight.load(whole(weight))
    return mapped


def whole(weight: MappedWeight) -> torch.Tensor:
    return torch.arange(torch.Size(weight.shape).numel(), dtype=torch.float32).view(weight.shape)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@given(data=st.data())
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # draws lie between the work
def test_rectangles_of_all_runs_cover_each_tensor_once_with_its_own_elements(ranks: int, data: st.DataObject) -> None:
    mapped = of_ranks(ranks)
    for number, weight in enumerate(mapped[0]):
        seen = torch.zeros(weight.shape)
        owners = mapped if weight.dim is not None else mapped[:1]
        for weights in owners:
            flat = weights[number].parameter.detach().flatten()
            cuts = sorted(data.draw(st.sets(st.integers(0, flat.numel()), max_size=4)) | {0, flat.numel()})
            for start, stop in itertools.pairwise(cuts):
                for offset, elements, shape in weights[number].rectangles(start, stop):
                    assert start <= elements.start < elements.stop <= stop
                    place = tuple(slice(at, at + size) for at, size in zip(offset, shape, strict=True))
                    assert torch.equal(flat[elements].view(shape), whole(weight)[place])
                    seen[place] += 1
        assert (seen == 1).all(), weight.name


def test_names_and_shapes_are_those_of_transformers() -> None:
    prefix = "model.layers.0.self_attn."
    shapes = {weight.name: weight.shape for weight in of_ranks(2)[1]}
    assert shapes[f"{prefix}q_proj.weight"] == (24, 5)
    assert shapes[f"{prefix}v_proj.bias"] == (12,)
    assert shapes[f"{prefix}o_proj.weight"] == (5, 24)
    assert shapes[f"{prefix}q_norm.weight"] == (3,)
    assert shapes["model.layers.0.mlp.up_proj.weight"] == (14, 5)
