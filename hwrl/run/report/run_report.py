"""Write the files of a run: metrics, trained prompts and samples."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hwrl.checkpoint import DurableFS
from hwrl.errors import RunDirectoryError, attempt_all
from hwrl.interfaces import RunStatus
from hwrl.run.report.records import AppendedFile, Metrics, encode_records, listed, read_records
from hwrl.run.report.samples import SAMPLES, Sample, drop_samples_after

if TYPE_CHECKING:
    from hwrl.interfaces import PromptTrace
    from hwrl.rollout import UntrainedPrompts
    from hwrl.run.report.trackers import TrackerThread

METRICS = "metrics.jsonl"
PROMPTS = "trained_prompts.jsonl"
MODEL_DIRECTORY = "model"
"""The directory of the trained model in the run directory."""


class RunReport:
    """Writes the files of a run directory, one line per step. It first drops all lines after ``resume_step``.

    - ``metrics.jsonl`` has one JSON object per training step: ``step``, ``time_s`` (seconds of training, summed over
      resumes) and the step's metrics.
    - ``trained_prompts.jsonl`` has the sequence numbers of the prompts of each step. If prompts were filtered or failed
      since the previous line, it also has these, under ``filtered`` and ``failed`` (with reasons).

    The run must not lose these two files: a failed write raises RunDirectoryError. If lines up to ``resume_step`` are
    missing or damaged, this is logged, and the run continues.

    ``samples.jsonl`` is optional: after a first error, which is logged, it is no longer written. ``trackers`` receive
    all metrics; closing the report finishes them.

    Call ``add`` after each step, ``sync`` before each checkpoint, and ``close`` at the end.
    """

    def __init__(
        self,
        directory: Path,
        *,
        log: Callable[[str], None],
        resume_step: int = 0,
        trackers: Sequence[TrackerThread] = (),
    ) -> None:
        self._directory, self._log = directory, log
        self._fs = DurableFS()
        self.history: list[Metrics] = self._drop_after(METRICS, last_step=resume_step)
        self._drop_after(PROMPTS, last_step=resume_step)
        self._step = resume_step
        self._earlier_s = self.history[-1]["time_s"] if self.history else 0.0
        self._started_s = time.perf_counter()
        with _writing(directory / METRICS):
            self._metrics = AppendedFile(directory / METRICS)
        with _writing(directory / PROMPTS):
            self._prompts = AppendedFile(directory / PROMPTS)
        self.trackers = trackers
        self._samples: AppendedFile | None = None
        self._takes_samples = False
        with self._writing_samples():
            drop_samples_after(directory / SAMPLES, last_step=resume_step)

    def start_clock(self) -> None:
        """Start to count ``time_s``. Call this when every process is ready: the startup is not training time."""
        self._started_s = time.perf_counter()

    def add(
        self,
        step: int,
        metrics: Mapping[str, float],
        *,
        prompts: list[int],
        untrained: UntrainedPrompts | None = None,
        samples: Sequence[Sample] = (),
    ) -> Metrics:
        """Record a training step; return its line in ``metrics.jsonl``."""
        self._step = step
        elapsed_s = self._earlier_s + time.perf_counter() - self._started_s
        line: Metrics = {"step": step, "time_s": round(elapsed_s, 3), **{k: _round(v) for k, v in metrics.items()}}
        self.history.append(line)
        settled = {name: numbers for name, numbers in asdict(untrained).items() if numbers} if untrained else {}
        attempt_all(
            partial(self._append, PROMPTS, self._prompts, {"step": step, "sequence_numbers": prompts, **settled}),
            partial(self._append, METRICS, self._metrics, line),
        )
        self._add_samples(samples)
        for tracker in self.trackers:
            tracker.log(metrics, step=step)
        return line

    def amend(self, metrics: Mapping[str, float]) -> Metrics:
        """Add ``metrics`` to the line of the newest step, for example those of an evaluation. Return the line.

        Creates the line if it is missing, because a resumed run may have found an incomplete file.
        """
        if not self.history or self.history[-1]["step"] != self._step:
            self.history.append({"step": self._step, "time_s": self._earlier_s})
        line = self.history[-1]
        line.update({name: _round(value) for name, value in metrics.items()})
        path = self._directory / METRICS
        with _writing(path):
            self._metrics.sync()  # raises if the file was deleted: it must not be created again
            self._fs.replace_file(path, encode_records(self.history))
            self._metrics.close()
            self._metrics = AppendedFile(path)
        for tracker in self.trackers:
            tracker.log(metrics, step=int(line["step"]))
        return line

    def sync(self) -> None:
        """Make all lines durable."""
        for name, file in ((PROMPTS, self._prompts), (METRICS, self._metrics)):
            with _writing(self._directory / name):
                file.sync()
                self._fs.sync_directory(self._directory)

    def close(self, status: RunStatus = "finished", *, waits: bool = True) -> None:
        """Finish the trackers with ``status``, and close the files.

        Without ``waits`` the trackers finish while the run goes on.
        """
        for tracker in self.trackers:
            if waits:
                tracker.finish(status)
            else:
                tracker.begin_finish(status)
        self._metrics.close()
        self._prompts.close()
        if self._samples is not None:
            self._samples.close()

    def _add_samples(self, samples: Sequence[Sample]) -> None:
        if not samples or not self._takes_samples:
            return
        with self._writing_samples():
            if self._samples is None:
                self._samples = AppendedFile(self._directory / SAMPLES)
            self._samples.write(encode_records(list(samples)))

    def trace(self, traces: Sequence[PromptTrace]) -> None:
        """Send the traces of a step's prompts to the trackers. Does not block."""
        for tracker in self.trackers if traces else ():
            tracker.trace(traces)

    @contextmanager
    def _writing_samples(self) -> Iterator[None]:
        """Log an error in the block instead of raising it: the run continues without samples."""
        self._takes_samples = False
        try:
            yield
            self._takes_samples = True
        except Exception as exc:  # noqa: BLE001 - samples are optional; it is logged
            path = self._directory / SAMPLES
            self._log(f"{path} can no longer be written ({_reason(exc)}); the run continues without it")

    def _append(self, name: str, file: AppendedFile, line: Mapping[str, Any]) -> None:
        with _writing(self._directory / name):
            file.write(encode_records([line]))

    def _drop_after(self, name: str, *, last_step: int) -> list[Any]:
        """Remove the lines after ``last_step``. Return the other lines; log which are missing or damaged."""
        path = self._directory / name
        kept, damaged = _read(path, last_step=last_step)
        missing = sorted(set(range(1, last_step + 1)) - {line["step"] for line in kept})
        if missing or damaged:
            damage = [f"{listed('step', missing)} of {last_step} missing"] if missing else []
            damage += [f"{listed('line', damaged)} damaged or out of order"] if damaged else []
            self._log(
                f"{path} is incomplete: {'; '.join(damage)}. "
                "The run continues, because weights and prompts come from the checkpoint"
            )
        if path.exists():
            with _writing(path):
                self._fs.replace_file(path, encode_records(kept))
        return kept


def read_metrics(path: Path) -> list[Metrics]:
    """Return the lines of a ``metrics.jsonl``, or of that in a run directory, by step. Damaged lines are skipped."""
    return _read(path / METRICS if path.is_dir() else path)[0]


def _read(path: Path, *, last_step: float = float("inf")) -> tuple[list[Any], list[int]]:
    try:
        return read_records(path, last_step=last_step)
    except OSError as exc:
        raise _unusable(path, "read", exc) from exc


def _round(value: float) -> float:
    return value if float(value).is_integer() else float(f"{value:.6g}")  # keeps byte counts exact


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        raise _unusable(path, "written", exc) from exc


def _unusable(path: Path, use: str, exc: OSError) -> RunDirectoryError:
    return RunDirectoryError(
        f"{path} cannot be {use}",
        why=_reason(exc),
        fix="repair the cause in the run directory (disk space, permission, ulimit -f, a moved or deleted file); "
        "resume=true then continues the run from its last checkpoint",
    )


def _reason(exc: Exception) -> str:
    if isinstance(exc, OSError) and exc.strerror:
        return f"{exc.strerror}: {exc.filename}" if exc.filename else exc.strerror
    return str(exc) or repr(exc)
