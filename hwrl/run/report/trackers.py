"""Trackers from plugins and users. Each has a thread, so that a slow or broken tracker does not affect the run."""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from queue import Full, Queue
from typing import Any

from hwrl.checkpoint import DurableFS
from hwrl.discovery import load_hook
from hwrl.errors import DataError, EngineError, HwrlError, message_of, short_repr
from hwrl.files import read_file
from hwrl.interfaces import PromptTrace, RunStatus, TrackedRun, Tracker
from hwrl.run.config import Config
from hwrl.user_code import load_function

RUN_ID = "run_id"
"""The file in the run directory with the id of the run."""
_MAX_ID_NBYTES = 1000
FINISH_S = 60.0
"""How long a run at its end, or a new tracker after a restart of the trainers, waits for a tracker to finish."""
_MAX_WAITING = 10_000
"""The maximum number of waiting calls. A tracker that is further behind would not catch up."""

_Call = Callable[[Tracker], None]


class TrackerThread:
    """Makes and calls a tracker in a thread of its own. After its first error, which is logged, it gets no more calls.

    ``make`` makes the tracker as soon as that of ``earlier`` has ended, or after ``wait_s``: then ``earlier`` is given
    up, which is logged. ``log`` is called in any thread.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[], Tracker],
        run: TrackedRun,
        *,
        log: Callable[[str], None],
        earlier: TrackerThread | None = None,
        wait_s: float = FINISH_S,
    ) -> None:
        self.name = name
        self._make, self._log_line, self._earlier, self._wait_s = make, log, earlier, wait_s
        self._calls: Queue[_Call | None] = Queue(_MAX_WAITING)
        self._failing = threading.Lock()
        self._has_failed = self._finishes = False
        self._thread = threading.Thread(target=self._work, name=f"hwrl tracker {name}", daemon=True)
        self._submit(lambda tracker: tracker.start(run))
        self._thread.start()

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Send metrics to the tracker. Does not block."""
        self._submit(lambda tracker: tracker.log(metrics, step=step))

    def trace(self, traces: Sequence[PromptTrace]) -> None:
        """Send traces to the tracker. Does not block."""
        self._submit(lambda tracker: tracker.trace(traces))

    def finish(self, status: RunStatus, *, timeout_s: float = FINISH_S) -> None:
        """Finish the tracker and wait for it, up to ``timeout_s``. A second call does nothing."""
        self.begin_finish(status)
        with self._failing:  # its line in the log comes first
            has_failed = self._has_failed
        if not has_failed:
            self._join(timeout_s)

    def begin_finish(self, status: RunStatus) -> None:
        """Tell the tracker to finish. Does not block."""
        if not self._finishes:
            self._finishes = True
            self._submit(lambda tracker: tracker.finish(status))
            self._submit(None)

    def _submit(self, call: _Call | None) -> None:
        if not self._has_failed:
            try:
                self._calls.put_nowait(call)
            except Full:
                self._fail(f"{_MAX_WAITING:,} of its calls are waiting")

    def _join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._fail(f"it did not finish within {timeout_s:g} s")

    def _fail(self, reason: str) -> None:
        with self._failing:
            if not self._has_failed:
                self._has_failed = True
                self._log_line(f"the tracker {self.name} failed ({reason}); the run continues without it")

    def _work(self) -> None:
        try:
            if self._earlier is not None:
                self._earlier._join(self._wait_s)
                self._earlier = None
            tracker = self._make()
            while not self._has_failed and (call := self._calls.get()) is not None:
                call(tracker)
        except BaseException as exc:  # noqa: BLE001 - foreign code, which may even call sys.exit; the run logs it
            self._fail(f"{type(exc).__name__}: {message_of(exc)}")


def make_tracker(config: Config, name: str) -> Tracker:
    """Return the tracker ``name`` without starting it. It comes from a plugin or from a user's ``file.py:function``.

    Raises ConfigError, DataError or EngineError. Any other error of the function or the plugin is a DataError.
    """
    options = config.report.tracker_options.get(name, {})
    if ":" in name:
        make = partial(load_function(name, key="report.trackers"), options)
    else:
        hook = load_hook(name, "hwrl_tracker", asked_by="report.trackers")
        make = partial(hook, options=options)
    try:
        tracker = make()
    except HwrlError:
        raise
    except (Exception, SystemExit) as exc:
        raise DataError(
            f"the tracker {name} cannot be made",
            why=f"{type(exc).__name__}: {message_of(exc)}",
            fix="correct its function, or report.tracker_options",
        ) from exc
    if not isinstance(tracker, Tracker):
        raise EngineError(
            f"report.trackers={name} cannot be used",
            why=f"it returned {short_repr(tracker)}, not a hwrl.interfaces.Tracker",
            fix="correct or upgrade the tracker",
        )
    return tracker


def start_trackers(
    config: Config, *, resume_step: int, log: Callable[[str], None], earlier: Sequence[TrackerThread] = ()
) -> list[TrackerThread]:
    """Start all trackers of the run. Errors are logged. Does not block.

    ``earlier`` are the threads of the time before a resume: a tracker starts when the one of the same name has ended.
    """
    names = config.report.trackers
    if not names:
        return []
    try:
        run = tracked_run(config, resume_step=resume_step)
    except Exception as exc:  # noqa: BLE001 - for example an unreadable file with the run's id; it is logged
        log(f"the trackers {', '.join(names)} cannot start ({exc}); the run continues without them")
        return []
    before = {thread.name: thread for thread in earlier}
    return [
        TrackerThread(name, partial(make_tracker, config, name), run, log=log, earlier=before.get(name))
        for name in names
    ]


def tracked_run(config: Config, *, resume_step: int) -> TrackedRun:
    """Return the run as trackers see it. The first call writes the run's id to the run directory.

    Raises OSError, or ValueError if the file with the id is not text, or no regular file.
    """
    path: Path = config.dir / RUN_ID
    run_id = read_file(path, max_nbytes=_MAX_ID_NBYTES).decode("ascii").strip() if os.path.lexists(path) else ""
    if not run_id:
        run_id = uuid.uuid4().hex
        DurableFS().replace_file(path, f"{run_id}\n".encode())
    settings: dict[str, Any] = config.model_dump(mode="json")
    return TrackedRun(run_id, config.report.run_name or config.dir.name, config.dir, settings, resume_step)
