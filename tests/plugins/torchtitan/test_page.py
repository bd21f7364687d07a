"""The checkpoints of docs/stacks.md, with torchtitan's optimizers, schedule and data loader: a new process goes on."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from hwrl.testing import run_processes

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torchtitan") is None, reason="torchtitan is not installed: ci/stack torchtitan"
)
PAGE = Path(__file__).parents[3] / "docs" / "stacks.md"


def train(rank: int, directory: Path, steps: int) -> list[float]:
    """Train from the newest checkpoint on, and save after each second step; return the losses."""
    from torchtitan.components.dataloader import ParallelAwareDataloader
    from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig

    names: dict[str, Any] = {"__name__": "page"}
    (block,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    exec(compile(block, "stacks.md", "exec"), names)
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 1))
    group = ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 0.1})
    optimizers = OptimizersContainer.Config(param_groups=[group], implementation="foreach").build(model_parts=[model])
    schedule = LRSchedulersContainer.Config(warmup_steps=2).build(optimizers=optimizers, training_steps=10)
    data = ParallelAwareDataloader(Numbers(), dp_rank=0, dp_world_size=1, batch_size=2)
    counter = Counter()
    manager = names["HwrlCheckpoints"].Config(enable=True, interval=2, keep_latest_k=2)
    checkpoints = manager.build(
        dataloader=data,
        model_parts=[model],
        optimizers=optimizers,
        lr_schedulers=schedule,
        states={"train_state": counter},
        sd_adapter=None,
        base_folder=str(directory),
    )
    checkpoints.load()
    losses = []
    for batch in data:
        counter.step += 1
        loss = model(batch).square().mean()
        optimizers.zero_grad()
        loss.backward()
        optimizers.step()
        schedule.step()
        losses.append(loss.item())
        checkpoints.save(counter.step, last_step=counter.step == steps)
        if counter.step == steps:
            break
    checkpoints.close()
    return losses


class Counter:
    step = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


class Numbers(torch.utils.data.IterableDataset[torch.Tensor]):
    position = 0

    def __iter__(self) -> Any:
        while True:
            self.position += 1
            yield torch.full((4,), self.position / 10)

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def test_a_new_process_goes_on_with_the_same_losses(tmp_path: Path) -> None:
    (whole,) = run_processes(train, 1, tmp_path / "whole", 6)
    (first,) = run_processes(train, 1, tmp_path / "parts", 4)
    (second,) = run_processes(train, 1, tmp_path / "parts", 6)
    assert len(first) == 4 and [*first, *second] == whole
