"""Ranks that share each pack take the steps of one rank, and keep a share of its activations."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, MistralConfig, Qwen3Config, Qwen3MoeConfig

import hwrl
from hwrl.comm import serve_store, store_address
from hwrl.interfaces import Batch, LoraSettings
from hwrl.testing.processes import run_processes
from hwrl.train import PolicyLoss
from hwrl.train.context_parallel import ContextGroup
from hwrl.train.packing import PackShare, make_pack
from tests.support.fsdp_training import batch_of, engine_on, full, groups_of, join, without_padding

SIZES: dict[str, Any] = {
    "vocab_size": 16,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.3,  # far from uniform, so that a wrong position or boundary shows
    "eos_token_id": 1,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
CONFIGS = {
    "two-key-heads": Qwen3Config(**SIZES),
    "one-key-head": Qwen3Config(**SIZES | {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "experts": Qwen3MoeConfig(
        **SIZES, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2, sliding_window=None
    ),
    "three-heads": Qwen3Config(**SIZES | {"num_attention_heads": 3, "num_key_value_heads": 3}),
    "window": MistralConfig(**SIZES, sliding_window=64),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models")
    for name, config in CONFIGS.items():
        torch.manual_seed(5)
        AutoModelForCausalLM.from_config(config).save_pretrained(directory / name)
    return directory


# -- attention ------------------------------------------------------------------------------------------------------

HEADS = [(4, 4), (4, 2), (8, 2), (4, 1), (12, 6)]
"""Heads of query and key. Among four ranks, the last three share key heads; the last one unequally."""
ENDS = [0, 5, 6, 13, 16]


def attention_inputs(heads: int, key_heads: int) -> list[torch.Tensor]:
    """Return query, key, value and the gradient of the result, for all tokens."""
    generator = torch.Generator().manual_seed(heads)
    shapes = [(heads, 8), (key_heads, 8), (key_heads, 8), (heads, 8)]
    return [torch.randn(ENDS[-1], *shape, generator=generator) for shape in shapes]


def attend(inputs: list[torch.Tensor], context: ContextGroup | None) -> list[torch.Tensor]:
    """Return the result and the gradients of query, key and value."""
    mine = [tensor.clone().requires_grad_() for tensor in inputs[:3]]
    exchanged = mine if context is None else context.to_heads(*mine)
    ends = torch.tensor(ENDS, dtype=torch.int32)
    out = hwrl.get_backend().varlen_attention(*exchanged, cu_seqlens=ends, max_length=7)
    out = out if context is None else context.to_tokens(out)
    return [out.detach(), *torch.autograd.grad(out, mine, inputs[3])]


def attend_in_groups(rank: int, address: str) -> None:
    """Compare this rank's part of the attention with all of it, in groups of two and of four."""
    group = join(rank, address, 4)
    assert group is not None
    for size in (2, 4):
        context = ContextGroup(size, backend=hwrl.get_backend(), timeout_s=60.0)
        assert context.share == PackShare(rank % size, size)
        part = context.share.of(ENDS[-1])
        for heads, key_heads in HEADS:
            inputs = attention_inputs(heads, key_heads)
            wanted = [tensor[part] for tensor in attend(inputs, None)]
            torch.testing.assert_close(attend([tensor[part] for tensor in inputs], context), wanted)
    group.close()


def test_shared_attention_and_its_gradients_equal_attention_on_one_rank() -> None:
    store = serve_store()
    run_processes(attend_in_groups, 4, store_address(store))


# -- packs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [[], [2], [0, 1, 2, 3, 4]])
@pytest.mark.parametrize("count", [2, 3, 4])
def test_the_shares_of_a_pack_are_equal_and_hold_each_target_once(rows: list[int], count: int) -> None:
    batch, chosen = batch_of(groups_of(2, seed=0)), torch.tensor(rows, dtype=torch.long)
    whole = make_pack(batch, chosen, device=torch.device("cpu"))
    parts = [
        make_pack(batch, chosen, device=torch.device("cpu"), share=PackShare(index, count)) for index in range(count)
    ]
    (size,) = {part.input_ids.shape for part in parts}
    assert size[1] >= 1
    ids, positions = (torch.cat([getattr(part, name)[0] for part in parts]) for name in ("input_ids", "position_ids"))
    assert torch.equal(ids[: whole.real_tokens], whole.input_ids[0, : whole.real_tokens])
    assert torch.equal(positions[: whole.real_tokens], whole.position_ids[0, : whole.real_tokens])
    assert sum(part.real_tokens for part in parts) == whole.real_tokens
    for name in ("rows", "columns", "behaviour_logprobs", "advantages"):
        assert torch.equal(torch.cat([getattr(part, name) for part in parts]), getattr(whole, name))
    for part in parts:
        assert part.boundaries is not None and int(part.boundaries.cu_seqlens[-1]) == count * size[1]
        assert torch.equal(part.targets[: part.trained_tokens], batch.tokens[part.rows, part.columns])
        before = batch.tokens[part.rows, part.columns - 1]
        assert torch.equal(part.input_ids[0, part.places[: part.trained_tokens]], before)


