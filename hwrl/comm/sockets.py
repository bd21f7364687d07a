"""The TCP sockets of this process, also those of C++ libraries; addresses; a limit to look-ups of names."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
from collections.abc import Callable, Iterator
from typing import Any

_ANYWHERE = {"0.0.0.0": "192.0.2.1", "::": "2001:db8::1"}
"""Hosts that mean all interfaces, each with an address on another network (reserved for documentation)."""
_RES_INIT = 1


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


def open_socket(host: str, port: int, use: Callable[[socket.socket, tuple[Any, ...]], object]) -> socket.socket:
    """Return a new TCP socket after ``use(socket, place)``, for the first address of ``host`` where that works.

    Raises the last address's error, or the one of a name without addresses.
    """
    error: Exception = OSError("the name has no address")
    for family, _, _, _, (address, _, *scope) in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM):
        made = socket.socket(family)
        try:
            use(made, (address, port, *scope))
            return made
        except (OSError, OverflowError) as exc:
            made.close()
            error = exc
    raise error


def process_sockets() -> Iterator[tuple[int, socket.socket]]:
    """Yield each TCP socket of this process with its descriptor, newest first mostly, to look at it. Linux only.

    Do not close it. Its owner may, at any time, and then the descriptor may become another socket's: before you change
    a socket, duplicate it and look at the duplicate.
    """
    for descriptor in sorted(map(int, os.listdir("/proc/self/fd")), reverse=True):
        try:
            found = socket.socket(fileno=descriptor)
        except OSError:  # no socket, or closed meanwhile
            continue
        try:
            if found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM:
                yield descriptor, found
        finally:
            found.detach()  # the owner closes it


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
