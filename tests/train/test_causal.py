"""Which models train in packs, which with a replaced output layer, and that both change no result."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BloomConfig,
    FalconConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPTJConfig,
    GptOssConfig,
    Lfm2Config,
    LlamaConfig,
    MistralConfig,
    MptConfig,
    PretrainedConfig,
    Qwen3NextConfig,
)

import hwrl
from hwrl.errors import ConfigError
from hwrl.interfaces import Batch
from hwrl.train import MicroBatch, OutputScorer
from hwrl.train.causal import CausalModel
from hwrl.train.packing import make_pack, make_rows
from tests.support.near import assert_near
from tests.support.packed_models import PACKED, SIZES, Leaking, random_model

ROPE: dict[str, Any] = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
HYBRID: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "num_experts": 0,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
PLAIN: dict[str, Any] = {"vocab_size": 48, "hidden_size": 32, "initializer_range": 0.4}
GPT: dict[str, Any] = {"vocab_size": 48, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}
FALCON = FalconConfig(**PLAIN, num_hidden_layers=2, num_attention_heads=4, alibi=True)
BLOOM = BloomConfig(**PLAIN, n_layer=2, n_head=4)
MPT = MptConfig(vocab_size=48, d_model=32, n_layers=2, n_heads=4, max_seq_len=64, initializer_range=0.4)
ROWS: dict[str, tuple[PretrainedConfig, str]] = {
    "mistral": (MistralConfig(**SIZES, sliding_window=64), "its attention has a sliding window"),
    "gemma3": (Gemma3TextConfig(**SIZES), "it has layers of sliding_attention"),
    "alibi": (FALCON, "it does not use transformers' attention interface"),
    "convolutions": (Lfm2Config(**SIZES, layer_types=["conv", "full_attention"]), "it has layers of conv"),
    "linear-attention": (Qwen3NextConfig(**SIZES, **HYBRID), "it has layers of linear_attention"),
    "gemma2": (Gemma2Config(**SIZES, query_pre_attn_scalar=16), "it has layers of sliding_attention"),
    "gpt-oss": (GptOssConfig(**SIZES, num_local_experts=4), "it has layers of sliding_attention"),
    "gpt-j": (GPTJConfig(**GPT, rotary_dim=8), "it does not use transformers' attention interface"),
    "bloom": (BLOOM, "it does not use transformers' attention interface"),
    "mpt": (MPT, "it does not use transformers' attention interface"),
}
LOGITS = {"cohere-scaled-logits", "granite-scaled-logits", "gemma3-capped-logits", "gemma2"}
ALL = PACKED | {name: config for name, (config, _) in ROWS.items()}


def proven(
    config: PretrainedConfig, *, dtype: torch.dtype = torch.float32, max_length: int | None = None
) -> tuple[Any, CausalModel]:
    model = random_model(config)
    causal = CausalModel(backend=hwrl.get_backend(), scorer=OutputScorer(0.8, 3 * 48))
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        causal.prove(model, dtype=dtype, max_length=max_length)
    return model, causal


def batch() -> Batch:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.tensor([9, 14, 4, 2, 11])
    places = torch.arange(14)
    tokens = torch.randint(1, 48, (5, 14), generator=generator) * (places < lengths[:, None])
    mask = (places >= 2) & (places < lengths[:, None])
    return Batch(tokens, mask, torch.zeros(5, 14), torch.zeros(5))


def plain(model: Any) -> torch.Tensor:
    """Return log-probability and entropy of the response tokens from all logits of each row by itself."""
    rows, whole = [], batch()
    for row, length in enumerate((9, 14, 4, 2, 11)):
        distribution = (model(whole.tokens[row : row + 1, : length - 1]).logits[0].float() / 0.8).log_softmax(-1)
        logprobs = distribution.gather(1, whole.tokens[row, 1:length, None])[:, 0]
        rows.append(torch.stack([logprobs, -(distribution.exp() * distribution).sum(-1)])[:, 1:])
    return torch.cat(rows, 1)


def called(model: Any, causal: CausalModel) -> tuple[MicroBatch, torch.Tensor]:
    form = make_pack if causal.packs else make_rows
    part = form(batch(), torch.arange(5), device=torch.device("cpu"))
    return part, causal(model, part)[:, : part.trained_tokens]


def gradients(model: Any, scores: torch.Tensor) -> dict[str, torch.Tensor]:
    parameters = dict(model.named_parameters())
    weights = torch.linspace(-1, 1, scores.shape[1])
    found = torch.autograd.grad((scores[0] * weights).sum(), list(parameters.values()))
    return dict(zip(parameters, found, strict=True))


@pytest.mark.parametrize("name", ALL)
def test_each_model_is_called_in_the_fastest_right_way(name: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    model, causal = proven(ALL[name], max_length=40)
    assert causal.packs == (name in PACKED)
    assert causal.scores == (name not in LOGITS)
    _, scores = called(model, causal)
    wanted = plain(model)
    assert_near(scores, wanted)
    theirs = gradients(model, wanted)
    for parameter, gradient in gradients(model, scores).items():
        largest = max(1.0, float(theirs[parameter].abs().max()))
        torch.testing.assert_close(gradient, theirs[parameter], atol=1e-4 * largest, rtol=1e-4, msg=parameter)
    reasons = [record.message for record in caplog.records if "padded rows" in record.message]
    assert len(reasons) == (name in ROWS)
    assert all(ROWS[name][1] in reason for reason in reasons)


def test_bfloat16_trains_in_packs(caplog: pytest.LogCaptureFixture) -> None:
    model, causal = proven(PACKED["qwen3"], dtype=torch.bfloat16)
    assert (causal.packs, causal.scores) == (True, True)
    with torch.autocast("cpu", torch.bfloat16):
        _, scores = called(model, causal)
        assert (scores - plain(model)).abs().mean() < 0.05
    assert not caplog.records


def test_a_plain_call_of_a_model_that_packs_is_right() -> None:
    model, _ = proven(PACKED["qwen3"])
    other = AutoModelForCausalLM.from_config(model.config, attn_implementation="sdpa").eval()
    other.load_state_dict(model.state_dict())
    tokens = batch().tokens
    torch.testing.assert_close(model(tokens).logits, other(tokens).logits)


def test_the_trial_finds_a_model_whose_rows_see_each_other(caplog: pytest.LogCaptureFixture) -> None:
    model, _ = proven(PACKED["qwen3"])
    model.config._attn_implementation = "eager"
    model.model.layers[1] = Leaking(model.model.layers[1])
    causal = CausalModel(backend=hwrl.get_backend(), scorer=OutputScorer())
    causal.prove(model, dtype=torch.float32)
    assert not causal.packs
    assert model.config._attn_implementation == "eager", "its own attention may do more than sdpa, as with sinks"
    assert "the log-probabilities of a short pack differ by" in caplog.text


class Averaging(torch.nn.Module):
    """A layer that normalizes each token by the mean over the rows."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden: torch.Tensor, **inputs: Any) -> Any:
        return self.layer(hidden - hidden.mean(0, keepdim=True) / 2, **inputs)


