"""Record torch's profiler during some training steps of one rank, and write the result for trace viewers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch

from hwrl.files import make_directory, replacing

PROFILES = "profile"
"""The subdirectory of a run directory that holds profiles."""


class StepProfile:
    """Records torch's profiler from step ``first`` to step ``last``, and writes ``steps_<from>-<to>.json.gz``.

    The file is a Chrome trace. A run that resumes between these steps records the remaining ones. An error of the
    profiler does not end the step: :meth:`finish` reports it. All calls must come from the same thread; torch requires
    this.
    """

    def __init__(self, first: int, last: int, *, directory: Path) -> None:
        self._first, self.last, self._directory = first, last, directory
        self._profiler: torch.profiler.profile | None = None
        self._recorded: list[int] = []
        self._outcome: str | None = None

    @contextlib.contextmanager
    def recording(self, step: int) -> Iterator[None]:
        """Record the block as ``step`` if the step is in the range. Write the file after the last step of the range."""
        if self._first <= step <= self.last and self._outcome is None:
            self._start()
            self._recorded.append(step)
        yield
        if step == self.last:
            self._write()

    def finish(self) -> str | None:
        """Write the file if that is still to do. Return a message about the file or the error, once; then None."""
        self._write()
        outcome, self._outcome = self._outcome, None
        return outcome

    def _start(self) -> None:
        if self._profiler is None:
            with self._reporting():
                profiler = torch.profiler.profile()
                profiler.start()
                self._profiler = profiler

    def _write(self) -> None:
        if self._profiler is None:
            return
        profiler, self._profiler = self._profiler, None
        steps = f"{self._recorded[0]}-{self._recorded[-1]}"
        path = self._directory / f"steps_{steps}.json.gz"
        with self._reporting():
            profiler.stop()
            make_directory(self._directory)
            with replacing(path) as file:
                profiler.export_chrome_trace(file.name)
            self._outcome = f"the profile of steps {steps} of trainer rank 0 was written to {path}"

    @contextlib.contextmanager
    def _reporting(self) -> Iterator[None]:
        try:
            yield
        except Exception as exc:  # noqa: BLE001 - a profiler may raise anything; finish reports it
            self._outcome = f"the profiler failed ({type(exc).__name__}: {exc}); the run continues without a profile"
