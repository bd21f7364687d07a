"""The TCP sockets of this process, also those that a C++ library opened."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator


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
