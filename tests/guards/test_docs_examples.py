"""The Python examples of the README and of pages that need one process run as printed."""

import ast
import builtins
import collections.abc
import re
import typing
from pathlib import Path

import pytest

from hwrl import interfaces
from hwrl.run.config import load_config
from hwrl.run.demo import write_demo
from hwrl.run.identity import identify_inputs
from hwrl.run.inputs import check_inputs
from hwrl.run.processes.build import build_algorithm
from hwrl.train import AsyncTrainer
from tests.support.fsdp_training import engine_on, groups_of

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("page", ["../README.md", "checkpoints.md", "memory.md", "training.md"])
def test_the_example_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HWRL_BACKEND", "cpu")
    blocks = re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, page, "exec"), {})
    if page == "checkpoints.md":
        assert (tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").read_text() == "3"


def test_the_configuration_of_the_readme_is_one(tmp_path: Path) -> None:
    (example,) = re.findall(r"^```yaml\n(.*?)^```", (DOCS / "../README.md").read_text(), re.MULTILINE | re.DOTALL)
    (tmp_path / "config.yaml").write_text(example)
    config = load_config(tmp_path / "config.yaml", ["train.steps=200", "resume=true"])
    assert config.async_training.staleness_threshold == 2 and config.resume


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


@pytest.mark.parametrize("number", range(2))
def test_every_name_in_the_page_on_backends_exists(number: int) -> None:
    """Run the block's definitions; hwrl's names resolve in them, or it raises. What they do is tested elsewhere."""
    blocks = blocks_of("backends.md")
    assert len(blocks) == 2
    exec(compile(blocks[number], "backends.md", "exec"), {"__name__": "hwrl_documented"})


def test_every_name_in_the_page_on_hooks_exists() -> None:
    blocks = [block for block in blocks_of("hooks.md") if "import" not in block]  # tests/cli runs the example
    homes = (interfaces, collections.abc, builtins, typing)
    assert blocks
    for block in blocks:
        names = {node.id for node in ast.walk(ast.parse(f"def {block.strip()}: ...")) if isinstance(node, ast.Name)}
        missing = [name for name in names if not any(hasattr(home, name) for home in homes)]
        assert not missing, f"{block.strip()} needs {missing}"
