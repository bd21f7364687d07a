"""The interface of a tracker: an experiment tracking service, or anything else, gets a run's metrics."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from hwrl.interfaces.tracing import PromptTrace

RunStatus = Literal["finished", "interrupted", "failed"]
"""How the tracking ended. ``interrupted`` may also mean: trainers go back to a checkpoint, and a new tracker starts."""


@dataclass(frozen=True)
class TrackedRun:
    """The run of a :class:`Tracker`.

    ``run_id`` (32 hexadecimal digits) stays the same over all resumes of a run directory, and no other run has it.
    ``name`` is for people and need not be unique. ``config`` is the whole configuration, as JSON-able data.
    ``resume_step`` is the step of the checkpoint, 0 at the start: metrics of later steps may have been logged before.
    """

    run_id: str
    name: str
    directory: Path
    config: Mapping[str, Any]
    resume_step: int = 0


class Tracker(ABC):
    """Sends the metrics of one run somewhere. hwrl calls it in a thread of its own, so it may block.

    The order of calls is ``start``, any number of ``log`` and ``trace``, ``finish``. An exception ends the tracking,
    not the run: hwrl logs it once and makes no further call. After a resume, or after the trainers went back to a
    checkpoint, a new tracker starts with the same ``run_id``, and the steps after ``resume_step`` come again: the newer
    values count.
    """

    @abstractmethod
    def start(self, run: TrackedRun) -> None:
        """Open the run, or continue it if its ``run_id`` is known."""

    @abstractmethod
    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Take metrics of ``step``, counted from 1. The metrics of an evaluation come in a second call for the step."""

    def trace(self, traces: Sequence[PromptTrace]) -> None:  # noqa: B027 - optional; most trackers show no traces
        """Take the traces of one training step's prompts. Called only with ``report.trace_every``; optional."""

    @abstractmethod
    def finish(self, status: RunStatus) -> None:
        """Close the run; return when everything is sent. hwrl waits at most a minute."""
