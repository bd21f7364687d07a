"""The files of a run directory for tests of its page, some of them an attack on the page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hwrl.run.report import METRICS
from hwrl.run.report.samples import SAMPLES
from hwrl.run.report.views import EVENTS

ATTACK = "</pre></script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
HOSTILE = f"{ATTACK}\ud800\x00&amp;"


def step_line(step: int, **more: float) -> dict[str, float]:
    """Return a line of metrics; in the names of ``more``, ``__`` stands for ``/``."""
    line = {"step": step, "time_s": 2.0 * step, "reward/mean": step / 100, "staleness/mean": 0.5, "staleness/max": 1.0}
    line |= {"timing_s/wait": 0.5, "timing_s/train": 1.0, "timing_s/sync": 0.25, "timing_s/save": 0.0}
    line |= {"rollout/idle_s": 1.0, "rollout/generate_s": 2.5, "rollout/update_s": 0.5, "rollout/replicas": 2.0}
    line |= {"actor/loss": -step / 10, "actor/entropy": 1.0 / step, "actor/mismatch_kl": 1e-3, "perf/step_s": 2.0}
    line |= {"response/length_mean": 100.0, "trainer/tokens_per_s": 5000.0, "ledger/failures": 0.0, "my/own": 3.0}
    return {**line, **{name.replace("__", "/"): value for name, value in more.items()}}


def sample_of(step: int, text: str = "an answer", *, reward: float = 0.5) -> dict[str, Any]:
    segments = [{"author": "policy", "tokens": 3, "text": text}, {"author": "environment", "tokens": 1, "text": "ok"}]
    return {
        "step": step,
        "sequence_number": step * 10,
        "sample": 1,
        "reward": reward,
        "truncated": False,
        "age_max": 1,
        "age_min": 0,
        "prompt_reward_mean": 0.25,
        "prompt_metrics": {},
        "prompt": f"prompt {step}",
        "prompt_tokens": 2,
        "segments": segments,
    }


def event_of(step: int, kind: str, text: str) -> dict[str, Any]:
    return {"time_unix_s": 1.7e9 + step, "step": step, "kind": kind, "text": text}


def write_lines(path: Path, lines: list[Any]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of 30 steps with a restart, a resume and a replaced replica; texts and names attack the page."""
    directory = tmp_path / "<b>run"
    directory.mkdir()
    evaluated = {step: {"eval__reward": 0.2} for step in (10, 20, 30)}
    write_lines(directory / METRICS, [step_line(step, **evaluated.get(step, {})) for step in range(1, 31)])
    events = [
        event_of(0, "start", "hwrl begins"),
        event_of(7, "trainer", f"a trainer died ({HOSTILE})"),
        event_of(7, "start", "hwrl begins"),
        event_of(9, "replica", "rollout replica-0 ended"),
        event_of(30, "end", "done after step 30 of 30"),
    ]
    write_lines(directory / EVENTS, events)
    texts = {3: HOSTILE}
    samples = [sample_of(step, texts.get(step, f"answer {step}"), reward=step / 30) for step in range(1, 31)]
    write_lines(directory / SAMPLES, samples)
    (directory / "config.yaml").write_text("train: {steps: 30}  # <script>\n")
    return directory
