"""The run's log in the run directory, ``events.jsonl``: what happened, when, and at which step."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Protocol

from hwrl import __version__
from hwrl.errors import with_notes
from hwrl.run.report.event_files import AppendedFile
from hwrl.run.report.records import Metrics, encode_records
from hwrl.run.report.views import View

EVENTS = "events.jsonl"

EventKind = Literal["start", "note", "wait", "replica", "trainer", "scale", "error", "end"]
"""``replica`` and ``trainer`` are restarts; with ``scale`` replicas join or leave; ``error`` ended the run; ``end`` is
its last event."""
Event = dict[str, Any]
"""A line of the file: ``time_unix_s``, ``step`` (the last finished one), ``kind`` and ``text``."""


class EventLog(Protocol):
    """Logs a line of text as an event of a kind."""

    def __call__(self, text: str, /, *, kind: EventKind = "note") -> None:
        """Log ``text``."""


class RecordedView:
    """A view for the ``with`` block of a run; each of its log lines also goes to ``events.jsonl`` in ``directory``.

    A resumed run appends to the file. The error that ends the block is an event, too. The file is optional: its first
    error goes to the view, and it is not written after that.
    """

    def __init__(self, view: View, directory: Path) -> None:
        self._view, self._path, self._step = view, directory / EVENTS, 0
        self._file: AppendedFile | None = None
        try:
            self._file = AppendedFile(self._path)
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
        """Show the metrics ``line`` of a step. Later events have its step."""
        self._step = int(line["step"])
        self._view.show(line)

    def log(self, text: str, /, *, kind: EventKind = "note") -> None:
        """Record ``text`` and show it."""
        self._record(text, kind)
        self._view.log(text)

    def end(self, text: str) -> None:
        """Record the end of the run. The caller shows ``text`` itself, later."""
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
        self._view.log(f"{self._path} can no longer be written ({exc.strerror or exc}); the run continues without")


def read_events(path: Path) -> Iterator[Event]:
    """Yield the events of a run directory's file; skip damaged lines. No file has no events."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            try:
                event = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(event, dict) and isinstance(event.get("text"), str) and type(event.get("step")) is int:
                yield event
