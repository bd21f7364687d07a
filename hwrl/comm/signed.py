"""TCP connections that need a key, also for torch's store client, which has none.

The kernel signs each packet, and drops packets of others (RFC 2385).
"""

from __future__ import annotations

import collections
import contextlib
import fcntl
import functools
import ipaddress
import logging
import os
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from hwrl.comm.sockets import brief_name_lookups, open_socket, process_sockets
from hwrl.errors import CommError, CommTimeoutError

_log = logging.getLogger("hwrl.comm")
_TCP_MD5SIG_EXT = 32
_ANY_PEER_NBYTES, _LONGEST_KEY_NBYTES = 128, 80
_FOR_ALL_PEERS = (1, 0)  # the flag "for a network", and the length of the network's prefix
_FIRST_TRY_S, _LONGEST_TRY_S = 0.1, 3.0
_STORE_PROBE_S, _KERNEL_PROBE_S = 0.2, 0.05
_LOST_AFTER_S = 120
"""After so many seconds without an answer a connection is lost.

A restarted machine cannot refuse it sooner: its refusal is not signed.
"""
_OPEN = "open"
_OPEN_VARIABLE = "HWRL_OPEN_STORE"
_CHUNK_NBYTES = 1 << 16
CONNECT_S = 10.0
_RETRY_S = 0.1
_Made = TypeVar("_Made")


