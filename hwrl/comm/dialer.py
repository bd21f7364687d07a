"""Torch's store client behind a gate: torch connects inside this process, and the dialer connects it with the store."""

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

from hwrl.comm.door import Peer, find_descriptor, peer_of
from hwrl.comm.gate import GateAddress, dial
from hwrl.errors import CommError

_CHUNK_NBYTES = 1 << 16
_Made = TypeVar("_Made")


class Dialer:
    """Connects clients of this process with the store at ``address``; torch knows only :attr:`near`, on the loopback.

    Torch's client cannot prove a key. So it connects to :attr:`near`; the dialer checks that the connection comes from
    this process, passes the store's gate, and relays. :meth:`make` then puts the connection to the store in the place
    of torch's, so operations take no detour. A connection that torch makes by itself stays relayed.
    """

    def __init__(self, address: GateAddress, listener: socket.socket) -> None:
        self.address, self.near = address, peer_of(listener.getsockname())
        self._listener, self._making, self._lock = listener, threading.Lock(), threading.Lock()
        self._dialed: collections.deque[socket.socket] = collections.deque()
        self._relays: list[_Relay] = []
        threading.Thread(target=self._serve, name="hwrl store dialer", daemon=True).start()

    def make(self, client: Callable[[], _Made], *, starts_server: bool = False) -> _Made:
        """Return ``client()``, which makes one client of torch; it must be idle then. Blocks.

        Raises CommError if the store does not admit this process.
        """
        with self._making:
            with self._lock:
                before = list(self._relays)
            if not starts_server:  # torch would try a lost connection again and again, and print a C++ stack each time
                self._dialed.append(dial(self.address))
            made = client()
            with self._lock:
                new = [relay for relay in self._relays if relay not in before]
            if len(new) == 1:  # else torch has connected by itself at the same time, and the relays stay
                new[0].step_aside()
        return made

    def close(self) -> None:
        """Stop listening. Clients stay connected."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except ConnectionError:
                continue
            except OSError:
                return
            with contextlib.suppress(OSError):  # gone already
                self._connect(client)

    def _connect(self, client: socket.socket) -> None:
        near, far = peer_of(client.getpeername()), peer_of(client.getsockname())
        if find_descriptor(near, far) is None:  # another process
            client.close()
            return
        try:
            store = self._dialed.popleft() if self._dialed else dial(self.address)
        except CommError:
            client.close()
            return
        relay = _Relay(client, store, near=near, far=far, at_end=self._forget)
        with self._lock:
            self._relays.append(relay)
        relay.start()  # when it is in the list: torch's client may be ready a moment later

    def _forget(self, relay: _Relay) -> None:
        with self._lock:
            self._relays.remove(relay)


class _Relay:
    """Copies bytes between torch's ``client`` and the ``store``, in a thread, until one of them ends.

    Then it calls ``at_end`` with itself. ``near`` and ``far`` are the ends of torch's connection.
    """

    def __init__(
        self,
        client: socket.socket,
        store: socket.socket,
        *,
        near: Peer,
        far: Peer,
        at_end: Callable[[_Relay], None],
    ) -> None:
        self._client, self._store, self._near, self._far, self._at_end = client, store, near, far, at_end
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._thread = threading.Thread(target=self._run, name="hwrl store relay", daemon=True)

    def start(self) -> None:
        """Begin to copy."""
        self._thread.start()

    def step_aside(self) -> None:
        """Give torch's client the connection to the store. The client must be idle."""
        descriptor = find_descriptor(self._near, self._far)
        if descriptor is None:  # closed already
            return
        fcntl.fcntl(self._store, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL))
        os.dup2(self._store.fileno(), descriptor, inheritable=False)  # this closes the connection to the relay
        self._thread.join()  # before the client's next request: the relay must not read its answer

    def _run(self) -> None:
        try:
            self._copy()
        finally:
            self._at_end(self)

    def _copy(self) -> None:
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
