"""A backend that stops a run in an exact phase (:mod:`tests.faults.phases`): the CPU under the name ``gated``."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

import hwrl
import hwrl_cpu
from hwrl.interfaces import Backend, BackendInfo, ProbeContext, ProbeResult
from tests.faults.phases import VARIABLE, pass_gate

INFO = BackendInfo(name="gated", device_type="cpu", description="the CPU, with gates for injected faults", api=(1, 0))
_PHASE_OF = {
    "the trainer": "setting-up-trainer",
    "the rollout engine": "setting-up-replica",
    "the checkpoint": "resuming",
    "a training step": "stepping",
    "the export of the model": "exporting",
    "the end of the trainer": "closing",
}


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
