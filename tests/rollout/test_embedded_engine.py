"""The embedded engine against transformers' own generation: same tokens, same log-probabilities, at any batching."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    BloomConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPTJConfig,
    GPTNeoConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MptConfig,
    Phi3Config,
    PretrainedConfig,
)

import hwrl
from hwrl.errors import EngineError
from hwrl.interfaces import Batch, EngineSettings, GenerationRequest, Response, RolloutSettings, Sampling
from hwrl.models import build_model, load_model
from hwrl.rollout import EmbeddedEngine
from hwrl.saved_names import saved_weights
from hwrl.train import FsdpEngine
from tests.support.packed_models import SIZES, random_model
from tests.support.tiny_model import END, generate, requests_of, tiny_model


def engine_of(model: Any, *, eos_ids: Sequence[int] = (END,), **options: Any) -> EmbeddedEngine:
    """Return an engine that serves ``model`` with its own weights as version 0."""
    engine = EmbeddedEngine(model, eos_ids=eos_ids, **options)
    weights, _ = saved_weights(model)
    engine.load_weights({name: tensor.clone() for name, tensor in weights.items()}.items(), version=0)
    return engine


def logprobs_of(model: Any, request: GenerationRequest, response: Response, *, temperature: float) -> np.ndarray:
    """Return what one forward pass over prompt and response says of the response's tokens."""
    tokens = torch.from_numpy(np.concatenate([request.prompt_ids, response.token_ids]).astype(np.int64))[None]
    with torch.no_grad():
        logits = model(tokens).logits[0, len(request.prompt_ids) - 1 : -1] / temperature
    chosen: np.ndarray = logits.log_softmax(-1).gather(1, tokens[0, len(request.prompt_ids) :, None])[:, 0].numpy()
    return chosen


@pytest.mark.parametrize("experts", [0, 4])
def test_greedy_tokens_equal_transformers_generate_whatever_runs_beside(experts: int) -> None:
    model = tiny_model(experts=experts)
    requests = requests_of(60, temperature=0.0)
    responses = generate(engine_of(model, max_running=7, max_length=24), requests)
    for request in requests:
        prompt = torch.from_numpy(request.prompt_ids.astype(np.int64))[None]
        wanted = model.generate(prompt, max_new_tokens=request.sampling.max_new_tokens, do_sample=False)
        assert responses[request.request_id].token_ids.tolist() == wanted[0, len(request.prompt_ids) :].tolist()


def test_what_is_sampled_does_not_depend_on_what_runs_beside() -> None:
    model = tiny_model()
    requests = requests_of(40, temperature=1.0)
    together = generate(engine_of(model, max_running=40, max_length=24), requests)
    in_turns = generate(engine_of(model, max_running=3, max_length=24), requests[::-1])
    for request in requests:
        one, other = together[request.request_id], in_turns[request.request_id]
        assert one.token_ids.tolist() == other.token_ids.tolist()
    assert len({tuple(response.token_ids) for response in together.values()}) > 30


@pytest.mark.parametrize("tokens", [1, 30, 100])
def test_new_prompts_are_taken_in_parts_that_change_nothing(tokens: int) -> None:
    model, requests = tiny_model(), requests_of(20, temperature=0.0)
    wanted = generate(engine_of(model, max_running=20, max_length=24), requests)
    shapes: list[tuple[int, ...]] = []
    model.get_input_embeddings().register_forward_pre_hook(lambda _, args: shapes.append(tuple(args[0].shape)))
    engine = engine_of(model, max_running=20, max_length=24, prefill_tokens=tokens)
    engine.submit(requests)
    responses = {done.request_id: done.response for done in engine.step()}
    assert sum(rows for rows, _ in shapes) == 20
    assert all(rows == 1 or rows * length <= tokens for rows, length in shapes)
    responses.update(generate(engine, []))
    for request_id, response in wanted.items():
        assert responses[request_id].token_ids.tolist() == response.token_ids.tolist()


def test_experts_are_loaded_by_their_own_names_into_the_packed_parameters() -> None:
    engine = EmbeddedEngine(tiny_model(0, experts=4), eos_ids=[END], max_running=2, max_length=24)
    newer = tiny_model(1, experts=4)
    weights, _ = saved_weights(newer)
    with pytest.raises(EngineError, match=r"unknown: \['model\.layers\.0\.mlp\.experts\.down_proj'"):
        engine.load_weights(newer.named_parameters(), version=0)
    with pytest.raises(EngineError, match=r"missing: \['model\.layers\.1\.mlp\.experts\.2\.up_proj\.weight'\]"):
        engine.load_weights(
            ((name, tensor) for name, tensor in weights.items() if "1.mlp.experts.2.up" not in name), version=0
        )
    engine.load_weights(weights.items(), version=0)
    request = GenerationRequest(0, np.array([5, 9], dtype=np.int32), Sampling(8, temperature=0.0))
    (response,) = generate(engine, [request]).values()
    np.testing.assert_allclose(response.logprobs, logprobs_of(newer, request, response, temperature=1.0), atol=1e-4)
    engine.sleep(level=2)
    engine.wake()
    engine.load_weights(weights.items(), version=1)
    (again,) = generate(engine, [request]).values()
    assert again.token_ids.tolist() == response.token_ids.tolist()


