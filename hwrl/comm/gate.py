"""Admission to a store: both ends prove that they know the store's key, and tell a stranger nothing.

1. The gate sends 32 random bytes.
2. The client answers with 32 of its own, the port of its next connection, and a proof.
3. The gate opens the store's door for this port, and answers with the store's port and a proof.
4. The client connects from its port to the store, and sends one byte. The gate closes the door, and sends one byte.

A proof is an HMAC-SHA256 of the messages so far and of both ends' hosts: another host cannot pass it on.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from hwrl.comm.door import Door, Peer, own_sockets, peer_of
from hwrl.errors import CommError, CommTimeoutError

_NONCE_NBYTES, _PROOF_NBYTES = 32, 32
_PORT = struct.Struct("!H")
_DONE = b"!"
_LIMIT_S = 10.0
"""For one message of a handshake."""
_MOST_PENDING, _PATIENCE_S = 256, 1.0
"""If so many handshakes are under way, others wait until one ends. Older ones are dropped: strangers may be idle."""
_MOST_ADMITTED = 32  # the kernel limits the length of a packet filter
_BACKLOG = 4096
_LOOK_S = 0.0005


class GateAddress(NamedTuple):
    """A store's gate and its key. Its text, ``host:port#key``, opens the store: only the run may get it."""

    host: str
    port: int
    key: str

    def __str__(self) -> str:
        return f"{self.place}#{self.key}"

    @property
    def place(self) -> str:
        """The address without the key, for messages."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @classmethod
    def parse(cls, text: str) -> GateAddress:
        """Read ``text``. Raises CommError, without the key, if it is no address of a store."""
        place, _, key = text.partition("#")
        host, _, port = place.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if not host or not port.isdecimal() or int(port) > 65535 or not key:
            why = "it must be host:port#key"
            raise CommError(f"{place!r} is no store address", why=why, fix="use store_address(store)")
        return cls(host, int(port), key)


class Gate:
    """Admits clients with ``key`` to the store behind it. ``listener`` and ``behind``, the store's, are bound sockets.

    Both listen from now on, but for ``behind`` the kernel drops the packets of clients that are not admitted. The gate
    has a thread, and one more for each handshake. :meth:`close` ends it: nobody joins later, and members stay.
    """

    def __init__(self, listener: socket.socket, *, key: str, behind: socket.socket) -> None:
        self._listener, self._key, self._store_port = listener, key.encode(), behind.getsockname()[1]
        self._door = Door(behind.dup())
        behind.listen()  # after the door is closed
        listener.listen(_BACKLOG)
        self._pending: dict[socket.socket, float] = {}  # since when
        self._places = threading.Semaphore(_MOST_ADMITTED)
        threading.Thread(target=self._serve, name="hwrl store gate", daemon=True).start()

    def close(self) -> None:
        """Stop listening. Does not block."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._door.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except ConnectionError:  # the client gave up
                continue
            except OSError:
                if self._listener.fileno() < 0:
                    return
                time.sleep(0.01)  # no free descriptor, perhaps
                continue
            self._wait_for_room()
            self._pending[connection] = time.monotonic()
            threading.Thread(target=self._meet, args=[connection], name="hwrl store handshake", daemon=True).start()

    def _wait_for_room(self) -> None:
        while len(self._pending) >= _MOST_PENDING:
            time.sleep(_LOOK_S)
            now_s = time.monotonic()
            for connection, since_s in list(self._pending.items()):
                if now_s - since_s > _PATIENCE_S:
                    self._pending.pop(connection, None)
                    with contextlib.suppress(OSError):  # it has just ended
                        connection.shutdown(socket.SHUT_RDWR)

    def _meet(self, connection: socket.socket) -> None:
        try:
            with connection, contextlib.suppress(OSError):
                connection.settimeout(_LIMIT_S)
                self._admit(connection)
        finally:
            self._pending.pop(connection, None)

    def _admit(self, connection: socket.socket) -> None:
        host, server = connection.getpeername()[0], connection.getsockname()[0]
        nonce = secrets.token_bytes(_NONCE_NBYTES)
        connection.sendall(nonce)
        answer, proof = _receive(connection, _NONCE_NBYTES + _PORT.size), _receive(connection, _PROOF_NBYTES)
        said = _beginning(host, server) + nonce + answer
        if not hmac.compare_digest(proof, _proof(self._key, b"client", said)):
            return
        client = Peer(host, *_PORT.unpack(answer[_NONCE_NBYTES:]))
        with self._places, self._door.admitting(client):
            port = _PORT.pack(self._store_port)
            connection.sendall(port + _proof(self._key, b"server", said + port))
            _receive(connection, len(_DONE))
            arrived = _wait_until(lambda: _has_connection_from(client))
        if arrived:  # only now: its packets were dropped if the door closed before the kernel knew the connection
            connection.sendall(_DONE)


