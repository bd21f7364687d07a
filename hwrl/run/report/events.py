"""The log of a run, ``events.jsonl``: each line has ``time_unix_s``, ``step`` (the last one), ``kind``, ``text``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Literal, Protocol

from hwrl import __version__
from hwrl.errors import with_notes
from hwrl.run.report.event_files import AppendedFile
from hwrl.run.report.records import Metrics, encode_records
from hwrl.run.report.views import View

EVENTS = "events.jsonl"

EventKind = Literal["start", "note", "wait", "replica", "trainer", "scale", "error", "end"]
"""``replica`` and ``trainer``: a restart; ``scale``: replicas joined or left; ``error``: the error that ended the run;
``end``: the last event of a run without an error."""


class EventLog(Protocol):
    """A function that logs a line of text as an event of some kind."""

    def __call__(self, text: str, /, *, kind: EventKind = "note") -> None:
        """Log ``text``."""


class RecordedView:
    """Wraps a view during the ``with`` block of a run, and also writes its log lines to ``events.jsonl``.

    A resumed run appends to the file. An error that ends the block is also recorded as an event. The file is optional:
    after a first error, which is logged to the view, it is no longer written.
    """

    def __init__(self, view: View, directory: Path) -> None:
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