class Limited(Averaging):
    """A layer that only the first tokens of a call reach, as experts with a capacity: it drops the others."""

    def forward(self, hidden: torch.Tensor, **inputs: Any) -> Any:
        kept = torch.arange(hidden.shape[:2].numel()).view(hidden.shape[:2]) < 12
        return self.layer(hidden * kept[..., None], **inputs)


class Stretching(Averaging):
    """A layer whose result depends on the length of a long call only."""

    def forward(self, hidden: torch.Tensor, **inputs: Any) -> Any:
        return self.layer(hidden * (2 if hidden.shape[1] > 30 else 1), **inputs)


@pytest.mark.parametrize(
    ("layer", "beside"),
    [
        (Averaging, "the rows beside it: it changes by"),
        (Limited, "the rows beside it: it changes by"),
        (Stretching, "the tokens after it, in a row of 40: it changes by"),
    ],
)
def test_a_model_whose_rows_depend_on_each_other_is_refused(layer: type[Averaging], beside: str) -> None:
    model = random_model(PACKED["qwen3"])
    model.model.layers[1] = layer(model.model.layers[1])
    with pytest.raises(ConfigError, match=f"Qwen3ForCausalLM cannot be trained(.|\n)*{beside} \\d\\.\\d"):
        CausalModel(backend=hwrl.get_backend(), scorer=OutputScorer()).prove(model, dtype=torch.float32, max_length=40)


@pytest.mark.parametrize(
    ("config", "beside"),
    [
        (BertConfig(**PLAIN, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48), "the rows beside it"),
        (LlamaConfig(**SIZES, rope_parameters=ROPE, max_position_embeddings=16), "the tokens after it"),
    ],
)
def test_an_architecture_without_causal_numbers_is_refused(config: PretrainedConfig, beside: str) -> None:
    with pytest.raises(ConfigError, match=beside):
        proven(config, max_length=40)


def test_a_kernel_that_refuses_is_a_reason(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("head_dim 7 is not supported")

    monkeypatch.setattr(hwrl.get_backend(), "varlen_attention", refuse)
    model, causal = proven(PACKED["qwen3"])
    assert not causal.packs
    assert "a pack is refused: head_dim 7 is not supported" in caplog.text
    assert_near(called(model, causal)[1], plain(model))
