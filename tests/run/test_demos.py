"""The demos in docs/demos: their files are a configuration that hwrl accepts, and their rules are what they say."""

from __future__ import annotations

import asyncio
import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hwrl.run.config import load_config
from hwrl.run.inputs import check_inputs
from hwrl.user_code import load_function

DEMOS = Path(__file__).parents[2] / "docs" / "demos"


def write(demo: str, directory: Path) -> Path:
    """Run the demo's script, and return the path of the configuration that it prints."""
    command = [sys.executable, str(DEMOS / demo), str(directory), "--seed", "3"]
    printed = subprocess.run(command, check=True, capture_output=True, text=True, timeout=1200).stdout
    return Path(printed.splitlines()[-1])


def play(letters: str, answer: str, *actions: str) -> list[tuple[Any, ...]]:
    env: Any = load_function(f"{DEMOS / 'lookup.py'}:Lookup", key="test")()

    async def run() -> list[tuple[Any, ...]]:
        await env.reset(options={"letters": letters, "answer": answer})
        return [await env.step(action) for action in actions]

    return asyncio.run(run())


def test_the_lookup_demo_writes_a_run(tmp_path: Path) -> None:
    config = load_config(write("lookup.py", tmp_path / "demo"), [])
    check_inputs(config)
    assert config.reward.function is None and config.rollout.workflow is not None


def test_questions_are_answered_and_the_answer_ends_the_episode() -> None:
    first, again, other, end = play("ca", "40", "c", "c1", "a", "40")
    assert [step[0] for step in (first, again, other)] == ["4>", "4>", "0>"]
    assert [step[1] for step in (first, again, other)] == [0.15, 0.0, 0.15] and not other[2]
    assert end[1:4] == (pytest.approx(0.7), True, False) and end[4] == {"exact": 1.0}


@pytest.mark.parametrize(("answer", "share"), [("4", 0.5), ("", 0.0), ("401", 0.5), ("b0", 0.5), ("1111111", 0.0)])
def test_a_partly_right_answer_earns_its_share(answer: str, share: float) -> None:
    (end,) = play("ca", "40", answer)
    assert end[1] == pytest.approx(0.7 * share) and end[2] and end[4] == {"exact": 0.0}


@pytest.mark.skipif(importlib.util.find_spec("reasoning_gym") is None, reason="reasoning-gym is not installed")
def test_the_demo_of_reasoning_gym_is_judged_by_its_package(tmp_path: Path) -> None:
    config = load_config(write("spell_backward.py", tmp_path / "demo"), [])
    check_inputs(config)
    score: Any = load_function(f"{DEMOS / 'spell_backward.py'}:score", key="test")
    entry = {"answer": "nus"}
    assert score("", "nus", "nus", entry) == {"reward": 1.0, "exact": 1.0}
    assert score("", "nut", "nus", entry)["reward"] == pytest.approx(2 / 3)
