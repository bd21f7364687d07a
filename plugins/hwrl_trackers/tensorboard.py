"""Metrics to TensorBoard's event files, in ``tensorboard/`` of the run directory: ``report.trackers=[tensorboard]``."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from typing import Any

import hwrl
from hwrl.interfaces import RunStatus, TrackedRun, Tracker
from hwrl_trackers.options import check_tracker


class TensorboardTracker(Tracker):
    """Writes an event file. TensorBoard ignores older files from the first step of a resumed run on.

    The file is written in the caller's thread: torch's ``SummaryWriter`` writes in a thread of its own, which prints a
    traceback when the disk is full.
    """

    def start(self, run: TrackedRun) -> None:
        """Create the file. Raises OSError, as the other methods do."""
        from tensorboard.compat.proto.event_pb2 import SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        from hwrl.run import AppendedFile

        directory, step = run.directory / "tensorboard", run.resume_step + 1
        name = f"events.out.tfevents.{time.time_ns() // 10**9:010}.{socket.gethostname()}.{os.getpid()}.{step}"
        self._file = AppendedFile(directory / name)
        self._records = RecordWriter(self._file)
        self._write(step, file_version="brain.Event:2")
        self._write(step, session_log=SessionLog(status=SessionLog.START))

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Write ``metrics`` as the scalars of ``step``."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._write(step, summary=Summary(value=values))

    def finish(self, status: RunStatus) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, step: int, **content: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        try:
            self._records.write(Event(wall_time=time.time(), step=step, **content).SerializeToString())
        except OSError:
            self._file.close()
            raise


@hwrl.hookimpl
def hwrl_tracker(options: Mapping[str, Any]) -> Tracker:
    check_tracker("tensorboard", options, known=())
    return TensorboardTracker()
