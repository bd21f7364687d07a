"""The Python examples of the README and of pages that need one process run as printed."""

import re
from pathlib import Path

import pytest

from hwrl.run.build import build_algorithm
from hwrl.run.config import load_config
from hwrl.run.demo import write_demo
from hwrl.run.identity import identify_inputs
from hwrl.run.inputs import check_inputs
from hwrl.train import AsyncTrainer
from tests.support.fsdp_training import engine_on, groups_of

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("page", ["../README.md", "checkpoints.md", "memory.md", "parts.md", "staleness.md"])
def test_the_example_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HWRL_BACKEND", "cpu")
    blocks = re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, page, "exec"), {})
    if page == "checkpoints.md":
        assert (tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").read_text() == "3"


def blocks_of(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(), flags=re.MULTILINE | re.DOTALL)


def test_the_loss_and_the_advantage_of_the_page_on_algorithms_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a run does: from the files in the configuration, through the trainer, to other weights."""
    monkeypatch.setenv("HWRL_BACKEND", "cpu")
    for block in blocks_of("algorithms.md"):
        file = re.findall(r"^# (\w+\.py)", block)[0]
        (tmp_path / file).write_text(block)
        assert len(block.splitlines()) <= 30
    words = [f"algorithm.loss={tmp_path}/losses.py:sapo", f"algorithm.advantage={tmp_path}/advantages.py:pass_at_k"]
    config = load_config(write_demo(tmp_path, seed=1, prompts=16), words)
    check_inputs(config)
    algorithm = build_algorithm(config, identify_inputs(config))
    engine = engine_on(config.model.path, None)
    before = {name: tensor.clone() for name, tensor in engine.named_weights()}
    metrics = AsyncTrainer(engine, algorithm=algorithm, max_staleness=0).step(groups_of(4, seed=0)).metrics
    assert {"actor/ratio", "actor/row_ratio"} <= set(metrics) and metrics["actor/grad_norm"] > 0
    assert any(not tensor.equal(before[name]) for name, tensor in engine.named_weights())
