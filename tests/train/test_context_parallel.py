"""Ranks that share each pack take the steps of one rank, and keep a share of its activations."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GraniteConfig, MistralConfig, Qwen3Config, Qwen3MoeConfig

import hwrl
from hwrl.comm import serve_store, store_address
from hwrl.errors import ConfigError
from hwrl.interfaces import Batch, EngineSettings, LoraSettings
from hwrl.testing.processes import run_processes
from hwrl.train import FsdpEngine, MicroBatch, OutputScorer, PolicyLoss, fsdp_memory
from hwrl.train.causal import CausalModel
from hwrl.train.context_parallel import ContextGroup, HeadExchange
from hwrl.train.packing import PackShare, make_pack
from hwrl.train.pass_memory import measure_pass
from tests.support.fsdp_training import batch_of, engine_on, full, groups_of, join, without_padding
from tests.support.near import assert_near
from tests.support.packed_models import PACKED, SIZES, Leaking, random_model
from tests.support.roomy import Roomy

SMALL: dict[str, Any] = SIZES | {
    "vocab_size": 16,
    "head_dim": 8,
    "initializer_range": 0.3,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
}
CONFIGS = {
    "two-key-heads": Qwen3Config(**SMALL),
    "one-key-head": Qwen3Config(**SMALL | {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "experts": Qwen3MoeConfig(
        **SMALL, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2, sliding_window=None
    ),
    "scaled-logits": GraniteConfig(**SMALL, logits_scaling=3.0),
    "three-heads": Qwen3Config(**SMALL | {"num_attention_heads": 3, "num_key_value_heads": 3}),
    "window": MistralConfig(**SMALL, sliding_window=64),
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
        context = ContextGroup(size, backend=hwrl.get_backend(), timeout_s=600.0)
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

    def keep_gradients(*_: object) -> None:
        trained = [one for one in engine.model.parameters() if one.grad is not None]
        found["gradients"].append([full(parameter.grad).clone() for parameter in trained])

    engine.optimizer.register_step_pre_hook(keep_gradients)
    for batch in batches():
        mine = batch.select(torch.arange(batch.rows)[engine.data_parallel_rank :: engine.data_parallel_size])
        found["metrics"].append(without_padding(engine.train_batch(mine, loss=PolicyLoss("decoupled"))))
    found["logprobs"] = engine.logprobs(batches()[0])
    weights = engine.named_adapter() if engine.settings.lora else engine.named_weights()
    found["weights"] = {name: tensor.clone() for name, tensor in weights}
    engine.close()  # with the step on the host, one rank has made a default group
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
            assert metrics == pytest.approx(wanted, rel=1e-4, abs=1e-5)
        assert len(alone["gradients"][0]) > 1
        assert_near(one["gradients"], alone["gradients"])
        assert_near(one["logprobs"], alone["logprobs"])
    assert together[0]["weights"].keys() == alone["weights"].keys()
    assert_near(together[0]["weights"], alone["weights"], share=1e-3)


CASES: dict[str, tuple[str, int, int, dict[str, Any]]] = {
    "two ranks": ("two-key-heads", 2, 2, {"micro_batch_tokens": 37}),
    "two pairs, two copies": ("two-key-heads", 4, 2, {"micro_batch_tokens": 10, "shard_ranks": 2}),
    "four ranks, shared key heads": ("one-key-head", 4, 4, {"activation_checkpointing": True}),
    "experts, the step on the host": ("experts", 2, 2, {"host_step": True}),
    "adapter": ("two-key-heads", 2, 2, {"lora": LoraSettings(rank=4, alpha=8.0)}),
    "four ranks, logits": ("scaled-logits", 4, 4, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_ranks_that_share_packs_take_the_steps_of_one(models: Path, case: str) -> None:
    name, ranks, context, changes = CASES[case]
    assert_equal_steps(models / name, ranks=ranks, context=context, **changes)


def scores_of(name: str, share: PackShare, context: ContextGroup | None) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the scores of the share's targets (targets × 2), and the gradients of the parameters."""
    model, batch = random_model(PACKED[name]), batch_of(groups_of(2, seed=0))
    causal = CausalModel(backend=hwrl.get_backend(), scorer=OutputScorer(0.8, 3 * 48), context=context)
    causal.prove(model, dtype=torch.float32)
    assert causal.packs
    part = make_pack(batch, torch.arange(batch.rows), device=torch.device("cpu"), share=share)
    scores = causal(model, part)[:, : part.trained_tokens]
    weights = (part.rows * 7 + part.columns).cos()
    gradients = torch.autograd.grad((scores[0] * weights).sum(), list(model.parameters()))
    return scores.detach().t(), list(gradients)


