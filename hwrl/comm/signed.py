"""TCP connections that need a key: the kernel signs each packet, and drops packets of others (RFC 2385)."""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import logging
import os
import socket
import struct
import time
from collections.abc import Callable
from typing import NamedTuple

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


def new_key(random: str, host: str, warn: Callable[[str], object]) -> str:
    """Return ``random`` as the key of a new store on the address ``host``, or "open", with the reason to ``warn``.

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
        return random
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
    error: OSError = OSError("the name has no address")
    for family, _, _, _, place in socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM):
        connection = socket.socket(family)
        try:
            require_key(connection, key)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            with contextlib.suppress(OSError):  # some sandboxes lack these; calls have time limits, too
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _LOST_AFTER_S // 4)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _LOST_AFTER_S * 1000)
            connection.settimeout(timeout_s)
            connection.connect(place)
            connection.settimeout(None)
            return connection
        except OSError as exc:
            connection.close()
            error = exc
    raise error


def _why_silent(address: KeyedAddress) -> str:
    """Connect without a key, and return the meaning of the answer: a closed store is silent."""
    try:
        with contextlib.closing(_connect(address, timeout_s=_STORE_PROBE_S, key=_OPEN)):
            return "what listens there does not know the key"
    except TimeoutError:
        return "either it has another key, or a firewall or an address translation is on the way"
    except OSError as exc:
        return f"the last answer was: {exc}"
