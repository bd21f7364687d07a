"""A listening socket that only named peers can reach: the kernel drops the packets of all others."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import socket
import stat
import struct
import threading
from collections.abc import Iterator
from typing import NamedTuple

from hwrl.errors import CommError

_SO_ATTACH_FILTER = 26
_ACCEPT, _DROP = (0x06, 0, 0, 0xFFFFFFFF), (0x06, 0, 0, 0)
_LOAD_WORD, _LOAD_HALF, _JUMP_EQUAL = 0x20, 0x28, 0x15
_NETWORK_HEADER = 0xFFF00000  # offsets from here count from the IP header; others from the TCP header
_SOURCE = {socket.AF_INET: 12, socket.AF_INET6: 8}  # the place of the source address in the IP header
_PROBE_S = 0.05


class Peer(NamedTuple):
    """One end of a TCP connection."""

    host: str
    port: int


class Door:
    """Guards the listening socket ``listener``: a connection needs an admitted address and port.

    A stranger's packets vanish in the kernel, and its connection times out. A connection stays when its admission ends.
    Linux only: a classic packet filter, which needs no privilege. Admissions may overlap, from several threads.
    """

    def __init__(self, listener: socket.socket) -> None:
        self._listener, self._lock = listener, threading.Lock()
        self._admitted: list[Peer] = []
        self._attach()

    @contextlib.contextmanager
    def admitting(self, peer: Peer) -> Iterator[None]:
        """Let ``peer`` connect within the block."""
        self._change(peer, admit=True)
        try:
            yield
        finally:
            self._change(peer, admit=False)

    def close(self) -> None:
        """Close this object's listening socket."""
        self._listener.close()

    def _change(self, peer: Peer, *, admit: bool) -> None:
        with self._lock:
            if admit:
                self._admitted.append(peer)
            else:
                self._admitted.remove(peer)
            with contextlib.suppress(OSError):  # closed: nobody can connect
                self._attach()

    def _attach(self) -> None:
        family = self._listener.family
        lines = [line for peer in self._admitted for line in _admission(family, peer)]
        code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in [*lines, _DROP]))
        program = struct.pack("@HP", len(lines) + 1, ctypes.addressof(code))
        self._listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)


def _admission(family: int, peer: Peer) -> list[tuple[int, int, int, int]]:
    """Return instructions that accept a packet from ``peer``, and leave others to the next ones."""
    address = socket.inet_pton(family, peer.host.partition("%")[0])
    checks = [(_LOAD_HALF, 0, peer.port)]
    for number, (word,) in enumerate(struct.iter_unpack("!I", address)):
        checks.append((_LOAD_WORD, _NETWORK_HEADER + _SOURCE[socket.AddressFamily(family)] + 4 * number, word))
    lines: list[tuple[int, int, int, int]] = []
    for left, (load, place, wanted) in zip(range(len(checks) - 1, -1, -1), checks, strict=True):
        lines += [(load, 0, 0, place), (_JUMP_EQUAL, 0, 2 * left + 1, wanted)]
    return [*lines, _ACCEPT]


@functools.cache
def check_doors() -> None:
    """Raise CommError if this system's kernel does not close doors. Blocks for 50 ms, once in a process."""
    with socket.socket() as listener, socket.socket() as stranger:
        listener.bind(("127.0.0.1", 0))
        why = "it ignores the packet filter of a listening socket"
        try:
            Door(listener)
            listener.listen()
            stranger.settimeout(_PROBE_S)
            stranger.connect(listener.getsockname())
        except TimeoutError:
            return
        except OSError as exc:
            why = f"it refuses the packet filter of a listening socket: {exc}"
    raise CommError("cannot serve a store closed to strangers", why=why, fix="use Linux outside such a sandbox")


def own_sockets() -> Iterator[socket.socket]:
    """Yield a duplicate of each TCP socket of this process; it is closed after the caller's use."""
    for _, mine in _numbered_sockets():
        yield mine


def find_descriptor(near: Peer, far: Peer) -> int | None:
    """Return the descriptor of this process's connection from ``near`` to ``far``, None if it has none."""
    for descriptor, mine in _numbered_sockets():
        with contextlib.suppress(OSError):  # not connected
            if (peer_of(mine.getsockname()), peer_of(mine.getpeername())) == (near, far):
                return descriptor
    return None


def peer_of(address: tuple[str, int, int, int] | tuple[str, int]) -> Peer:
    """Return a socket's address without IPv6's extra fields; an IPv4 address as such, also on torch's IPv6 sockets."""
    return Peer(address[0].removeprefix("::ffff:"), address[1])


def _numbered_sockets() -> Iterator[tuple[int, socket.socket]]:
    for descriptor in sorted(map(int, os.listdir("/proc/self/fd")), reverse=True):  # the newest are the wanted, mostly
        try:
            copy = os.dup(descriptor)
        except OSError:  # closed meanwhile
            continue
        if not stat.S_ISSOCK(os.fstat(copy).st_mode):
            os.close(copy)
            continue
        with socket.socket(fileno=copy) as mine:
            if mine.family in _SOURCE and mine.type == socket.SOCK_STREAM:
                yield descriptor, mine
