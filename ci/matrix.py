"""Print one table of features and backends, from the checks of the conformance kit, also on vLLM as the rollout engine.

    python ci/matrix.py                           # runs the kit on each backend that runs here, and on vLLM there
    python ci/matrix.py --level device h200.json  # with a report of `hwrl conformance NAME --json h200.json`

A cell says how many checks passed; how many were skipped, with the reasons below the table; or that the kit was not run
on the backend, and why. The exit status is 0 if no check failed or was slow. ``make matrix`` runs it.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

from hwrl.discovery import Registry
from hwrl.errors import HwrlError
from hwrl.testing import Level

Report: TypeAlias = dict[str, Any] | str
"""The kit's report as JSON, or the reason why there is none."""

REPO = Path(__file__).parents[1]
COLUMNS = ("cpu", "cuda", "npu", "rocm", "xpu", "cpu, vllm", "cuda, vllm", "npu, vllm")
PLACES = {
    "npu": (".venv-npu", "make test-npu", [".venv-npu/bin/python", "-m", "hwrl"]),
    "cpu, vllm": (".venv-vllm", "make test-vllm", ["ci/stack", "vllm", "hwrl"]),
    "npu, vllm": (".venv-ascend", "make test-stack-ascend", ["ci/ascend", "hwrl"]),
}
"""Environments of a column: the folder, what makes it, and its ``hwrl``. The NPUs in them are simulated."""
OPTIONS = '{"enforce_eager": true, "kv_cache_memory_bytes": 67108864}'
NOT_GOOD = ("failed", "slow")


def main(words: list[str]) -> int:
    """Print the table; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reports", nargs="*", type=Path, metavar="REPORT.json", help="a report from another machine")
    parser.add_argument("--level", choices=list(Level), default=Level.ROLLOUT, help="how far the kit goes (rollout)")
    args = parser.parse_args(words)
    given = [json.loads(path.read_text(encoding="utf-8")) for path in args.reports]
    reports: dict[str, Report] = {_column(report): report for report in given}
    for column in COLUMNS:
        if column not in reports:
            reports[column] = run_kit(column, args.level)
    print("\n".join(table(reports)))
    checks = [check for report in reports.values() if isinstance(report, dict) for check in report["checks"]]
    return int(any(check["outcome"] in NOT_GOOD for check in checks))


def _column(report: dict[str, Any]) -> str:
    backend = str(report["backend"])
    return backend if report["name"] == backend else f"{backend}, {report['name']}"


def run_kit(column: str, level: str) -> Report:
    """Run the kit on a backend, or on an engine there ("npu, vllm"), in this environment or in its own (PLACES)."""
    backend, _, engine = column.partition(", ")
    folder, make, command = PLACES.get(column, ("", "", []))
    env = os.environ | {"HWRL_BACKEND": backend, "OMP_NUM_THREADS": "1"}
    own = bool(folder) and (REPO / folder / "installed").is_file()
    if engine and list(Level).index(Level(level)) < list(Level).index(Level.ROLLOUT):
        return "an engine runs at the level rollout"
    if own and backend == "npu":
        env |= {"HWRL_PROBE_ROOT": str(REPO / folder / "machine"), "NPUSIM_DEVICES": "4"}
        env["NPUSIM_HCCL_MILD"] = "1"  # as in tests/npu: a process may use its device after an abort
    elif not own:
        command, hint = [sys.executable, "-m", "hwrl"], f"; {make} makes an environment for it" if make else ""
        try:
            Registry(env=dict(env)).choose()
        except HwrlError as error:
            return error.why + hint
        if engine and importlib.util.find_spec(engine) is None:
            return f"{engine} is not installed here{hint}"
    with tempfile.TemporaryDirectory() as temporary:
        report = Path(temporary) / "report.json"
        words = ["conformance", engine or backend, "--level", level, "--json", str(report)]
        words += ["--options", OPTIONS] if engine else []
        ended = subprocess.run([*command, *words], cwd=REPO, env=env, text=True, capture_output=True, check=False)
        if report.is_file():
            found: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
            return found | {"simulated": own and backend == "npu"}
    said = " ".join((ended.stdout + ended.stderr).split())[-300:]
    reason = f"the kit ended with status {ended.returncode}, without a report: {said}"
    check = {"name": "TestKit::runs", "level": Level.COMPUTE, "outcome": "failed", "reason": reason}
    return {"backend": backend, "name": engine or backend, "device_count": 0, "checks": [check]}


def table(reports: dict[str, Report]) -> Iterator[str]:
    """Yield the lines of a Markdown table with a row for each contract, then the reasons by their numbers."""
    reasons: dict[str, int] = {}
    levels = {
        _feature(check): check["level"]
        for report in reports.values()
        if isinstance(report, dict)
        for check in report["checks"]
    }
    yield f"| level | feature | {' | '.join(map(_title, reports, reports.values()))} |"
    yield "|---" * (len(reports) + 2) + "|"
    for feature in sorted(levels, key=lambda one: list(Level).index(levels[one])):
        cells = (_cell(report, feature, reasons) for report in reports.values())
        yield f"| {levels[feature]} | {feature} | {' | '.join(cells)} |"
    yield ""
    yield from (f"[{number}] {reason}" for reason, number in reasons.items())


def _title(name: str, report: Report) -> str:
    if isinstance(report, str):
        return name
    simulated = ", simulated" if report.get("simulated") else ""
    return f"{name} ({report['device_count']} device(s){simulated})"


def _feature(check: dict[str, Any]) -> str:
    return str(check["name"]).partition("::")[0].removeprefix("Test")


def _cell(report: Report, feature: str, reasons: dict[str, int]) -> str:
    if isinstance(report, str):
        return f"not run [{reasons.setdefault(report, len(reasons) + 1)}]"
    found = [check for check in report["checks"] if _feature(check) == feature]
    parts = []
    for outcome in ("passed", "skipped", *NOT_GOOD):
        those = [check for check in found if check["outcome"] == outcome]
        why = sorted({check["reason"].partition("\n")[0] for check in those if check["reason"]})
        notes = "".join(f" [{reasons.setdefault(reason, len(reasons) + 1)}]" for reason in why)
        parts += [f"{len(those)} {outcome}{notes}"] * bool(those)
    return ", ".join(parts) or "not run"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
