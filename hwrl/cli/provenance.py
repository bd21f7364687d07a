"""What a reader needs to repeat a benchmark: hardware, versions, command, date."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import shlex
import sys
from pathlib import Path
from typing import Any

from hwrl import __version__


def provenance(*distributions: str) -> dict[str, Any]:
    """Return hardware, the versions of hwrl, Python and ``distributions``, the command line and the UTC date."""
    versions = {name: importlib.metadata.version(name) for name in distributions}
    return {
        "hardware": {"machine": platform.machine(), "processor": processor(), "cores": cores()},
        "versions": {"hwrl": __version__, "python": platform.python_version(), **versions},
        "command": shlex.join(["hwrl", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def processor() -> str:
    """Return the processor's name, as far as the operating system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0))
