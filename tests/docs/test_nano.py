"""The loop on one page, docs/nano.py: it learns, and goes on after a SIGKILL."""

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

NANO = Path(__file__).parents[2] / "docs/nano.py"
MOST_LINES = 150


def rewards_of(lines: Iterator[str]) -> Iterator[tuple[int, float]]:
    """Yield the number and the mean reward of each step that the program reports."""
    for line in lines:
        if found := re.fullmatch(r"step (\d+): reward (\d\.\d+)\n", line):
            yield int(found[1]), float(found[2])


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("HWRL_BACKEND", "cpu")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return [sys.executable, str(NANO), str(tmp_path), "40"]


def test_the_page_is_one_page_of_public_names() -> None:
    text = NANO.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MOST_LINES
    assert not re.findall(r"hwrl(?:\.\w+){2,} import|hwrl\.run", text), "it uses the faces of hwrl's parts"


def test_the_loop_learns_and_resumes_after_a_sigkill(command: list[str]) -> None:
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        steps = []
        for step, reward in rewards_of(first.stdout):
            steps.append(reward)
            if step == 15:
                first.kill()
    assert first.returncode == -signal.SIGKILL
    again = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    resumed = dict(rewards_of(iter(again.stdout.splitlines(keepends=True))))
    assert min(resumed) % 10 == 1 and max(resumed) == 40, "it goes on after its newest checkpoint"
    before, after = sum(steps[:3]) / 3, sum(resumed[step] for step in range(36, 41)) / 5
    assert before < 0.25 and after > 0.75, f"the reward went from {before:.2f} to {after:.2f}"