def score_in_pairs(rank: int, address: str) -> dict[str, tuple[torch.Tensor, list[torch.Tensor]]]:
    group = join(rank, address, 2)
    assert group is not None
    context = ContextGroup(2, backend=hwrl.get_backend(), timeout_s=600.0)
    found = {name: scores_of(name, context.share, context) for name in PACKED}
    group.close()
    return found


def test_every_model_that_trains_in_packs_can_be_shared() -> None:
    store = serve_store()
    first, second = run_processes(score_in_pairs, 2, store_address(store))
    for name in PACKED:
        scores, gradients = scores_of(name, PackShare(), None)
        assert_near(torch.cat([first[name][0], second[name][0]]), scores)
        added = [one + other for one, other in zip(first[name][1], second[name][1], strict=True)]
        assert_near(added, gradients)


# -- memory and compilation ------------------------------------------------------------------------------------------


def kept_nbytes(model: Any, causal: CausalModel, part: MicroBatch) -> int:
    """Return the bytes that a forward pass keeps for its backward pass, beside the parameters."""
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        scores = causal(model, part)
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    assert scores.requires_grad
    return sum(nbytes for place, nbytes in kept.items() if place not in own)


def measure(share: PackShare, context: ContextGroup | None) -> int:
    model, tokens = random_model(Qwen3Config(**SIZES | {"num_key_value_heads": 4})), 2049
    causal = CausalModel(backend=hwrl.get_backend(), scorer=OutputScorer(), context=context)
    causal.prove(model, dtype=torch.float32)
    mask = torch.ones(1, tokens, dtype=torch.bool)
    batch = Batch(torch.full((1, tokens), 3), mask, torch.zeros(1, tokens), torch.ones(1))
    part = make_pack(batch, torch.tensor([0]), device=torch.device("cpu"), share=share)
    return kept_nbytes(model, causal, part)


def measure_in_groups(rank: int, address: str) -> list[int]:
    """Return the bytes that this rank keeps of a row that two ranks share, and of one that four share."""
    group = join(rank, address, 4)
    assert group is not None
    contexts = [ContextGroup(size, backend=hwrl.get_backend(), timeout_s=600.0) for size in (2, 4)]
    found = [measure(context.share, context) for context in contexts]
    group.close()
    return found


def test_the_activations_of_a_row_are_divided_by_its_ranks() -> None:
    alone = measure(PackShare(), None)
    store = serve_store()
    for by_two, by_four in run_processes(measure_in_groups, 4, store_address(store)):
        assert by_two == pytest.approx(alone / 2, rel=0.02)
        assert by_four == pytest.approx(alone / 4, rel=0.02)