def dial(address: GateAddress) -> socket.socket:
    """Return a new connection to the store at ``address``, after both ends have proved their key. Blocks.

    Raises CommError if the other end has another key or is no gate, and CommTimeoutError if it does not answer.
    """
    try:
        with socket.create_connection((address.host, address.port), _LIMIT_S) as gate:
            return _pass_gate(gate, address.key.encode())
    except TimeoutError as exc:
        raise CommTimeoutError(
            f"the store at {address.place} does not answer",
            why=f"its gate was silent for {_LIMIT_S:g} s; {exc}",
            fix="is it a store of this version of hwrl? Is there a firewall or address translation on the way?",
        ) from exc
    except OSError as exc:
        raise CommError(
            f"the store at {address.place} does not admit this process",
            why=f"{exc}: it has another key, or it is no store of hwrl",
            fix="take the address from store_address(store), with its key, in a process of the same run",
        ) from exc


def _pass_gate(gate: socket.socket, key: bytes) -> socket.socket:
    """Do the client's part of the handshake on ``gate``; return the connection to the store."""
    connection = socket.socket(gate.family, socket.SOCK_STREAM)
    try:
        connection.settimeout(_LIMIT_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.bind((gate.getsockname()[0], 0, *gate.getsockname()[2:]))
        nonce = _receive(gate, _NONCE_NBYTES)
        answer = secrets.token_bytes(_NONCE_NBYTES) + _PORT.pack(connection.getsockname()[1])
        said = _beginning(gate.getsockname()[0], gate.getpeername()[0]) + nonce + answer
        gate.sendall(answer + _proof(key, b"client", said))
        port, proof = _receive(gate, _PORT.size), _receive(gate, _PROOF_NBYTES)
        if not hmac.compare_digest(proof, _proof(key, b"server", said + port)):
            raise ConnectionRefusedError("the other end does not know the key")
        connection.connect((gate.getpeername()[0], *_PORT.unpack(port), *gate.getpeername()[2:]))
        gate.sendall(_DONE)
        _receive(gate, len(_DONE))
        connection.settimeout(None)
    except BaseException:
        connection.close()
        raise
    return connection


def _beginning(client: str, server: str) -> bytes:
    """Return the part of a proof that names both ends' hosts; a link's scope differs between hosts."""
    return f"{client.partition('%')[0]} {server.partition('%')[0]} ".encode()


def _proof(key: bytes, end: bytes, said: bytes) -> bytes:
    return hmac.digest(key, b"hwrl store, " + end + b": " + said, "sha256")


def _receive(connection: socket.socket, nbytes: int) -> bytes:
    received = b""
    while len(received) < nbytes:
        part = connection.recv(nbytes - len(received))
        if not part:
            raise ConnectionAbortedError("the other end closed the connection")
        received += part
    return received


def _has_connection_from(client: Peer) -> bool:
    for mine in own_sockets():
        with contextlib.suppress(OSError):
            if peer_of(mine.getpeername()) == client:
                return True
    return False


def _wait_until(holds: Callable[[], bool]) -> bool:
    """Wait until ``holds()``; return False after ``_LIMIT_S``."""
    deadline = time.monotonic() + _LIMIT_S
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(_LOOK_S)
    return True
