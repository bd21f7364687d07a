"""A profile of some training steps of one rank, as a file for trace viewers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch

PROFILES = "profile"
"""The directory of profiles in a run directory."""


class StepProfile:
    """Records torch's profiler over the steps ``first`` to ``last``, and writes ``steps_<from>-<to>.json.gz``.

    The file is a Chrome trace. A run that resumes inside the range records the rest of it. No error of the profiler
    ends a step: :meth:`finish` reports it. All calls must come from the same thread, as torch demands.
    """

    def __init__(self, first: int, last: int, *, directory: Path) -> None:
        self._first, self._last, self._directory = first, last, directory
        self._profiler: torch.profiler.profile | None = None
        self._recorded: list[int] = []
        self._outcome: str | None = None

    @contextlib.contextmanager
    def recording(self, step: int) -> Iterator[None]:
        """Record ``step``, the block, if it is in the range; write the file after the last one."""
        if self._first <= step <= self._last and self._outcome is None:
            self._start()
            self._recorded.append(step)
        yield
        if step == self._last:
            self._write()

    def finish(self) -> str | None:
        """Write the file if steps are recorded and it is not written; return a sentence about it, but only once."""
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
            self._directory.mkdir(parents=True, exist_ok=True)
            draft = path.with_name(f".tmp_{path.name}")
            profiler.export_chrome_trace(str(draft))
            draft.replace(path)
            self._outcome = f"the profile of steps {steps} of trainer rank 0 is in {path}"

    @contextlib.contextmanager
    def _reporting(self) -> Iterator[None]:
        try:
            yield
        except Exception as exc:  # noqa: BLE001 - a profiler may raise anything; finish reports it
            self._outcome = f"there is no profile ({type(exc).__name__}: {exc}); the run continues without"
