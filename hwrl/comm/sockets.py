"""The TCP sockets of this process, also those of C++ libraries; addresses; a limit to look-ups of names."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import stat
import threading
from collections.abc import Iterator

_ANYWHERE = {"0.0.0.0": "192.0.2.1", "::": "2001:db8::1"}
"""Hosts that mean all interfaces, each with an address on another network (reserved for documentation)."""
_RES_INIT = 1
_duplicates: set[int] = set()  # open descriptors that process_sockets made
_lock = threading.RLock()  # of _duplicates; the garbage collector may end an iteration while this thread holds it


def reachable_host(host: str) -> str:
    """Return ``host``; instead of one that means all interfaces, this machine's address towards other networks.

    Without such an address, return ``host``. Sends nothing.
    """
    if host in _ANYWHERE:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as unused:
            unused.connect((_ANYWHERE[host], 9))  # chooses the interface
            return str(unused.getsockname()[0])
    return host


def process_sockets() -> Iterator[tuple[int, socket.socket]]:
    """Yield the descriptor of each TCP socket of this process, newest first mostly, with a duplicate of the socket.

    The duplicate is closed when the caller takes the next one. Several threads may iterate: none gets the duplicate
    of another. Linux only.
    """
    for descriptor in sorted(map(int, os.listdir("/proc/self/fd")), reverse=True):
        mine = _duplicate_socket(descriptor)
        if mine is None:
            continue
        try:
            if mine.family in (socket.AF_INET, socket.AF_INET6) and mine.type == socket.SOCK_STREAM:
                yield descriptor, mine
        finally:
            with _lock:
                _duplicates.discard(mine.fileno())
                mine.close()


def _duplicate_socket(descriptor: int) -> socket.socket | None:
    """Return a duplicate of a socket; None for another file, one that is closed meanwhile, or a duplicate made here."""
    with _lock, contextlib.suppress(OSError):
        if descriptor in _duplicates or not _is_socket(descriptor):  # a file's duplicate would drop its locks
            return None
        copy = os.dup(descriptor)
        if _is_socket(copy):  # else the number got another file in between
            _duplicates.add(copy)
            return socket.socket(fileno=copy)
        os.close(copy)
    return None


def _is_socket(descriptor: int) -> bool:
    return stat.S_ISSOCK(os.fstat(descriptor).st_mode)


@contextlib.contextmanager
def brief_name_lookups() -> Iterator[None]:
    """Bound each query of a name server by this thread to one attempt of one second, inside the block.

    Torch looks up the name of each address of a connection, also on the loopback, only to log it. A silent name server
    costs 10 s a connection by default. After one failed look-up, torch does no more. This sets fields of ``_res``
    (resolver(3)); each thread has its own. Without glibc it does nothing.
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
