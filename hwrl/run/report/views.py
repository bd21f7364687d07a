"""Show the progress of a run on the screen, and record its log.

The log is ``events.jsonl``: each line has ``time_unix_s``, ``step`` (the last one), ``kind`` and ``text``.
"""

from __future__ import annotations

import math
import sys
import time
from io import TextIOWrapper
from pathlib import Path
from typing import Literal, TextIO

from hwrl import __version__
from hwrl.errors import with_notes
from hwrl.output import discard, printable
from hwrl.run.report.records import AppendedFile, Metrics, encode_records

EVENTS = "events.jsonl"

EventKind = Literal["start", "note", "wait", "replica", "trainer", "scale", "error", "end"]
"""``replica`` and ``trainer``: a restart; ``scale``: replicas joined or left; ``error``: the error that ended the run;
``end``: the last event of a run without an error."""


class PlainView:
    """Progress as lines of text, at most one per ``interval_s`` seconds."""

    def __init__(self, total_steps: int, *, stream: TextIO, interval_s: float = 2.0) -> None:
        self._total, self._stream, self._interval_s = total_steps, stream, interval_s
        self._last_s = -interval_s

    def show(self, line: Metrics) -> None:
        """Print ``line`` if it is of the last step, has an evaluation, or comes ``interval_s`` after the last print."""
        now_s = time.perf_counter()
        if now_s - self._last_s < self._interval_s and not _is_evaluated(line) and line["step"] != self._total:
            return
        self._last_s = now_s
        self.log(" | ".join(f"{name} {value}" for name, value in _shown(line, self._total)))

    def log(self, text: str) -> None:
        """Print one line. If nobody reads the stream any longer, discard the output and continue."""
        try:
            print(printable(text), file=self._stream, flush=True)
        except OSError:
            discard(self._stream)


class RecordedView:
    """Wraps a view during the ``with`` block of a run, and also writes its log lines to ``events.jsonl``.

    A resumed run appends to the file. An error that ends the block is also recorded as an event. The file is optional:
    after a first error, which is logged to the view, it is no longer written.
    """

    def __init__(self, view: PlainView, directory: Path) -> None:
        self._view, self._path, self._step = view, directory / EVENTS, 0
        self._file: AppendedFile | None = None
        try:
            self._file = AppendedFile(self._path)
            self._file.end_line()
        except OSError as exc:
            self._give_up(exc)

    def __enter__(self) -> RecordedView:
        self._record(f"hwrl {__version__} begins", "start")
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, KeyboardInterrupt):
            self._record(f"interrupted{with_notes(error)}", "end")
        elif error is not None:
            self._record(f"{type(error).__name__}: {with_notes(error)}", "error")
        self._close()

    def show(self, line: Metrics) -> None:
        """Show the metrics of a step. Later events get the number of this step."""
        self._step = int(line["step"])
        self._view.show(line)

    def log(self, text: str, /, *, kind: EventKind = "note") -> None:
        """Write ``text`` to the file, and show it in the view."""
        self._record(text, kind)
        self._view.log(text)

    def end(self, text: str) -> None:
        """Write ``text`` to the file as the end of the run. Shows nothing: the caller prints ``text`` later."""
        self._record(text, "end")

    def _record(self, text: str, kind: EventKind) -> None:
        if self._file is None:
            return
        event = {"time_unix_s": round(time.time(), 3), "step": self._step, "kind": kind, "text": text}
        try:
            self._file.write(encode_records([event]))
        except OSError as exc:
            self._give_up(exc)

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _give_up(self, exc: OSError) -> None:
        self._close()
        self._view.log(f"{self._path} can no longer be written ({exc.strerror or exc}); the run continues without it")


def make_view(total_steps: int) -> PlainView:
    """Return a view on standard output, which shows characters that its encoding lacks as escapes from now on."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    if getattr(sys.stdout, "lost", None) is not None:  # the process began without a standard output
        discard(sys.stdout)
    return PlainView(total_steps, stream=sys.stdout)


def _is_evaluated(line: Metrics) -> bool:
    return any(name.startswith("eval/") for name in line)


def _shown(line: Metrics, total: int) -> list[tuple[str, str]]:
    rows = [
        ("step", f"{line['step']:.0f}/{total}"),
        ("time", f"{line['time_s']:.0f} s"),
        ("reward", f"{line.get('reward/mean', math.nan):.3f}"),
        ("staleness", f"{line.get('staleness/mean', math.nan):.2f} (max {line.get('staleness/max', math.nan):.0f})"),
        (
            "weights",
            f"v{line.get('weights/version', math.nan):.0f}, sync {line.get('timing_s/sync', 0.0) * 1000:.0f} ms"
            + (", with the base" if line.get("sync/base_sent") else ""),
        ),
        (
            "train",
            f"{line.get('trainer/tokens_per_s', 0.0):,.0f} tok/s, idle {line.get('trainer/idle_ratio', 0.0):.0%}"
            + (f", MFU {line['perf/mfu']:.2f}" if "perf/mfu" in line else ""),
        ),
        (
            "rollout",
            f"{line.get('rollout/tokens_per_s', 0.0):,.0f} tok/s, idle {line.get('rollout/idle_ratio', 0.0):.0%}",
        ),
    ]
    for name in (name for name in line if name.startswith("eval/") and name.endswith("/reward")):
        group = name.removesuffix("/reward")
        exact = f", exact {line[f'{group}/exact']:.3f}" if f"{group}/exact" in line else ""
        rows.append((group.replace("/", " "), f"{line[name]:.3f}{exact}"))
    return rows
