"""What the handles of lent memory have in common, on every backend: they are whole, and another process's."""

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
    """Return ``fields`` with this process's name and a checksum, as they are sent to other processes."""
    sealed = {**fields, "process": _process()}
    return {**sealed, "sum": _sum(sealed)}


def unseal(handle: Mapping[str, str | int]) -> Handle:
    """Return the fields that another process sealed. Raises CommError if they are not as they were then.

    Drivers map memory into other processes only: a handle of this one raises UnsupportedError.
    """
    fields = {name: value for name, value in handle.items() if name != "sum"}
    if "process" not in fields or handle.get("sum") != _sum(fields):
        raise CommError(
            "this is no handle of device memory",
            why=f"the sum of its fields is wrong in {dict(handle)!r:.200}",
            fix="pass on unchanged what export_memory returned",
        )
    if fields.pop("process") == _process():
        raise UnsupportedError(
            "cannot open the memory of this process itself",
            why="memory is mapped into other processes only",
            fix="use the tensor that was exported",
        )
    return fields


def _process() -> str:
    return f"{os.getpid()}-{_LOADED}"  # a number is used again, a forked child has its parent's name


def _sum(fields: Mapping[str, str | int]) -> int:
    return zlib.crc32(json.dumps(fields, sort_keys=True).encode())
