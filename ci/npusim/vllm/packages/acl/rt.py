"""pyACL's runtime: copies."""

from __future__ import annotations

import ctypes
import functools


@functools.cache
def library() -> ctypes.CDLL:
    """Return the simulated CANN, which torch_npu has loaded."""
    library = ctypes.CDLL("libascendcl.so")
    library.aclrtMemcpy.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    library.aclrtGetSocName.restype = ctypes.c_char_p
    return library


def memcpy(to: int, room: int, source: int, nbytes: int, kind: int) -> int:
    """Copy ``nbytes`` between host and device; returns an error code."""
    return library().aclrtMemcpy(to, room, source, nbytes, kind)
