"""Where given processes listen; the others on the machine open and close ports at any time."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterable
from pathlib import Path

_LISTENS = "0A"


def listeners(pids: Iterable[int] | None = None) -> set[tuple[str, int]]:
    """Return the addresses and ports where the processes ``pids`` listen; by default, this process."""
    owned = {link for pid in ([os.getpid()] if pids is None else pids) for link in _open_files(pid)}
    found = set()
    for table in ("tcp", "tcp6"):
        path = Path("/proc/net") / table
        for row in map(str.split, path.read_text().splitlines()[1:] if path.exists() else ()):
            if row[3] == _LISTENS and f"socket:[{row[9]}]" in owned:
                found.add(_place(row[1]))
    return found


def _open_files(pid: int) -> set[str]:
    links = set()
    with contextlib.suppress(OSError):  # the process has ended
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                links.add(os.readlink(link))
    return links


def _place(text: str) -> tuple[str, int]:
    """Return the address and the port of the kernel's text: little-endian words of four bytes."""
    address, _, port = text.partition(":")
    packed = bytes.fromhex(address)
    packed = b"".join(packed[at : at + 4][::-1] for at in range(0, len(packed), 4))
    return socket.inet_ntop(socket.AF_INET if len(packed) == 4 else socket.AF_INET6, packed), int(port, 16)
