"""Files of a run that only grow: records that are in the file when a call returns, and TensorBoard's events."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class AppendedFile:
    """A file that is appended to. Nothing waits in this process: after ``write`` the operating system has all of it.

    Raises OSError, also if the file was deleted or replaced: what is written to a deleted file is lost without an
    error of the operating system.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("ab", buffering=0)

    def write(self, data: bytes) -> None:
        """Append ``data``; after an error a part of it may be there."""
        rest = memoryview(data)
        while rest:
            rest = rest[self._file.write(rest) :]
        self._require_name()

    def sync(self) -> None:
        """Make what was written durable, but for the file's name in its directory."""
        self._require_name()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file. May be called again."""
        self._file.close()

    def _require_name(self) -> None:
        if not os.path.samestat(os.fstat(self._file.fileno()), self._path.stat()):
            raise FileNotFoundError(f"{self._path} was replaced by another file")


class EventFile:
    """Scalars for TensorBoard, in a new file in ``directory``; those of older files from ``purge_step`` on are void.

    torch's ``SummaryWriter`` writes in a thread of its own, which prints a traceback when the disk is full and can
    leave its callers waiting. This one writes in the caller's thread, and raises OSError.
    """

    def __init__(self, directory: Path, *, purge_step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        directory.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time_ns() // 10**9:010}.{socket.gethostname()}.{os.getpid()}.{purge_step}"
        self._file = AppendedFile(directory / name)
        self._records = RecordWriter(self._file)
        try:
            self._write(Event(wall_time=time.time(), step=purge_step, file_version="brain.Event:2"))
            started = SessionLog(status=SessionLog.START)
            self._write(Event(wall_time=time.time(), step=purge_step, session_log=started))
        except BaseException:
            self.close()
            raise

    def add(self, figures: Mapping[str, float], *, step: int) -> None:
        """Write ``figures`` as the scalars of ``step``."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in figures.items()]
        self._write(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, event: Any) -> None:
        self._records.write(event.SerializeToString())
