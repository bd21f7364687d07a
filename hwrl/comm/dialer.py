"""Torch's store client with a key: torch connects inside this process, and the dialer connects it with the store."""

from __future__ import annotations

import collections
import contextlib
import fcntl
import os
import select
import socket
import threading
from collections.abc import Callable
from typing import TypeVar

from hwrl.comm.signed import KeyedAddress, dial
from hwrl.comm.sockets import brief_name_lookups, process_sockets
from hwrl.errors import CommError

_CHUNK_NBYTES = 1 << 16
_CONNECT_S = 10.0
_RETRY_S = 0.1
_Made = TypeVar("_Made")


Peer = tuple[str, int]
"""Host and port: one end of a TCP connection."""


class Dialer:
    """Connects clients of this process with the store at ``address``; torch knows only :attr:`near`, on the loopback.

    Torch's client has no key. So it connects to :attr:`near`; the dialer checks that the connection comes from this
    process, connects to the store with the key, and relays. :meth:`make` then puts the connection to the store in the
    place of torch's, so operations take no detour. A connection that torch makes by itself stays relayed.
    """

    def __init__(self, address: KeyedAddress, listener: socket.socket) -> None:
        self.address, self.near = address, _peer_of(listener.getsockname())
        self._listener, self._making = listener, threading.Lock()
        self._dialed: collections.deque[socket.socket] = collections.deque()
        self._relays: list[_Relay] = []
        self._closed = threading.Event()
        threading.Thread(target=self._serve, name="hwrl store dialer", daemon=True).start()

    def make(self, client: Callable[[], _Made], *, timeout_s: float = _CONNECT_S, starts_server: bool = False) -> _Made:
        """Return ``client()``, a new client of torch, idle on return. Blocks, up to ``timeout_s`` to connect.

        Raises CommTimeoutError if the store does not answer.
        """
        with self._making:
            before = list(self._relays)
            try:
                if not starts_server:  # torch tries a lost connection again and again, and prints a C++ stack each time
                    self._dialed.append(dial(self.address, timeout_s=timeout_s))
                with brief_name_lookups():
                    made = client()
            finally:
                self._close_dialed()
            new = [relay for relay in self._relays if relay not in before]
            if len(new) == 1:  # else torch has connected by itself at the same time, and the relays stay
                new[0].step_aside()
        return made

    def close(self) -> None:
        """Stop listening. Clients stay connected."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _close_dialed(self) -> None:
        """Close a connection that :meth:`make` dialed and torch did not take."""
        while self._dialed:
            with contextlib.suppress(IndexError):  # taken at this moment
                self._dialed.popleft().close()

    def _serve(self) -> None:
        while not self._closed.is_set():
            try:
                client, _ = self._listener.accept()
            except ConnectionError:
                continue
            except OSError:  # closed; or the process has too many files, so wait until it closes one
                self._closed.wait(_RETRY_S)
                continue
            try:
                self._connect(client)
            except (OSError, CommError, RuntimeError):  # gone already, no store, or too many files or threads
                client.close()

    def _connect(self, client: socket.socket) -> None:
        near, far = _peer_of(client.getpeername()), _peer_of(client.getsockname())
        if _find_descriptor(near, far) is None:  # another process
            client.close()
            return
        try:
            store = self._dialed.popleft()
        except IndexError:  # torch connects by itself, or too late for make()
            store = dial(self.address, timeout_s=_CONNECT_S)
        relay = _Relay(client, store, near=near, far=far)
        self._relays = [*(one for one in self._relays if one.is_alive()), relay]
        relay.start()  # when it is in the list: torch's client may be ready a moment later


class _Relay(threading.Thread):
    """Copies bytes between torch's ``client`` and the ``store`` until one of them ends.

    ``near`` and ``far`` are the ends of torch's connection.
    """

    def __init__(self, client: socket.socket, store: socket.socket, *, near: Peer, far: Peer) -> None:
        super().__init__(name="hwrl store relay", daemon=True)
        self._client, self._store, self._near, self._far = client, store, near, far
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def step_aside(self) -> None:
        """Give torch's client the connection to the store. The client must be idle."""
        descriptor = _find_descriptor(self._near, self._far)
        if descriptor is None:  # closed already
            return
        with contextlib.suppress(OSError, ValueError):  # the store has gone at this moment: the next request says so
            fcntl.fcntl(self._store, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL))
            os.dup2(self._store.fileno(), descriptor, inheritable=False)  # this closes the connection to the relay
        self.join()  # before the client's next request: the relay must not read its answer

    def run(self) -> None:
        """Copy until one of the two ends."""
        ways = {self._client.fileno(): (self._client, self._store), self._store.fileno(): (self._store, self._client)}
        waiting = select.poll()
        for descriptor in ways:
            waiting.register(descriptor, select.POLLIN)
        with self._client, self._store, contextlib.suppress(OSError):
            while True:
                for descriptor, _ in waiting.poll():
                    source, target = ways[descriptor]
                    data = source.recv(_CHUNK_NBYTES)
                    if not data:
                        return
                    target.sendall(data)


def _find_descriptor(near: Peer, far: Peer) -> int | None:
    """Return the descriptor of this process's connection from ``near`` to ``far``, None if it has none."""
    for descriptor, mine in process_sockets():
        with contextlib.suppress(OSError):  # not connected
            if (_peer_of(mine.getsockname()), _peer_of(mine.getpeername())) == (near, far):
                return descriptor
    return None


def _peer_of(address: tuple[str, int, int, int] | tuple[str, int]) -> Peer:
    """Return a socket's address without IPv6's extra fields; an IPv4 address as such, also on torch's IPv6 sockets."""
    return address[0].removeprefix("::ffff:"), address[1]
