"""SavedNames against transformers' own files: names, shapes and values, in both directions."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import Chunk, Interleave, Transpose, WeightConverter, WeightRenaming

from hwrl.errors import UnsupportedError
from hwrl.interfaces import LoraSettings
from hwrl.lora import add_adapter
from hwrl.saved_names import SavedNames
from hwrl.weights import WeightLayout

_EXPERTS = {
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 24, "head_dim": 16},
    "mixtral": {"num_local_experts": 4},
    "olmoe": {"num_experts": 4, "eos_token_id": 1},
    "deepseek_v3": {
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "first_k_dense_replace": 1,
    },
    "gpt_oss": {"num_local_experts": 4, "head_dim": 16},
    "qwen3": {"head_dim": 16, "tie_word_embeddings": True},
}


def _model(architecture: str, *, seed: int = 0) -> Any:
    config = AutoConfig.for_model(
        architecture,
        vocab_size=32,
        hidden_size=64,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        **_EXPERTS[architecture],
    )
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config)


def _saved(model: Any) -> dict[str, torch.Tensor]:
    """Return the parts of the parameters and persistent buffers of ``model``, tied ones once."""
    names = SavedNames.of(model)
    own = dict(model.named_parameters()) | {n: b for n, b in model.named_buffers() if n in model.state_dict()}
    return dict(part for name, tensor in own.items() for part in names.parts(name, tensor.detach()))


@pytest.mark.parametrize("architecture", _EXPERTS)
def test_the_parts_of_a_model_are_the_tensors_of_its_file(architecture: str, tmp_path: Path) -> None:
    model = _model(architecture)
    model.save_pretrained(tmp_path)
    file, parts = load_file(tmp_path / "model.safetensors"), _saved(model)
    assert parts.keys() == file.keys()
    assert all(torch.equal(parts[name], file[name]) for name in file)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)  # knows which names its file had
    assert _saved(again).keys() == file.keys()


@pytest.mark.parametrize("architecture", ["qwen3_moe", "mixtral"])
def test_a_file_is_loaded_by_writing_the_parts(architecture: str, tmp_path: Path) -> None:
    model, other = _model(architecture), _model(architecture, seed=1)
    model.save_pretrained(tmp_path)
    parts = _saved(other)
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        parts[name].copy_(tensor)
    own = model.state_dict()
    assert all(torch.equal(tensor, own[name]) for name, tensor in other.state_dict().items())


def test_a_layout_of_meta_parts_has_no_ties() -> None:
    model = _model("qwen3_moe")
    meta = _saved(model.to("meta"))
    layout = WeightLayout.plan(meta.items())
    assert len(layout.entries) == 2 * (9 + 3 * 4) + 3
    assert all(entry.alias_of is None for entry in layout.entries)
    assert layout.payload_nbytes == sum(4 * parameter.numel() for parameter in model.parameters())


def test_an_adapter_in_the_model_changes_no_saved_name_of_the_base() -> None:
    model = _model("qwen3_moe")
    wanted = _saved(model).keys()
    adapted = add_adapter(model, LoraSettings(rank=2, alpha=4, target_modules=("q_proj",)))
    names = SavedNames.of(adapted)
    assert "model.layers.0.mlp.experts.3.up_proj.weight" in wanted
    parameter = adapted.model.layers[0].mlp.experts.gate_up_proj
    found = dict(names.parts("model.layers.0.mlp.experts.gate_up_proj", parameter))
    assert found.keys() == {name for name in wanted if ".0.mlp.experts." in name and "down" not in name}
    weight = adapted.model.layers[0].self_attn.q_proj.base_layer.weight
    assert next(iter(names.parts("model.layers.0.self_attn.q_proj.weight", weight)))[1] is weight


def _with_conversions(*conversions: Any) -> Any:
    model = _model("qwen3")
    model.config.model_type = "hwrl_test"
    register_checkpoint_conversion_mapping("hwrl_test", list(conversions), overwrite=True)
    return model


def test_a_transposed_parameter_is_a_view_and_not_contiguous() -> None:
    turned = WeightConverter("mlp.up.weight", "mlp.up_proj.weight", operations=[Transpose(0, 1)])
    model = _with_conversions(turned, WeightRenaming("pre_norm", "input_layernorm"))
    weight = model.model.layers[0].mlp.up_proj.weight.detach()
    ((name, part),) = SavedNames.of(model).parts("model.layers.0.mlp.up_proj.weight", weight)
    assert (name, part.is_contiguous()) == ("model.layers.0.mlp.up.weight", False)
    assert torch.equal(part, weight.T)
    assert part.data_ptr() == weight.data_ptr()


def test_computed_values_and_joined_parameters_are_refused_with_the_architecture() -> None:
    computed = WeightConverter("mlp.up.weight", "mlp.up_proj.weight", operations=[Interleave(0)])
    with pytest.raises(UnsupportedError, match=r"Qwen3ForCausalLM.*\n.*mlp.up.weight in a file is no view"):
        SavedNames.of(_with_conversions(computed))
    joined = WeightConverter("mlp.both.weight", ["mlp.gate_proj.weight", "mlp.up_proj.weight"], operations=[Chunk(0)])
    with pytest.raises(UnsupportedError, match=r"mlp.both.weight in a file is no view of one parameter"):
        SavedNames.of(_with_conversions(joined))


def test_parts_refuse_another_shape_and_a_layout_that_cannot_be_divided() -> None:
    model = _model("qwen3_moe")
    names, name = SavedNames.of(model), "model.layers.0.mlp.experts.down_proj"
    with pytest.raises(ValueError, match=r"has the shape \[4, 64, 24\], and the tensor \[2, 64, 24\]"):
        next(names.parts(name, torch.zeros(2, 64, 24)))
    with pytest.raises(ValueError, match="only a contiguous tensor"):
        next(names.parts(name, torch.zeros(4, 24, 64).mT))
