"""Stop a run in an exact phase, to inject faults there. Reward workers import this module, so it imports nothing large.

Each process of a run calls :func:`pass_gate` as it enters a phase. The run has a list of gates. The first process to
enter a gate's phase for the ``nth`` time writes ``reached-<gate>``, and waits until the sweep has injected its faults
and written ``go-<gate>``. Gates open in their order.
"""

from __future__ import annotations

import functools
import json
import os
import threading
import time
from collections import Counter
from pathlib import Path

VARIABLE = "HWRL_FAULT_GATES"
"""The environment variable with the directory of ``gates.json``, a list of ``[phase, nth]``."""
PATIENCE_S = 1800.0

_counts: Counter[str] = Counter()
_counting = threading.Lock()


def pass_gate(phase: str, *, count: int | None = None) -> None:
    """Report that ``phase`` is entered for the ``count``. time, by default in this process; wait if it has a gate."""
    directory = os.environ.get(VARIABLE)
    if directory is None:
        return
    if count is None:
        with _counting:
            _counts[phase] += 1
            count = _counts[phase]
    for number, (name, nth) in enumerate(_gates(directory)):
        if not Path(directory, f"go-{number}").exists():
            if name == phase and count >= nth:
                _wait_at(Path(directory), number)
            return


@functools.cache
def _gates(directory: str) -> list[tuple[str, int]]:
    """Read the gates once: a fault may take away this process's right to open files."""
    gates: list[tuple[str, int]] = json.loads(Path(directory, "gates.json").read_text())
    return gates


def _wait_at(directory: Path, number: int) -> None:
    try:
        with Path(directory, f"reached-{number}").open("x") as file:
            file.write(str(os.getpid()))
    except FileExistsError:  # another process or thread waits there
        return
    deadline_s = time.monotonic() + PATIENCE_S
    while not Path(directory, f"go-{number}").exists() and time.monotonic() < deadline_s:
        time.sleep(0.005)
