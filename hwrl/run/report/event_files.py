"""Files that are only appended to: files whose content survives a killed process, and TensorBoard's event files."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hwrl.files import make_directory, open_to_append, open_to_read, require_owned


class AppendedFile:
    """A file opened for appending, without a buffer: when ``write`` returns, the operating system has all data.

    The methods raise OSError, also if the file was deleted or replaced. The operating system would accept writes to a
    deleted file, and the data would be lost.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = open_to_append(path)

    def write(self, data: bytes) -> None:
        """Append ``data``. After an error, a part of it may be in the file."""
        rest = memoryview(data)
        while rest:
            rest = rest[self._file.write(rest) :]
        self._check_path()

    def end_line(self) -> None:
        """Append a newline if the last line lacks it, for example after a power loss."""
        with open_to_read(self._path) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
            last = file.read(1)
        if last not in (b"", b"\n"):
            self.write(b"\n")

    def sync(self) -> None:
        """Make the content durable with fsync. To make the directory entry durable, sync the directory as well."""
        self._check_path()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file. A second call does nothing."""
        self._file.close()

    def _check_path(self) -> None:
        require_owned(self._path)
        if not os.path.samestat(os.fstat(self._file.fileno()), self._path.stat()):
            raise FileNotFoundError(f"{self._path} was replaced by another file")


class EventFile:
    """Scalars for TensorBoard, in a new file in ``directory``. TensorBoard ignores older files from ``purge_step`` on.

    This class writes in the caller's thread and raises OSError. torch's ``SummaryWriter`` writes in a thread of its
    own, which prints a traceback and may block its callers when the disk is full.
    """

    def __init__(self, directory: Path, *, purge_step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        make_directory(directory)
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

    def add(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Write ``metrics`` as the scalars of ``step``."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._write(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, event: Any) -> None:
        self._records.write(event.SerializeToString())
