"""The planned memory of a training step against the measured peak of a real one."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import hwrl
from hwrl.comm import serve_store, store_address
from hwrl.interfaces import Backend, Batch, EngineSettings, LoraSettings, phase_nbytes
from hwrl.lora import described_model
from hwrl.testing.processes import run_processes
from hwrl.train import CriticEngine, FsdpEngine, PolicyLoss, add_in_turns, fsdp_memory, reference_memory
from hwrl.train.pass_memory import PassMemory, measure_pass
from hwrl_bench.plan import peak_of
from tests.support.fsdp_training import join
from tests.support.roomy import Roomy

TOKENS, VOCABULARY = 1024, 2048
ROOM, LITTLE = 1 << 40, 1 << 20
"""Devices with and without room to keep whole weights."""
CASES = list(itertools.product([torch.float32, torch.bfloat16], [False, True]))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    directory = tmp_path_factory.mktemp("model")
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(directory)
    return directory


def settings_of(directory: Path, dtype: torch.dtype, recomputes: bool, **changes: Any) -> EngineSettings:
    settings = EngineSettings(
        model_directory=directory,
        learning_rate=1e-3,
        total_steps=10,
        micro_batch_tokens=TOKENS,
        dtype=dtype,
        activation_checkpointing=recomputes,
    )
    return replace(settings, **changes)


def batch() -> Batch:
    """Return two passes of rows in which all tokens but the first are targets."""
    tokens = torch.randint(3, VOCABULARY, (8, 256))
    mask = torch.ones_like(tokens, dtype=torch.bool)
    mask[:, 0] = False
    return Batch(tokens, mask, torch.full(tokens.shape, -5.0), torch.randn(8))


def measured_step(settings: EngineSettings, backend: Backend, group: Any) -> int:
    def two_steps() -> None:
        engine = FsdpEngine(settings, backend=backend, group=group)
        for _ in range(2):  # the optimizer's state comes with the first step
            engine.train_batch(batch(), loss=PolicyLoss("ppo_clip"))
        engine.close()

    return peak_of(backend, two_steps)


def planned_step(settings: EngineSettings, *, ranks: int, device_nbytes: int = 1 << 40) -> int:
    return phase_nbytes(fsdp_memory(settings, ranks=ranks, device_nbytes=device_nbytes), "step")


def close(planned: int, measured: int) -> bool:
    return abs(planned - measured) <= 0.1 * measured


@pytest.mark.parametrize(("dtype", "recomputes"), CASES)
def test_the_plan_of_one_rank_is_within_a_tenth_of_the_peak(
    directory: Path, dtype: torch.dtype, recomputes: bool
) -> None:
    settings = settings_of(directory, dtype, recomputes)
    planned, measured = planned_step(settings, ranks=1), measured_step(settings, hwrl.get_backend(), None)
    assert close(planned, measured), (planned, measured)


@pytest.mark.extended  # the compiler takes 50 processor-seconds
@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")  # torch's own, in its compiler
def test_the_plan_of_compiled_layers_is_within_a_tenth_of_the_peak(directory: Path) -> None:
    settings = settings_of(directory, torch.bfloat16, False, compile=True)
    planned, measured = planned_step(settings, ranks=1), measured_step(settings, hwrl.get_backend(), None)
    assert close(planned, measured), (planned, measured)
    assert planned < 0.85 * planned_step(replace(settings, compile=False), ranks=1), "less than without compilation"


def test_the_plan_of_an_adapter_is_within_a_tenth_of_the_peak(directory: Path) -> None:
    pytest.importorskip("peft")
    lora = LoraSettings(rank=8, alpha=16.0)
    settings = settings_of(directory, torch.bfloat16, False, lora=lora)
    assert measure_pass(directory, dtype=torch.bfloat16, tokens=TOKENS, targets=TOKENS, lora=lora).measured
    planned, measured = planned_step(settings, ranks=1), measured_step(settings, hwrl.get_backend(), None)
    assert close(planned, measured), (planned, measured)


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.extended)])
def test_the_plan_of_a_critic_is_within_a_tenth_of_the_peak(directory: Path, dtype: torch.dtype) -> None:
    settings, backend = settings_of(directory, dtype, False), hwrl.get_backend()

    def two_steps() -> None:
        critic = CriticEngine(settings, backend=backend, group=None)
        for _ in range(2):
            rows = batch()
            critic.fit(critic.estimate(rows, rows.mask.float())[0])

    planned = phase_nbytes(fsdp_memory(settings, ranks=1, device_nbytes=1 << 40, critic=True), "step")
    assert close(planned, measured := peak_of(backend, two_steps)), (planned, measured)
    assert planned < planned_step(settings, ranks=1), "no logits"


def test_engines_that_take_turns_need_the_memory_of_the_larger_turn(directory: Path) -> None:
    settings = settings_of(directory, torch.bfloat16, False)
    policy = fsdp_memory(settings, ranks=2, device_nbytes=ROOM)
    critic = fsdp_memory(settings, ranks=2, device_nbytes=ROOM, critic=True)
    both, kept = add_in_turns(policy, critic, name="critic"), phase_nbytes(critic, "idle")
    assert phase_nbytes(both, "step") == phase_nbytes(policy, "step") + kept > phase_nbytes(policy, "step")
    swapped = add_in_turns(critic, policy, name="policy")
    assert phase_nbytes(swapped, "step") == phase_nbytes(both, "step"), "the order does not matter"
    reference = add_in_turns(policy, reference_memory(settings, ranks=2), name="reference")
    assert phase_nbytes(reference, "step") == phase_nbytes(policy, "step")
    parameters = sum(one.numel() for one in described_model(directory, dtype=torch.bfloat16, lora=None).parameters())
    assert phase_nbytes(reference, "idle", place="host") == parameters  # two bytes each, on two ranks


def on_two_ranks(rank: int, directory: Path, address: str, dtype: torch.dtype, recomputes: bool, room: int) -> Any:
    """Return planned and measured bytes."""
    group, settings = join(rank, address, 2), settings_of(directory, dtype, recomputes)
    measured = measured_step(settings, Roomy(room), group)
    if group is not None:
        group.close()
    return planned_step(settings, ranks=2, device_nbytes=room), measured


EXTENDED = [
    pytest.param(dtype, recomputes, room, marks=pytest.mark.extended)
    for dtype, recomputes in CASES
    for room in (ROOM, LITTLE)
]


@pytest.mark.parametrize(
    ("dtype", "recomputes", "room"), [(torch.bfloat16, False, ROOM), (torch.float32, True, LITTLE), *EXTENDED]
)
def test_the_plan_of_two_ranks_is_within_a_tenth_of_the_peak(
    directory: Path, dtype: torch.dtype, recomputes: bool, room: int
) -> None:
    store = serve_store()
    found = run_processes(on_two_ranks, 2, directory, store_address(store), dtype, recomputes, room, timeout_s=3000)
    assert close(*found[0]), found


def test_offloads_and_a_step_on_the_host_move_the_state_to_the_host(directory: Path) -> None:
    settings = settings_of(directory, torch.bfloat16, True)
    plain = fsdp_memory(settings, ranks=2, device_nbytes=1 << 40)
    offloaded = fsdp_memory(
        replace(settings, param_offload=True, optimizer_offload=True), ranks=2, device_nbytes=1 << 40
    )
    on_host = fsdp_memory(replace(settings, host_step=True), ranks=2, device_nbytes=1 << 40)
    state = sum(one.nbytes for one in plain if one.cause in ("parameters", "gradients", "optimizer state"))
    gradients = next(one.nbytes for one in plain if one.cause == "gradients")
    assert phase_nbytes(plain, "idle") == state - gradients and phase_nbytes(offloaded, "idle") == 0
    assert phase_nbytes(offloaded, "idle", place="host") == state - gradients
    assert phase_nbytes(plain, "step") - phase_nbytes(on_host, "step") == state
    assert phase_nbytes(on_host, "step", place="host") == state


def test_a_quarter_of_the_ranks_share_one_copy(directory: Path) -> None:
    settings = settings_of(directory, torch.bfloat16, True)
    whole, quarter = (
        fsdp_memory(replace(settings, shard_ranks=shards), ranks=16, device_nbytes=LITTLE) for shards in (None, 4)
    )
    assert 3.9 < quarter[0].nbytes / whole[0].nbytes < 4.1 and quarter[0].cause == "parameters"


def test_auto_recomputes_as_many_layers_as_the_room_needs(directory: Path) -> None:
    settings = settings_of(directory, torch.bfloat16, False)
    auto = replace(settings, activation_checkpointing="auto")
    none = planned_step(settings, ranks=1, device_nbytes=1 << 40)
    assert planned_step(auto, ranks=1, device_nbytes=1 << 40) == none
    assert planned_step(auto, ranks=1, device_nbytes=LITTLE) < none


def test_the_peak_is_the_largest_of_scoring_and_of_two_kinds_of_layers() -> None:
    memory = PassMemory(kept=(50, 50), inputs=(5, 5), outside=10, scoring=7, working=9, recomputing=60)
    assert [memory.kept_nbytes(count) for count in (0, 1, 2)] == [110, 65, 20]
    assert [memory.peak_nbytes(count) for count in (0, 1, 2)] == [119, 75, 80]


def test_a_model_that_cannot_run_without_its_own_attention_has_a_rule_of_thumb(tmp_path: Path) -> None:
    from transformers import FalconConfig

    FalconConfig(vocab_size=48, hidden_size=32, num_hidden_layers=3, num_attention_heads=4).save_pretrained(tmp_path)
    memory = measure_pass(tmp_path, dtype=torch.bfloat16, tokens=64, targets=64)
    assert not memory.measured
    assert memory.kept == (17 * 64 * 32 * 2,) * 3


def test_a_mixture_of_experts_is_measured(tmp_path: Path) -> None:
    from transformers import Qwen3MoeConfig

    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        moe_intermediate_size=64,
        num_experts=8,
        num_experts_per_tok=2,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        architectures=["Qwen3MoeForCausalLM"],
    )
    config.save_pretrained(tmp_path)
    memory = measure_pass(tmp_path, dtype=torch.bfloat16, tokens=TOKENS, targets=TOKENS)
    assert memory.measured and len(memory.kept) == 6
    hidden = TOKENS * 128 * 2
    assert memory.inputs == (hidden,) * 6
    rows = 2 * TOKENS * 2 * (2 * 128 + 4 * 64)  # of two experts: chosen rows, gate and up, their product, the result
    assert rows < memory.kept[0] < rows + 30 * hidden