class KeyedAddress(NamedTuple):
    """Where a store listens, and its key. The text, ``host:port#key``, opens the store: only the run may get it."""

    host: str
    port: int
    key: str

    def __str__(self) -> str:
        return f"{self.place}#{self.key}"

    def __repr__(self) -> str:
        return f"KeyedAddress({self.place})"

    @property
    def is_loopback(self) -> bool:
        """Whether only processes of the same machine reach this address."""
        with contextlib.suppress(ValueError):  # a name
            return ipaddress.ip_address(self.host).is_loopback
        return self.host == "localhost"

    @property
    def place(self) -> str:
        """The address without the key, for messages."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @classmethod
    def parse(cls, text: str) -> KeyedAddress:
        """Read ``text``. Raises CommError, without the key, if it is no address of a store."""
        place, _, key = text.partition("#")
        host, _, port = place.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        try:  # no look-up takes a name with an empty or too long part
            is_place = bool(host.encode("idna")) and port.isdecimal() and int(port) <= 65535
        except UnicodeError:
            is_place = False
        if not is_place or not 0 < len(key.encode()) <= _LONGEST_KEY_NBYTES:
            why = "it must be host:port#key"
            raise CommError(f"{place!r} is no store address", why=why, fix="use store_address(store)")
        return cls(host, int(port), key)


def require_key(listener: socket.socket, key: str) -> None:
    """Let the bound socket ``listener`` hear only peers with ``key``; for a connection, call it before connecting.

    Raises OSError if the kernel cannot sign packets.
    """
    if key == _OPEN:
        return
    any_peer = struct.pack(f"=H{_ANY_PEER_NBYTES - 2}x", listener.family)
    secret = key.encode()
    option = struct.pack(f"=BBHi{_LONGEST_KEY_NBYTES}s", *_FOR_ALL_PEERS, len(secret), 0, secret)
    listener.setsockopt(socket.IPPROTO_TCP, _TCP_MD5SIG_EXT, any_peer + option)


def new_key(host: str, warn: Callable[[str], object]) -> str:
    """Return a random key for a new store on the address ``host``, or "open", with the reason to ``warn``.

    A store is open if the user accepts that. If the kernel cannot sign packets, it is open on the loopback interface,
    where its strangers are other users of this machine; for a store that other machines reach this raises CommError.
    """
    if os.environ.get(_OPEN_VARIABLE) == "1":
        warn(
            f"{_OPEN_VARIABLE}=1: stores have no key, so any process that can connect to this machine can join, change "
            "and end the run"
        )
        return _OPEN
    why = why_unsigned()
    if why is None:
        return secrets.token_urlsafe(32)
    if KeyedAddress(host, 0, _OPEN).is_loopback:
        warn(f"{why}, so the store has no key: any user of this machine can join, change and end the run")
        return _OPEN
    raise CommError(
        f"cannot serve a store on {host} closed to strangers",
        why=why,
        fix="serve it on 127.0.0.1 if all processes are on this machine, or use a Linux kernel with CONFIG_TCP_MD5SIG, "
        f"or set {_OPEN_VARIABLE}=1 if no stranger can connect to this machine (docs/security.md)",
    )


@functools.cache
def warn_once(reason: str) -> None:
    """Log ``reason``, once in a process."""
    _log.warning(reason)


@functools.cache
def why_unsigned() -> str | None:
    """Return why this kernel cannot keep strangers out of a store; None if it can. Blocks for 50 ms, once a process."""
    with socket.socket() as listener, socket.socket() as stranger:
        listener.bind(("127.0.0.1", 0))
        try:
            require_key(listener, "key")
            listener.listen()
            stranger.settimeout(_KERNEL_PROBE_S)
            stranger.connect(listener.getsockname())
        except TimeoutError:
            return None
        except OSError as exc:
            return f"this system's kernel cannot sign packets: {exc}"
    return "this system's kernel ignores the key of a listening socket"


def dial(address: KeyedAddress, *, timeout_s: float) -> socket.socket:
    """Return a new connection to the store at ``address``; wait up to ``timeout_s`` for its server.

    Raises CommTimeoutError if no store with this key answers.
    """
    deadline, try_s = time.monotonic() + timeout_s, _FIRST_TRY_S
    while True:
        left_s = deadline - time.monotonic()
        try:
            return _connect(address, timeout_s=max(0.01, min(try_s, left_s)), key=address.key)
        except OSError as exc:  # silence also if nobody listens yet: the kernel ignores a refusal without signature
            if time.monotonic() >= deadline:
                raise CommTimeoutError(
                    f"no store answers at {address.place}",
                    why=f"tried for {timeout_s:g} s; {_why_silent(address)}",
                    fix="start the process that serves it, or take the address from its store_address(store)",
                ) from exc
        time.sleep(min(0.02, max(0.0, deadline - time.monotonic())))
        try_s = min(2 * try_s, _LONGEST_TRY_S)


def _connect(address: KeyedAddress, *, timeout_s: float, key: str) -> socket.socket:
    def connect(connection: socket.socket, place: tuple[Any, ...]) -> None:
        require_key(connection, key)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        with contextlib.suppress(OSError):  # some sandboxes lack these; calls have time limits, too
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _LOST_AFTER_S // 4)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _LOST_AFTER_S * 1000)
        connection.settimeout(timeout_s)
        connection.connect(place)
        connection.settimeout(None)

    return open_socket(address.host, address.port, connect)


def _why_silent(address: KeyedAddress) -> str:
    """Connect without a key, and return the meaning of the answer: a closed store is silent."""
    try:
        with contextlib.closing(_connect(address, timeout_s=_STORE_PROBE_S, key=_OPEN)):
            return "what listens there does not know the key"
    except TimeoutError:
        return "either it has another key, or a firewall or an address translation is on the way"
    except OSError as exc:
        return f"the last answer was: {exc}"


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
        self._relays: list[_Relay] = []  # that began since the last make()
        self.closed, self._process = threading.Event(), os.getpid()
        threading.Thread(target=self._serve, name="hwrl store dialer", daemon=True).start()

    @property
    def is_of_parent(self) -> bool:
        """Whether this process is a fork of the dialer's: threads and connections stay there."""
        return self._process != os.getpid()

    def make(self, client: Callable[[], _Made], *, timeout_s: float = CONNECT_S) -> _Made:
        """Return ``client()``, a new client of torch, idle on return. Blocks, up to ``timeout_s`` to connect.

        The store listens already. Raises CommTimeoutError if it does not answer.
        """
        with self._making:
            self._relays.clear()
            # Before torch: it tries a lost connection again and again, and prints a C++ stack each time.
            self._dialed.append(dial(self.address, timeout_s=timeout_s))
            try:
                with brief_name_lookups():
                    made = client()
            finally:
                with contextlib.suppress(IndexError):  # torch took it
                    self._dialed.popleft().close()
            if len(self._relays) == 1:  # else torch has connected by itself at the same time, and the relays stay
                self._relays[0].step_aside()
        return made

    def close(self) -> None:
        """Stop listening. Clients stay connected. In a fork this does nothing: the socket still serves the parent."""
        if self.is_of_parent:
            return
        self.closed.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _serve(self) -> None:
        while not self.closed.is_set():
            try:
                client, _ = self._listener.accept()
            except OSError:  # closed; or the process has too many files, so wait until it closes one
                self.closed.wait(_RETRY_S)
                continue
            try:
                self._connect(client)
            except (OSError, CommError, RuntimeError):
                client.close()  # a stranger, gone already, no store, or too many files or threads

    def _connect(self, client: socket.socket) -> None:
        near, far = _peer_of(client.getpeername()), _peer_of(client.getsockname())
        if _find_descriptor(near, far) is None:
            raise ConnectionRefusedError("another process has connected")
        try:
            store = self._dialed.popleft()
        except IndexError:  # torch connects by itself, or too late for make()
            store = dial(self.address, timeout_s=CONNECT_S)
        relay = _Relay(client, store, near=near, far=far)
        self._relays.append(relay)
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