# -- steps ----------------------------------------------------------------------------------------------------------


def batches() -> list[Batch]:
    """Return the batches of two steps: one has a row without a response, one only two rows of two tokens."""
    uneven, short = (batch_of(groups_of(5, seed=seed)) for seed in range(2))
    uneven.mask[1] = False
    mask = torch.tensor([[False, True], [False, True]])
    pair = Batch(short.tokens[:2, :2], mask, torch.full((2, 2), -2.7) * mask, short.advantages[:2])
    return [replace(one, proximal_logprobs=one.behaviour_logprobs + 0.1 * one.mask) for one in (uneven, pair)]


def steps(rank: int, directory: Path, address: str, ranks: int, context: int, changes: dict[str, Any]) -> Any:
    """Take two steps on this rank's rows; return metrics, gradients, log-probabilities, weights and parts."""
    group = join(rank, address, ranks)
    changes = {"learning_rate": 1e-3, "context_parallel": context, **changes}
    engine = engine_on(directory, group, temperature=0.8, **changes)
    assert (engine.data_parallel_rank, engine.data_parallel_size) == (rank // context, ranks // context)
    found: dict[str, Any] = {"metrics": [], "gradients": []}
    update = engine._update

    def keep_gradients(**rates: float) -> None:
        trained = [one for one in engine.model.parameters() if one.grad is not None]
        found["gradients"].append([full(parameter.grad).clone() for parameter in trained])
        update(**rates)

    engine._update = keep_gradients  # type: ignore[method-assign] # the step goes on
    for batch in batches():
        mine = batch.select(torch.arange(batch.rows)[engine.data_parallel_rank :: engine.data_parallel_size])
        found["metrics"].append(without_padding(engine.train_batch(mine, loss=PolicyLoss("decoupled"))))
    found["logprobs"] = engine.logprobs(batches()[0])
    weights = engine.named_adapter() if engine.settings.lora else engine.named_weights()
    found["weights"] = {name: tensor.clone() for name, tensor in weights}
    if group is not None:
        group.close()
    return found


def assert_equal_steps(directory: Path, *, ranks: int, context: int, **changes: Any) -> None:
    """Compare steps on ``ranks`` ranks, of which ``context`` share each pack, with steps on one."""
    alone = steps(0, directory, "", 1, 1, changes)
    store = serve_store()
    together = run_processes(steps, ranks, directory, store_address(store), ranks, context, changes)
    for one in together:
        for metrics, wanted in zip(one["metrics"], alone["metrics"], strict=True):
            assert metrics == pytest.approx(wanted, rel=1e-5, abs=1e-5)
        assert len(alone["gradients"][0]) > 1
        torch.testing.assert_close(one["gradients"], alone["gradients"], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(one["logprobs"], alone["logprobs"], atol=1e-5, rtol=1e-5)
    assert together[0]["weights"].keys() == alone["weights"].keys()
    torch.testing.assert_close(together[0]["weights"], alone["weights"], atol=1e-5, rtol=1e-5)


CASES: dict[str, tuple[str, int, int, dict[str, Any]]] = {
    "two ranks": ("two-key-heads", 2, 2, {"micro_batch_tokens": 37}),
    "two pairs": ("two-key-heads", 4, 2, {"micro_batch_tokens": 10}),
    "four ranks, shared key heads": ("one-key-head", 4, 4, {"activation_checkpointing": True}),
    "experts": ("experts", 2, 2, {}),
    "adapter": ("two-key-heads", 2, 2, {"lora": LoraSettings(rank=4, alpha=8.0)}),
}


@pytest.mark.parametrize("case", CASES)
def test_ranks_that_share_packs_take_the_steps_of_one(models: Path, case: str) -> None:
    name, ranks, context, changes = CASES[case]
    assert_equal_steps(models / name, ranks=ranks, context=context, **changes)
