"""The table of features and backends that ``make matrix`` prints."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "ci" / "matrix.py"


def matrix() -> Any:
    spec = importlib.util.spec_from_file_location("matrix", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rows(reports: dict[str, Any]) -> list[str]:
    return list(matrix().table(reports))


def check(name: str, outcome: str, reason: str = "", level: str = "device") -> dict[str, str]:
    return {"name": name, "level": level, "outcome": outcome, "reason": reason}


def test_a_cell_counts_outcomes_and_names_the_reasons_once() -> None:
    first = [
        check("TestComm::test_a", "failed", "1 is not 2\nand more", level="collectives"),
        check("TestOffload::test_a", "passed"),
        check("TestOffload::test_b", "skipped", "it lacks streams"),
        check("TestDeviceIpc::test_a", "skipped", "it lacks streams"),
    ]
    simulated = {"device_count": 4, "simulated": True, "checks": []}
    lines = rows({"cpu": {"device_count": 1, "checks": first}, "npu": simulated, "xpu": "no GPU"})
    assert lines == [
        "| level | feature | cpu (1 device(s)) | npu (4 device(s), simulated) | xpu |",
        "|---|---|---|---|---|",
        "| device | Offload | 1 passed, 1 skipped [1] | not run | not run [2] |",
        "| device | DeviceIpc | 1 skipped [1] | not run | not run [2] |",
        "| collectives | Comm | 1 failed [3] | not run | not run [2] |",
        "",
        "[1] it lacks streams",
        "[2] no GPU",
        "[3] 1 is not 2",
    ]


def test_an_engine_without_its_environment_is_not_run_and_the_reason_says_what_makes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HWRL_PROBE_ROOT", str(tmp_path))  # a machine without devices
    module = matrix()
    module.REPO = tmp_path
    assert module.run_kit("npu, vllm", "rollout").endswith("; make test-stack-ascend makes an environment for it")
    assert module.run_kit("npu, vllm", "device") == "an engine runs at the level rollout"


def test_a_failed_check_in_a_given_report_is_told_by_the_exit_status(tmp_path: Path) -> None:
    names = []
    for column in ("cpu", "cuda", "npu", "rocm", "xpu", "cpu, vllm", "cuda, vllm", "npu, vllm"):
        names.append(tmp_path / f"{column}.json")
        checks = [check("TestComm::test_a", "failed" if column == "npu, vllm" else "passed")]
        backend, _, engine = column.partition(", ")
        report = {"backend": backend, "name": engine or backend, "device_count": 1, "checks": checks}
        names[-1].write_text(json.dumps(report))
    ended = subprocess.run([sys.executable, SCRIPT, *names], text=True, capture_output=True, timeout=300, check=False)
    assert ended.returncode == 1, ended.stderr
    assert ended.stdout.splitlines()[2].endswith(" 1 passed |" * 7 + " 1 failed |")
