"""Stop a run in an exact phase, to inject faults there: a backend and a reward function with gates.

The backend is the CPU under the name ``gated``. Each process of a run calls :func:`pass_gate` as it enters a phase. The
run has a list of gates. The first process to enter a gate's phase for the ``nth`` time writes ``reached-<gate>``, and
waits until the sweep has injected its faults and written ``go-<gate>``. Gates open in their order.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hwrl
import hwrl_cpu
from hwrl.interfaces import Backend, BackendInfo, ProbeContext, ProbeResult

VARIABLE = "HWRL_FAULT_GATES"
"""The environment variable with the directory of ``gates.json``, a list of ``[phase, nth]``."""
PATIENCE_S = 60.0

INFO = BackendInfo(name="gated", device_type="cpu", description="the CPU, with gates for injected faults", api=(1, 0))
_PHASE_OF = {
    "the trainer": "setting-up-trainer",
    "the rollout engine": "setting-up-replica",
    "the checkpoint": "resuming",
    "a training step": "stepping",
    "the export of the model": "exporting",
    "the end of the trainer": "closing",
}
_counts: Counter[str] = Counter()
_counting = threading.Lock()


def pass_gate(phase: str) -> None:
    """Report that this process enters ``phase``; wait if it has a gate."""
    directory = os.environ.get(VARIABLE)
    if directory is None:
        return
    with _counting:
        _counts[phase] += 1
        count = _counts[phase]
    for number, (name, nth) in enumerate(json.loads(Path(directory, "gates.json").read_text())):
        if not Path(directory, f"go-{number}").exists():
            if name == phase and count >= nth:
                _wait_at(Path(directory), number)
            return


def _wait_at(directory: Path, number: int) -> None:
    try:
        with Path(directory, f"reached-{number}").open("x") as file:
            file.write(str(os.getpid()))
    except FileExistsError:  # another process or thread waits there
        return
    deadline_s = time.monotonic() + PATIENCE_S
    while not Path(directory, f"go-{number}").exists() and time.monotonic() < deadline_s:
        time.sleep(0.005)


class GatedBackend(hwrl_cpu.CpuBackend):
    """The CPU. The calls of hwrl to its backend show the phase of the run."""

    _sends = False

    @contextlib.contextmanager
    def allocating(self, what: str) -> Iterator[None]:
        self._sends = self._sends or what == "the trainer"
        if what in _PHASE_OF:
            pass_gate(_PHASE_OF[what])
        with super().allocating(what):
            yield
        if what == "a training step":
            pass_gate("stepped")

    def event(self, *, timing: bool = False) -> Any:
        if timing:  # hwrl measures its transfers by events
            pass_gate("publishing" if self._sends else "receiving")
        return super().event(timing=timing)


def _detect_save(event: str, arguments: tuple[Any, ...]) -> None:
    """Detect the phases of a save by the files that Python opens and renames."""
    if event == "open" and "w" in str(arguments[1]) and "/checkpoints/" in str(arguments[0]):
        pass_gate("saving")
    elif event == "os.rename" and "/checkpoints/global_step_" in str(arguments[1]):
        pass_gate("committing")


if VARIABLE in os.environ:
    sys.addaudithook(_detect_save)


@hwrl.hookimpl
def hwrl_backend_info() -> BackendInfo:
    return INFO


@hwrl.hookimpl
def hwrl_probe(context: ProbeContext) -> ProbeResult:
    return ProbeResult("yes", "every machine has a CPU")


@hwrl.hookimpl
def hwrl_create_backend() -> Backend:
    return GatedBackend(INFO)