def test_the_page_on_vllm_puts_it_to_sleep_and_wakes_it() -> None:
    """Every engine sleeps by these calls; on a device, ``tests/plugins/vllm/test_sleep.py`` runs them with vLLM's."""
    page = (Path(__file__).parents[2] / "docs" / "vllm.md").read_text()
    (block,) = re.findall(r"^```python\n(engine\.sleep.*?)^```", page, re.MULTILINE | re.DOTALL)
    engine, newer = engine_of(tiny_model(0), max_running=2, max_length=24), tiny_model(1)
    weights, _ = saved_weights(newer)
    exec(compile(block, "vllm.md", "exec"), {"engine": engine, "weights": weights.items()})
    assert engine.version == 8
    (request,) = requests_of(1, temperature=0.0)
    (response,) = generate(engine, [request]).values()
    np.testing.assert_allclose(response.logprobs, logprobs_of(newer, request, response, temperature=1.0), atol=1e-4)


def test_logits_of_a_prompt_are_computed_for_its_last_token_only() -> None:
    model = tiny_model()
    places: list[int] = []
    model.lm_head.register_forward_hook(lambda _, args, logits: places.append(logits[..., 0].numel()))
    engine = engine_of(model, max_running=5, max_length=24)
    engine.submit(requests_of(5, temperature=0.0))
    engine.step()
    assert places == [5]


def test_nothing_is_generated_before_the_first_weights() -> None:
    model = tiny_model()
    engine = EmbeddedEngine(model, eos_ids=[END], max_running=2, max_length=24)
    assert engine.version == -1
    assert engine.step() == []
    engine.submit(requests_of(3, temperature=0.0))
    with pytest.raises(EngineError, match=r"3 requests are pending(.|\n)*load_weights"):
        engine.step()
    engine.load_weights(tiny_model(1).named_parameters(), version=0)
    assert len(generate(engine, [])) == 3


def test_persistent_buffers_come_with_the_weights() -> None:
    model, newer = tiny_model(), tiny_model(1)
    for one, value in ((model, 1.0), (newer, 2.0)):
        one.register_buffer("scale", torch.tensor([value]))
    engine = EmbeddedEngine(model, eos_ids=[END], max_running=2, max_length=8)
    with pytest.raises(EngineError, match=r"missing: \['scale'\]"):
        engine.load_weights(newer.named_parameters(), version=0)
    engine.load_weights(newer.state_dict().items(), version=0)
    assert model.scale.item() == 2.0


def test_a_model_with_layers_of_another_kind_is_refused() -> None:
    model = tiny_model()
    model.config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(EngineError, match="layers of the kinds \\['linear_attention'\\]"):
        EmbeddedEngine(model, eos_ids=[END], max_running=2, max_length=24)


