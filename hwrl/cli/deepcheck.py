"""``hwrl doctor --deep``: the calls that a run needs from a device, one by one, as checks of the conformance kit.

Each is a process of its own, with a time limit: a driver may hang in any of them, and the next one must run.
"""

from __future__ import annotations

import importlib.util
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hwrl.children import run_python
from hwrl.errors import ConfigError
from hwrl.testing.limits import scaled

STEPS = {
    "a tensor": "TestDevice and (synchronize or sees_a_device)",
    "page-locked copies": "TestPinnedMemory and copies_there_and_back",
    "memory of another process": "TestDeviceIpc and same_bytes",
    "offload and restore": "TestOffload and (survives or is_free)",
    "a collective": "TestComm and (collectives_are_right or default_group)",
    "an abort": "TestComm and abort",
    "a killed peer": "TestComm and killed_peer",
    "a sleeping engine": "TestBuiltInRolloutSleep",
    "a weight update": "TestWeights",
}
"""The steps, from the simplest on: what each tries, and its checks as an expression of pytest."""
_LIMIT_S = 300.0
_LAST_LINES = 8


def require_kit() -> None:
    """Raise ConfigError if the conformance kit cannot run here."""
    if importlib.util.find_spec("pytest") is None:
        raise ConfigError(
            "hwrl doctor --deep cannot run",
            why="it runs checks of the conformance kit, and pytest is not installed",
            fix="install hwrl with its extra testing: pip install 'hwrl[train,testing]'",
        )


def steps(name: str, *, limit_s: float = _LIMIT_S) -> Iterator[dict[str, Any]]:
    """Run each step on backend ``name``, and yield its name, outcome, reason and seconds.

    The outcome is ``passed``, ``failed``, ``slow`` if time ran out, or ``skipped`` if the device lacks the capability.
    """
    for step, checks in STEPS.items():
        begin = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            outcome, reason = _run(name, checks, Path(folder), limit_s=scaled(limit_s))
        yield {"step": step, "outcome": outcome, "reason": reason, "seconds": round(time.monotonic() - begin, 1)}


def _run(name: str, checks: str, folder: Path, *, limit_s: float) -> tuple[str, str]:
    """Run ``checks`` in a child process, and return their outcome and the reasons."""
    report = folder / "report.json"
    kit = ["conformance", name, "--kind", "backend", "-k", checks, "--json", str(report)]
    status, last = run_python(["-m", "hwrl", *kit], limit_s=limit_s, with_stdout=True)
    if status is None:
        return "slow", f"it did not end within {limit_s:g} s, and was killed: it is too slow or stuck"
    if report.is_file():
        return summed_up(json.loads(report.read_text())["checks"])
    return "failed", f"it ended with status {status}: {' | '.join(last[-_LAST_LINES:])}"


def summed_up(checks: list[dict[str, Any]]) -> tuple[str, str]:
    """Return the worst outcome of ``checks``, and its reasons; if none is worse than passed, those of skipped ones."""
    outcomes = {check["outcome"] for check in checks}
    worst = next(one for one in ("failed", "slow", "passed", "skipped") if one in outcomes)
    told = "skipped" if worst == "passed" else worst
    named = worst in ("failed", "slow")
    reasons = dict.fromkeys(
        f"{check['name'].rpartition('::')[2]}: {check['reason']}" if named else check["reason"]
        for check in checks
        if check["outcome"] == told
    )
    return worst, ("in part: " if worst == "passed" and reasons else "") + "; ".join(reasons)
