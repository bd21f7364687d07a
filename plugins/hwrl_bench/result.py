"""The result of a benchmark: how it is printed and written, and the facts needed to repeat it."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hwrl import __version__


def report(result: dict[str, Any], table: str, *, json_path: Path | None) -> None:
    """Print ``table``, and write ``result`` to ``json_path`` if there is one."""
    print(table)
    if json_path is not None:
        write(result, json_path)


def write(result: dict[str, Any], json_path: Path) -> None:
    """Write ``result``, or the part of it until now, to ``json_path``."""
    json_path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def provenance(*distributions: str) -> dict[str, Any]:
    """Return hardware, the versions of hwrl, Python and ``distributions``, the command line and the UTC date."""
    versions = {name: importlib.metadata.version(name) for name in distributions}
    return {
        "hardware": {"machine": platform.machine(), "processor": _processor(), "cores": len(os.sched_getaffinity(0))},
        "versions": {"hwrl": __version__, "python": platform.python_version(), **versions},
        "command": shlex.join(["hwrl", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def machine_line(result: Mapping[str, Any]) -> str:
    """Return the device, the processor and the number of cores of ``result``."""
    return f"{result['device']}, {result['hardware']['processor']} ({result['hardware']['cores']} cores)"


def unmeasured_lines(rows: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return a line with the reason for each row that has no measurement, only ``why_not``."""
    return [f"{name}: not measured: {row['why_not']}" for name, row in rows.items() if "why_not" in row]


def _processor() -> str:
    """Return the processor's name from the operating system, or "unknown"."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
