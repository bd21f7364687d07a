"""The driver's watch over the processes of a run, with stand-ins for them."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from hwrl.errors import ConfigError
from hwrl.run.config import parse_config
from hwrl.run.fleet.fleet import Fleet
from hwrl.run.scaling import ScaleRequest, ScaleRequests


def test_the_driver_sleeps_while_all_replicas_pause_before_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    slept_s: list[float] = []
    clock = SimpleNamespace(sleep=slept_s.append, monotonic=lambda: 0.0)
    monkeypatch.setattr("hwrl.run.fleet.fleet.time", clock)
    fleet = SimpleNamespace(replicas=SimpleNamespace(answers=[]), _check_processes=lambda: None)
    assert Fleet.watch(cast(Any, fleet), []) == [] and slept_s == [1.0]


def scaled(directory: Path, answer: str | ConfigError) -> tuple[dict[str, Any], list[str]]:
    """Let a fleet whose replicas answer so carry out a request; return its answer and the log."""

    def scale(count: int) -> str:
        if isinstance(answer, ConfigError):
            raise answer
        return answer

    settings = {"dir": directory, "model": {"path": "model"}, "data": {"train": "train.jsonl"}}
    logged: list[str] = []
    fleet = SimpleNamespace(
        replicas=SimpleNamespace(wanted=1, scale=scale),
        _config=parse_config({**settings, "reward": {"function": "m:f"}}),
        _requests=ScaleRequests(directory),
        _log=lambda text, kind: logged.append(f"{kind}: {text}"),
    )
    Fleet._scale(cast(Any, fleet), ScaleRequest("1", 2))
    return json.loads((directory / "scale_answer.1.json").read_text()), logged


def test_a_run_that_has_scaled_says_so_even_if_its_configuration_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").mkdir()
    answer, logged = scaled(tmp_path, "replica-1 will join")
    assert answer["error"] is None
    outcome, warning = answer["text"].splitlines()
    assert outcome == "1 → 2 replicas: replica-1 will join"
    assert warning.startswith("warning: ") and "config.yaml cannot be written" in warning and "a resumed" in warning
    assert logged == [f"scale: {outcome}", f"scale: {warning}"]


def test_a_run_that_has_not_scaled_answers_with_the_reason(tmp_path: Path) -> None:
    answer, logged = scaled(tmp_path, ConfigError("there are no devices"))
    assert answer["error"]["what"] == "there are no devices" and logged == []
    assert not (tmp_path / "config.yaml").exists()