@pytest.mark.parametrize(("name", "ranks"), [("two-key-heads", 2), ("one-key-head", 4)])
def test_the_planned_activations_are_divided_too(models: Path, name: str, ranks: int) -> None:
    size = {"dtype": torch.float32, "directory": models / name}
    alone = measure_pass(tokens=1024, targets=1024, **size)
    shared = measure_pass(tokens=1024 // ranks, targets=1024 // ranks, context_parallel=ranks, **size)
    assert alone.measured and shared.measured
    assert shared.inputs == tuple(nbytes // ranks for nbytes in alone.inputs)
    # Attention keeps its result a second time, for heads; and one key head is there for each rank.
    result, keys = 1024 * 32 * 4 // ranks, 2 * 1024 * 8 * 4 * (1 if ranks == 4 else 0) * (ranks - 1) // ranks
    assert [nbytes - result - keys for nbytes in shared.kept] == [nbytes // ranks for nbytes in alone.kept]


def trace(rank: int, address: str) -> int:
    """Trace both exchanges without a break, for several lengths; return the number of graphs."""
    from torch._dynamo.utils import counters

    group = join(rank, address, 2)
    assert group is not None
    context = ContextGroup(2, backend=hwrl.get_backend(), timeout_s=600.0)

    def there_and_back(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        heads = context.to_heads(query, key, value)
        return context.to_tokens(heads[0] * heads[1] + heads[2])

    traced = torch.compile(there_and_back, backend="aot_eager", dynamic=True, fullgraph=True)
    for tokens in (6, 9):
        inputs = [torch.randn(tokens, heads, 8, requires_grad=True) for heads in (4, 2, 2)]
        inputs[1], inputs[2] = (one[:, :1].detach().requires_grad_() for one in inputs[1:])
        results = [function(*inputs) for function in (there_and_back, traced)]
        torch.testing.assert_close(results[1], results[0])
        both = [torch.autograd.grad(result.square().sum(), inputs) for result in results]
        torch.testing.assert_close(both[1], both[0])
    group.close()
    return int(counters["stats"]["unique_graphs"])


@pytest.mark.extended  # the compiler's imports alone take seconds
def test_a_compiler_traces_the_exchanges_once_for_all_lengths() -> None:
    store = serve_store()
    assert run_processes(trace, 2, store_address(store)) == [1, 1]


def recompute(rank: int, directory: Path, address: str) -> list[int]:
    """Take steps with no room on the first rank and much on the second; return how many layers each step recomputed."""
    group = join(rank, address, 2)
    assert group is not None
    settings = EngineSettings(model_directory=directory, learning_rate=1e-3, total_steps=10, context_parallel=2)
    engine = FsdpEngine(settings, backend=Roomy(-1 << 40 if rank == 0 else 1 << 40), group=group)
    found = []
    for seed in range(3):
        engine.train_batch(batch_of(groups_of(5, seed=seed)), loss=PolicyLoss())
        found.append(engine.checkpointing.recomputed)
    group.close()
    return found


def test_ranks_that_share_packs_recompute_the_same_layers(models: Path) -> None:
    store = serve_store()
    first, second = run_processes(recompute, 2, models / "two-key-heads", store_address(store), timeout_s=600)
    assert first == second
    assert first[-1] == 2


# -- refusals -------------------------------------------------------------------------------------------------------


def refusals(rank: int, models: Path, address: str) -> list[str]:
    group = join(rank, address, 2)
    found = []
    for name, size in (("window", 2), ("three-heads", 2), ("two-key-heads", 3)):
        with pytest.raises(ConfigError) as caught:
            engine_on(models / name, group, context_parallel=size)
        found.append(str(caught.value))
    assert group is not None
    group.close()
    return found


def test_what_cannot_be_shared_is_refused_at_the_start(models: Path) -> None:
    store = serve_store()
    for window, heads, ranks in run_processes(refusals, 2, models, store_address(store)):
        assert "MistralForCausalLM cannot be trained with train.context_parallel=2" in window
        assert "its attention has a sliding window" in window
        assert "its 3 attention heads equally" in heads
        assert "train.context_parallel=3 is not possible on 2 rank(s)" in ranks
    planned = EngineSettings(
        model_directory=models / "three-heads", learning_rate=1.0, total_steps=1, context_parallel=2
    )
    with pytest.raises(ConfigError, match="its 3 attention heads equally"):
        fsdp_memory(planned, ranks=2, device_nbytes=1 << 30)
    with pytest.raises(ConfigError, match=r"not possible on 1 rank\(s\)"):
        engine_on(models / "two-key-heads", None, context_parallel=2)


class LastOfMany(HeadExchange):
    """Rank 7 of 8, alone: it gets its own tokens from each of the others."""

    def __init__(self) -> None:
        super().__init__(8, torch.clone)
        self.share = PackShare(7, 8)

    def largest(self, number: float) -> float:
        return number


def test_a_rank_without_a_token_of_the_trial_does_not_refuse_the_model() -> None:
    model = random_model(Qwen3Config(**SIZES | {"num_attention_heads": 8}))
    context: Any = LastOfMany()
    causal = CausalModel(backend=hwrl.get_backend(), scorer=OutputScorer(), context=context)
    causal.prove(model, dtype=torch.float32)
    assert causal.packs


def prove_a_leak(rank: int, address: str) -> str:
    """Prove a model that is wrong on the second rank only: tokens of the first rank are earlier, and not affected."""
    group = join(rank, address, 2)
    assert group is not None
    model = random_model(PACKED["qwen3"])
    if rank == 1:
        model.model.layers[0] = Leaking(model.model.layers[0], wraps=True)
    context = ContextGroup(2, backend=hwrl.get_backend(), timeout_s=600.0)
    with pytest.raises(ConfigError) as caught:
        CausalModel(backend=hwrl.get_backend(), scorer=OutputScorer(), context=context).prove(
            model, dtype=torch.float32
        )
    group.close()
    return str(caught.value)


def test_what_one_rank_finds_wrong_is_refused_on_all() -> None:
    store = serve_store()
    for why in run_processes(prove_a_leak, 2, store_address(store), timeout_s=600):
        assert "the log-probabilities of a short pack differ by" in why
