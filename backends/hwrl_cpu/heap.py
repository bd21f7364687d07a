"""Measure the memory of this process: its C heap and its resident set."""

from __future__ import annotations

import ctypes
import functools
import resource
from collections.abc import Callable
from typing import Any


class _Mallinfo2(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in [
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        ]
    ]


@functools.cache
def _mallinfo2() -> Callable[[], Any] | None:
    function = getattr(ctypes.CDLL(None), "mallinfo2", None)  # glibc 2.33 or newer
    if function is not None:
        function.restype = _Mallinfo2
    return function


def can_count() -> bool:
    """Return whether the C library reports the used part of the heap."""
    return _mallinfo2() is not None


def allocated_nbytes() -> int:
    """Return the bytes allocated by ``malloc`` in this process, in all arenas; 0 if unknown."""
    count = _mallinfo2()
    if count is None:
        return 0
    info = count()
    return int(info.uordblks + info.hblkhd)


def peak_resident_nbytes() -> int:
    """Return the largest resident set of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
