"""Handles of exported memory, on every backend: a checksum and the exporting process's identity."""

from __future__ import annotations

import json
import os
import uuid
import zlib
from collections.abc import Mapping

from hwrl.errors import CommError, UnsupportedError

Handle = dict[str, str | int]

_LOADED = uuid.uuid4().hex


def seal(fields: Mapping[str, str | int]) -> Handle:
    """Return ``fields`` with this process's identity and a checksum, ready for other processes."""
    sealed = {**fields, "process": _process()}
    return {**sealed, "sum": _checksum(sealed)}


def unseal(handle: Mapping[str, str | int]) -> Handle:
    """Return the fields sealed by another process. Raises CommError if they changed on the way.

    Drivers map memory only into other processes: a handle of this process raises UnsupportedError.
    """
    fields = {name: value for name, value in handle.items() if name != "sum"}
    if "process" not in fields or handle.get("sum") != _checksum(fields):
        raise CommError(
            "this is not a handle of device memory",
            why=f"the checksum of its fields is wrong in {dict(handle)!r:.200}",
            fix="pass on the result of export_memory without changes",
        )
    if fields.pop("process") == _process():
        raise UnsupportedError(
            "cannot open the memory of this process itself",
            why="memory is mapped into other processes only",
            fix="use the exported tensor",
        )
    return fields


def _process() -> str:
    return f"{os.getpid()}-{_LOADED}"  # the system reuses pids, and a forked child inherits _LOADED


def _checksum(fields: Mapping[str, str | int]) -> int:
    return zlib.crc32(json.dumps(fields, sort_keys=True).encode())
