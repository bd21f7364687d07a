"""The page for vendors lists the operators of a real run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from hwrl.rollout import EmbeddedEngine
from hwrl.run.build import build_algorithm
from hwrl.run.config import load_config
from hwrl.run.demo import write_demo
from hwrl.run.identity import identify_inputs
from hwrl.train import AsyncTrainer
from tests.support.fsdp_training import engine_on, groups_of
from tests.support.tiny_model import END, generate, requests_of, tiny_model

PAGE = Path(__file__).parents[2] / "docs" / "requirements.md"
ELSEWHERE = re.compile(r"profiler::.*|_fused_adamw_|_scaled_dot_product_flash_attention_for_cpu.*")
"""The profiler's, an optional one, and the CPU's form of attention."""


class Operators(TorchDispatchMode):
    """Collects the names of the operators inside it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch's class has no types
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func._schema.name.removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


def test_the_page_lists_every_operator_of_a_step_and_of_a_rollout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HWRL_BACKEND", "cpu")
    config = load_config(write_demo(tmp_path, seed=3, prompts=16), [])
    algorithm = build_algorithm(config, identify_inputs(config))
    model = tiny_model()
    with Operators() as found:
        engine = engine_on(config.model.path, None)
        AsyncTrainer(engine, algorithm=algorithm, max_staleness=0).step(groups_of(4, seed=0))
        rollout = EmbeddedEngine(model, eos_ids=[END], max_running=8, max_length=24)
        rollout.load_weights([(name, tensor.clone()) for name, tensor in model.state_dict().items()], version=0)
        generate(rollout, requests_of(6, temperature=1.0))
    section = PAGE.read_text().partition("## Operators")[2].partition("\n## ")[0]
    listed = set(re.findall(r"`(\w+)`", section))
    assert {name for name in found.names if not ELSEWHERE.fullmatch(name)} <= listed
