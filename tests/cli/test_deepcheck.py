"""``hwrl doctor --deep``: each step is a process of its own, and a broken device is told step by step."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest

from hwrl.cli import deepcheck
from hwrl.cli import doctor as doctor_command
from hwrl.errors import ConfigError
from hwrl.testing.conformance import CommContract
from hwrl.testing.suites import backend as suite
from tests.support.card import HOST, doctor, install

TENSOR = "TestDevice and synchronize"
ANSWERS: dict[str, tuple[str, str, str]] = {
    "a right device": (HOST, "passed", ""),
    "a wrong result": (HOST.replace("return ", "b = ") + "; b.synchronize = lambda: 1 / 0; return b", "failed", "Zero"),
    "a driver that ends the process": (
        "import os; os.write(2, b'a panic'); os._exit(3)",
        "failed",
        "status 3: a panic",
    ),
    "a driver that hangs": ("import threading; threading.Event().wait()", "slow", "did not end within 5 s, and was"),
}


@pytest.mark.parametrize("device", ANSWERS)
def test_a_step_says_how_it_ended(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    create, outcome, reason = ANSWERS[device]
    install(tmp_path, create=create)
    monkeypatch.syspath_prepend(str(tmp_path))
    goes_on = {"the next step": TENSOR} if outcome == "slow" else {}
    monkeypatch.setattr(deepcheck, "STEPS", {"a tensor": TENSOR} | goes_on)
    monkeypatch.setenv("HWRL_TIMEOUT_SCALE", "1")
    ended = list(deepcheck.steps("card", limit_s=5.0 if outcome == "slow" else 600.0))
    assert [step["step"] for step in ended] == ["a tensor", *goes_on]
    assert ended[0]["outcome"] == outcome, ended[0]["reason"]
    assert reason in ended[0]["reason"] and ended[0]["seconds"] > 0


def test_each_step_selects_checks_of_the_kit() -> None:
    """pytest's ``-k``: a word is a part of a name, in any case."""
    names = [
        f"{name}::{method}".lower()
        for name, contract in vars(suite).items()
        if name.startswith("Test")
        for method in dir(contract)
        if method.startswith("test_")
    ]
    for step, checks in deepcheck.STEPS.items():
        words = {word for word in re.findall(r"\w+", checks) if word not in ("and", "or", "not")}
        unknown = [word for word in words if not any(word.lower() in name for name in names)]
        assert not unknown, f"{step} selects nothing by {unknown}"
        ast.parse(checks, mode="eval")
    assert any("abort" in name for name in dir(CommContract))


CHECKS = [("passed", ""), ("skipped", "needs two devices"), ("skipped", "needs two devices"), ("failed", "1 is not 2")]


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        (CHECKS, ("failed", "test_3: 1 is not 2")),
        (CHECKS[:3], ("passed", "in part: needs two devices")),
        (CHECKS[1:3], ("skipped", "needs two devices")),
        (CHECKS[:1], ("passed", "")),
        ([*CHECKS[:2], ("slow", "no answer")], ("slow", "test_2: no answer")),
    ],
)
def test_a_step_of_several_checks_has_the_worst_outcome(chosen: list[tuple[str, str]], said: tuple[str, str]) -> None:
    checks = [
        {"name": f"TestIt::test_{number}", "outcome": outcome, "reason": reason}
        for number, (outcome, reason) in enumerate(chosen)
    ]
    assert deepcheck.summed_up(checks) == said


def test_without_pytest_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"pip install 'hwrl\[train,testing\]'"):
        deepcheck.require_kit()


@pytest.mark.parametrize(("outcome", "last"), [("failed", "a run would fail there"), ("slow", "a check took too long")])
def test_the_report_ends_with_what_the_steps_mean(outcome: str, last: str) -> None:
    step = {"step": "an abort", "outcome": outcome, "reason": "it hangs", "seconds": 300.0}
    report: dict[str, Any] = {"hwrl": "1", "backends": [], "load_failures": [], "versions": {}, "environment": {}}
    lines = "\n".join(doctor_command._lines({**report, "chosen": None, "why": "", "ok": False, "deep": [step]}))
    assert re.search(rf"an abort +{outcome} +300\.0 s  it hangs(.|\n)*NOT ok: {last}", lines)


@pytest.mark.extended
def test_the_host_passes_every_step() -> None:
    ended = doctor("--deep", "--json", choose="cpu")
    found = json.loads(ended.stdout)
    assert ended.returncode == 0, ended.stderr
    assert {step["step"]: step["outcome"] for step in found["deep"]} == dict.fromkeys(deepcheck.STEPS, "passed")
