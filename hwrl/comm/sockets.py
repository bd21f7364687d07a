"""The TCP sockets of this process, also those that a C++ library opened; and how long that library looks up names."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import stat
from collections.abc import Iterator

_RES_INIT = 1


def process_sockets() -> Iterator[tuple[int, socket.socket]]:
    """Yield the descriptor of each TCP socket of this process, newest first mostly, with a duplicate of the socket.

    The duplicate is closed when the caller takes the next one. Linux only.
    """
    for descriptor in sorted(map(int, os.listdir("/proc/self/fd")), reverse=True):
        try:
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):  # closing a file's duplicate drops the process's locks
                continue
            copy = os.dup(descriptor)
        except OSError:  # closed meanwhile
            continue
        if not stat.S_ISSOCK(os.fstat(copy).st_mode):  # the number got another file in between
            os.close(copy)
            continue
        with socket.socket(fileno=copy) as mine:
            if mine.family in (socket.AF_INET, socket.AF_INET6) and mine.type == socket.SOCK_STREAM:
                yield descriptor, mine


@contextlib.contextmanager
def brief_name_lookups() -> Iterator[None]:
    """Bound each query of a name server by this thread to one attempt of one second, inside the block.

    Torch asks for the name of each address that it connects to, also of the loopback's, only to log it. A name server
    that does not answer costs 10 s a connection by default; after one failed lookup, torch asks no more. Sets the
    fields of ``_res`` (resolver(3)), which are the calling thread's own; without glibc it does nothing.
    """
    try:
        locate = ctypes.CDLL(None).__res_state
    except AttributeError:  # another C library
        yield
        return
    locate.restype = ctypes.POINTER(_ResolverStart)
    state = locate().contents
    if not state.options & _RES_INIT:  # the first lookup would read /etc/resolv.conf over these values
        ctypes.CDLL(None).__res_init()
    before = state.retrans_s, state.attempts
    state.retrans_s, state.attempts = 1, 1
    try:
        yield
    finally:
        state.retrans_s, state.attempts = before


class _ResolverStart(ctypes.Structure):
    """The first fields of glibc's ``struct __res_state``: seconds to the next attempt, and attempts."""

    _fields_ = (("retrans_s", ctypes.c_int), ("attempts", ctypes.c_int), ("options", ctypes.c_ulong))
