"""Read and write files of JSON lines, each with its training step, even if a file is damaged or hostile."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hwrl.files import make_directory, open_to_append, open_to_read, require_owned

Metrics = dict[str, float]
"""The metrics of one training step, by name: one line of ``metrics.jsonl``."""
_MAX_LINE_NBYTES = 1 << 24
_MOST_LISTED = 20
_MAX_STEP = 1 << 53
"""The largest step that the script in a page can hold."""
_MAX_INT = 1 << 1000
"""A larger integer may be no float."""


def encode_records(records: list[Any]) -> bytes:
    """Return ``records`` as lines of JSON."""
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def read_lines(path: Path) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Yield, for each line, the file position after it, and its JSON object; None if damaged. No file has no lines.

    A line is damaged if it is not an object with a ``step``, has more than 16 MiB, or does not end. Raises OSError if
    ``path`` is a link, a pipe or a device.
    """
    try:
        file = open_to_read(path)
    except FileNotFoundError:
        return
    with file:
        end = 0
        while text := file.readline(_MAX_LINE_NBYTES):
            end += len(text)
            is_whole = text.endswith(b"\n")
            while not is_whole and (rest := file.readline(_MAX_LINE_NBYTES)):
                text, end, is_whole = b"", end + len(rest), rest.endswith(b"\n")
            yield end, _parse(text) if is_whole else None


def read_records(path: Path, *, last_step: float = math.inf) -> tuple[list[Any], list[int]]:
    """Return the records of ``path`` up to ``last_step``, sorted by step, and the numbers of damaged lines.

    A line is damaged if it is not a record, or if its step repeats or comes after a later step. Damage after the last
    record is ignored, because a killed run or a power loss leaves it. A missing file counts as an empty one.
    """
    records: dict[int, Any] = {}
    damaged, undecided, latest = [], [], -1
    for number, (_, record) in enumerate(read_lines(path), start=1):
        if record is None or not _is_record(record) or record["step"] in records:
            undecided.append(number)  # it counts as damaged only if a record follows
            continue
        if record["step"] > last_step:
            continue
        damaged += undecided + ([number] if record["step"] < latest else [])
        undecided.clear()
        records[record["step"]] = record
        latest = max(latest, record["step"])
    return [records[step] for step in sorted(records)], damaged


def listed(noun: str, numbers: list[int]) -> str:
    """Return the numbers as text, at most 20 of them.

    >>> listed("step", [3]), listed("step", [1, 2, 7])
    ('step 3', 'steps 1, 2, 7')
    """
    shown = ", ".join(map(str, numbers[:_MOST_LISTED]))
    return f"{noun}{'' if len(numbers) == 1 else 's'} {shown}{', ...' if len(numbers) > _MOST_LISTED else ''}"


class AppendedFile:
    """A file opened for appending, without a buffer: when ``write`` returns, the operating system has all data.

    The constructor creates the file and its directory if they are missing.

    The methods raise OSError, also if the file was deleted or replaced. The operating system would accept writes to a
    deleted file, and the data would be lost.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        make_directory(path.parent)
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


def _parse(text: bytes) -> dict[str, Any] | None:
    """Return the object in a line; None if it is none, or has no step."""
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or type(record.get("step")) is not int:
        return None
    return record if 0 <= record["step"] <= _MAX_STEP else None


def _is_record(record: dict[str, Any]) -> bool:
    """Return whether ``record`` is one of trained prompts, or a line of metrics.

    The values of a line of metrics are numbers that a float can hold, and its time is finite.
    """
    if isinstance(record.get("sequence_numbers"), list):
        return True
    numbers = all(type(value) is float or (type(value) is int and abs(value) < _MAX_INT) for value in record.values())
    return numbers and math.isfinite(record.get("time_s", math.nan))
