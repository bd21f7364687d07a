"""The Megatron engine on packs and on padded rows, with the whole vocabulary and with half of it on each rank."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import hwrl
from hwrl.comm import Comm, connect_store, serve_store, store_address
from hwrl.run.demo import write_demo
from hwrl.testing.processes import run_processes
from hwrl.train import PolicyLoss
from tests.support.megatron_batches import batch_of, settings_in
from tests.support.packed_steps import assert_same_steps, steps_in_both_forms


def both(rank: int, directory: Path, address: str, ranks: int) -> list[dict[str, Any]]:
    from hwrl_megatron import hwrl_train_engine

    group = Comm().init_default(store=connect_store(address), rank=rank, size=ranks) if ranks > 1 else None
    engine: Any = hwrl_train_engine(
        settings=settings_in(directory, temperature=0.8, activation_checkpointing=True),
        options={"tensor_parallel": ranks},
        backend=hwrl.get_backend(),
        group=group,
    )
    engine.scorer.chunk_logits = 5 * 16
    batch = batch_of(slice(None), seed=2)
    batch.mask[1] = False

    def gradients() -> list[torch.Tensor]:
        return [parameter.main_grad.clone() for parameter in engine.model.parameters()]

    try:
        proximal = replace(batch, proximal_logprobs=batch.behaviour_logprobs + 0.1 * batch.mask)
        return steps_in_both_forms(engine, proximal, gradients, loss=PolicyLoss("decoupled"))
    finally:
        engine.close()
        if group is not None:
            group.close()


@pytest.mark.parametrize("ranks", [1, 2])
def test_packs_take_the_step_of_padded_rows(tmp_path: Path, ranks: int) -> None:
    write_demo(tmp_path, seed=3, prompts=16)
    store = serve_store()
    for steps in run_processes(both, ranks, tmp_path, store_address(store), ranks, timeout_s=1200):
        assert_same_steps(steps)