SLIDING = "sliding_attention"
WINDOW: dict[str, Any] = {"sliding_window": 8}
CAPPED: dict[str, Any] = {**WINDOW, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 5.0}
GPT: dict[str, Any] = {"vocab_size": 48, "n_embd": 32, "n_layer": 2, "n_positions": 64, "initializer_range": 0.4}
LONGROPE: dict[str, Any] = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 16}
FACTORS = {"short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 6.0, 9.0]}
DYNAMIC: dict[str, Any] = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
SERVED: dict[str, PretrainedConfig] = {
    "a-window": MistralConfig(**SIZES, **WINDOW),
    "a-window-beside-full-attention": Gemma3TextConfig(**SIZES, **WINDOW, layer_types=[SLIDING, "full_attention"]),
    "capped-scores": Gemma2Config(**SIZES, **CAPPED),
    "sinks": GptOssConfig(**SIZES, **WINDOW, num_local_experts=4, num_experts_per_tok=2),
    "gpt-j": GPTJConfig(**GPT, n_head=2, rotary_dim=8),
    "mpt": MptConfig(vocab_size=48, d_model=32, n_layers=2, n_heads=4, max_seq_len=64, initializer_range=0.4),
    "longrope": Phi3Config(
        **{**SIZES, "head_dim": 8}, max_position_embeddings=64, rope_parameters={**LONGROPE, **FACTORS}
    ),
    "dynamic-rope": LlamaConfig(**SIZES, max_position_embeddings=16, rope_parameters=DYNAMIC),
}
REFUSED: dict[str, tuple[PretrainedConfig, str]] = {
    "bloom": (
        BloomConfig(vocab_size=48, hidden_size=32, n_layer=2, n_head=4),
        "it refuses the engine's masks or cache",
    ),
    "gpt-neo": (
        GPTNeoConfig(
            vocab_size=48,
            hidden_size=32,
            num_layers=2,
            attention_types=[[["global", "local"], 1]],
            num_heads=2,
            window_size=8,
            initializer_range=0.4,
        ),
        "its next token beside other rows has another distribution than alone",
    ),
}


def started(config: PretrainedConfig, directory: Path, *, max_length: int) -> tuple[EmbeddedEngine, Any]:
    """Return an engine of a run, and a model with its weights whose rows are computed one by one."""
    random_model(config).save_pretrained(directory)
    settings = RolloutSettings(
        model_directory=directory, dtype=torch.float32, eos_ids=[47], max_running=4, max_length=max_length
    )
    engine = EmbeddedEngine.from_settings(settings, backend=hwrl.get_backend())
    alone = build_model(directory, dtype=torch.float32, max_length=max_length).eval()
    alone.load_state_dict(load_model(directory, dtype=torch.float32).state_dict())
    engine.load_weights(((name, one.clone()) for name, one in saved_weights(alone)[0].items()), version=0)
    return engine, alone


@pytest.mark.parametrize("name", SERVED)
def test_rows_beside_others_have_the_numbers_of_rows_alone_and_of_the_trainer(name: str, tmp_path: Path) -> None:
    engine, alone = started(SERVED[name], tmp_path, max_length=30)
    random = np.random.default_rng(0)
    requests = [
        GenerationRequest(number, random.integers(1, 47, size=prompt).astype(np.int32), Sampling(new))
        for number, (prompt, new) in enumerate([(3, 20), (20, 9), (5, 25), (12, 12), (1, 29), (25, 4)])
    ]
    responses = generate(engine, requests)
    rows = torch.zeros(6, 30, dtype=torch.long)
    mask = torch.zeros(6, 30, dtype=torch.bool)
    for row, request in enumerate(requests):
        response = responses[row]
        wanted = logprobs_of(alone, request, response, temperature=1.0)
        np.testing.assert_allclose(response.logprobs, wanted, atol=1e-4)
        begin, end = len(request.prompt_ids), len(request.prompt_ids) + len(response.token_ids)
        rows[row, :begin], rows[row, begin:end] = (
            torch.from_numpy(one) for one in (request.prompt_ids, response.token_ids)
        )
        mask[row, begin:end] = True
    settings = EngineSettings(model_directory=tmp_path, learning_rate=1e-3, total_steps=1, max_length=30)
    trainer = FsdpEngine(settings, backend=hwrl.get_backend(), group=None)
    trained = trainer.logprobs(Batch(rows, mask, torch.zeros(6, 30), torch.zeros(6)))
    sampled = np.concatenate([responses[row].logprobs for row in range(6)])
    np.testing.assert_allclose(trained[mask].numpy(), sampled, atol=1e-4)


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_reads_masks_in_another_way_is_refused_before_its_first_token(name: str, tmp_path: Path) -> None:
    config, why = REFUSED[name]
    engine, _ = started(config, tmp_path, max_length=30)
    engine.submit([GenerationRequest(0, np.array([5], dtype=np.int32), Sampling(4))])
    with pytest.raises(EngineError, match=f"cannot generate with \\w+ForCausalLM(.|\\n)*{why}"):
        engine.step()


def test_a_model_whose_rotation_would_change_with_the_longest_row_is_refused() -> None:
    model = random_model(SERVED["dynamic-rope"])
    EmbeddedEngine(model, eos_ids=[END], max_running=2, max_length=16)
    with pytest.raises(EngineError, match="rotary frequencies would depend on the longest of the running rows"):
        EmbeddedEngine(model, eos_ids=[END], max_running=2, max_length=17)


def test_tied_weights_may_come_under_one_of_their_names() -> None:
    engine = engine_of(tiny_model(tied=True), max_running=2, max_length=8)
    given = dict(tiny_model(1, tied=True).named_parameters())
    assert "lm_head.weight" not in given
    engine.load_weights(given.items(), version=1)
    assert engine.version == 1


def test_weights_of_another_model_are_refused_and_the_old_ones_serve_on() -> None:
    model = tiny_model()
    engine = engine_of(model, max_running=2, max_length=8)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    wrong = dict(tiny_model(1).named_parameters())
    wrong.pop("model.norm.weight")
    wrong["model.extra"] = torch.zeros(1)
    with pytest.raises(EngineError, match=r"model\.norm\.weight(.|\n)*model\.extra"):
        engine.load_weights(wrong.items(), version=9)
    assert engine.version == 0
    assert all(torch.equal(before[name], parameter) for name, parameter in model.named_parameters())


@pytest.mark.parametrize("prompt", [0, 9])
def test_a_request_that_can_never_fit_is_refused(prompt: int) -> None:
    engine = engine_of(tiny_model(), max_running=2, max_length=8)
    with pytest.raises(EngineError, match=r"does not fit(.|\n)*data.max_prompt_tokens"):
        engine.submit([GenerationRequest(0, np.full(prompt, 3, dtype=np.int32), Sampling(2))])
