"""Stores: key-value servers where processes meet before they have a group."""

from __future__ import annotations

import contextlib
import socket
import time
import weakref
from collections.abc import Callable, Collection, Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore as _PrefixStore
from torch._C._distributed_c10d import Store, TCPStore

from hwrl.comm.signed import CONNECT_S, Dialer, KeyedAddress, new_key, require_key, warn_once
from hwrl.comm.sockets import open_socket, reachable_host
from hwrl.errors import CommError, PeerLostError, first_line

_BACKLOG = 4096
_dialers: list[Dialer] = []
"""The stores that this process and the processes that forked it have served or joined, also those that have ended.

Torch connects to some of them by itself, at any time, so a dialer stays.
"""


class PrefixStore(_PrefixStore):
    """A part of ``store``: its keys get a prefix. Keeps ``store`` alive; torch's would keep only its C++ side.

    Raises CommError in a fork of the process that made ``store``.
    """

    def __init__(self, prefix: str, store: Store) -> None:
        _dialer_of(store)
        super().__init__(prefix, store)
        self._store = store


def keep_store(store: Store, *, user: object) -> None:
    """Keep ``store`` alive as long as ``user``, which has only its C++ side or its address."""
    weakref.finalize(user, id, store).atexit = False


def serve_store(
    host: str = "127.0.0.1", port: int = 0, *, timeout_s: float = 300.0, warn: Callable[[str], object] = warn_once
) -> TCPStore:
    """Return a new store, served by this process at ``store_address(store)`` while the object lives.

    Senders, receivers, groups and connections that this process makes of it keep it alive; its address does not.

    Only a process with the address can use it: the address holds a new secret key, and the kernel drops every packet
    that is not signed with it (docs/security.md). The store listens only on the address of ``host`` at ``port``, 0 for
    a free one. "0.0.0.0" means every IPv4 interface; the store's address then has one of them. ``timeout_s`` bounds
    blocking calls of the store. Raises CommError if the port is taken, or ``host`` is not an address of this machine.
    Where the kernel cannot sign packets, a store on the loopback interface has no key, and one on another interface
    raises CommError. ``warn`` gets a line that says why a store has no key; by default it is logged, once in a process.
    """
    try:
        with open_socket(host, port, _bind) as listener:
            key = new_key(listener.getsockname()[0], warn)
            require_key(listener, key)
            listener.listen(_BACKLOG)
            address = KeyedAddress(reachable_host(host), listener.getsockname()[1], key)
            dialer = Dialer(address, _listen_near(address.port))
            store = _make(
                dialer,
                lambda: TCPStore(
                    dialer.near[0],
                    address.port,
                    is_master=True,
                    wait_for_workers=False,
                    timeout=timedelta(seconds=timeout_s),
                    master_listen_fd=listener.detach(),  # without a socket, TCPStore listens on every interface
                ),
            )
    except (OSError, OverflowError, UnicodeError, dist.DistError) as exc:  # also a port or a name that cannot be
        raise CommError(
            f"cannot serve a store on {host}:{port}",
            why=first_line(exc),
            fix="use an address of this machine, and another port, or 0 for a free one",
        ) from exc
    weakref.finalize(store, dialer.close)
    return store


def _bind(unused: socket.socket, place: tuple[Any, ...]) -> None:
    unused.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if unused.family == socket.AF_INET6:
        unused.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    unused.bind(place)


def _listen_near(port: int) -> socket.socket:
    """Return a socket that listens at ``port`` of a loopback address; ``port`` may be taken at other addresses.

    Torch's server wants its own client to connect to the server's port, but leaves the address to us.
    """
    for host in ("127.0.0.1", "127.0.0.2", "::1"):
        with contextlib.suppress(OSError):
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            return socket.create_server((host, port), family=family, backlog=128)
    raise OSError(
        f"port {port} of the loopback interface is taken; a store on all interfaces leaves ::1 alone, and needs IPv6"
    )


def _make(dialer: Dialer, client: Callable[[], TCPStore], *, timeout_s: float = CONNECT_S) -> TCPStore:
    """Return ``dialer``'s new client. Close a new dialer without one."""
    try:
        store = dialer.make(client, timeout_s=timeout_s)
    except BaseException:
        if dialer not in _dialers:
            dialer.close()
        raise
    if dialer not in _dialers:
        _dialers.append(dialer)
    return store


def store_address(store: Store) -> str:
    """Return ``host:port#key`` ("[host]:port#key" for IPv6), for :func:`connect_store`.

    The key opens the store: hand the address only to processes of the run, and never log it. Raises CommError if
    ``store`` is not from :func:`serve_store` or :func:`connect_store`, or a clone of one.
    """
    dialer = _dialer_of(store)
    if dialer is None:
        raise CommError("the store has no address", why="serve_store did not make it", fix="use serve_store()")
    return str(dialer.address)


def connect_store(address: str, *, timeout_s: float = 30.0) -> TCPStore:
    """Return a client of the store at ``address`` ("host:port#key"); wait up to ``timeout_s`` for the server.

    Raises CommTimeoutError if no store with this key answers there in time: a store is silent to others.
    """
    wanted = KeyedAddress.parse(address)
    dialer = _find_dialer(lambda known: known.address == wanted)
    if dialer is None or dialer.is_of_parent:
        dialer = Dialer(wanted, _listen_near(0))
    host, port = dialer.near
    timeout = timedelta(seconds=max(timeout_s, 1.0))
    try:
        return _make(dialer, lambda: TCPStore(host, port, is_master=False, timeout=timeout), timeout_s=timeout_s)
    except dist.DistError as exc:
        raise CommError(
            f"cannot use the store at {wanted.place}", why=first_line(exc), fix="is its process alive?"
        ) from exc


def is_on_loopback(store: Store) -> bool:
    """Return whether ``store`` is served on a loopback address: then all processes that use it are on this machine."""
    dialer = _dialer_of(store)
    return dialer is not None and dialer.address.is_loopback


def _dialer_of(store: Store) -> Dialer | None:
    """Return the dialer behind ``store``, None for a store that needs none.

    Raises CommError in a fork, and PeerLostError if this process served the store and has dropped it.
    """
    while isinstance(store, _PrefixStore):
        store = store.underlying_store
    if not isinstance(store, TCPStore):
        return None
    near = (store.host, store.port)
    found = _find_dialer(lambda known: known.near == near)
    if found is not None and found.is_of_parent:
        raise CommError(
            "the store cannot be used in this process",
            why="another process made it and then forked this one: a fork has no part in its parent's connections",
            fix="take store_address(store) before the fork, and call connect_store(address) here",
        )
    return found


def _find_dialer(is_wanted: Callable[[Dialer], bool]) -> Dialer | None:
    """Return the newest dialer that ``is_wanted``. Raises PeerLostError if its store has ended."""
    found = next(filter(is_wanted, reversed(_dialers)), None)
    if found is not None and found.closed.is_set():
        raise PeerLostError(
            "the store has ended",
            why="this process served it, and has dropped the object that serve_store returned",
            fix="keep that object as long as processes use the store",
        )
    return found


def await_keys(store: Store, keys: Collection[str], *, timeout_s: float) -> tuple[str, ...]:
    """Block until ``keys`` are in ``store`` or ``timeout_s`` has passed; return the missing keys, in order.

    It polls, because ``Store.wait`` locks the client for other threads and logs each timeout.
    """
    begin, missing = time.monotonic(), list(keys)
    with store_failures():
        while missing := [key for key in missing if not store.check([key])]:
            passed_s = time.monotonic() - begin
            if passed_s >= timeout_s:
                break
            pause(passed_s)
    return tuple(missing)


def pause(passed_s: float) -> None:
    """Sleep between two polls of a store or a device, ``passed_s`` after the first one.

    No sleep in the first millisecond, then 0.1 to 5 ms: polling adds at most 0.5 % to a wait.
    """
    time.sleep(0.0 if passed_s < 0.001 else min(max(0.0001, passed_s / 200), 0.005))


@contextlib.contextmanager
def store_failures() -> Iterator[None]:
    """Raise PeerLostError if a store cannot be reached inside the block."""
    try:
        yield
    except dist.DistError as exc:
        raise PeerLostError(
            "the store cannot be reached",
            why=first_line(exc),
            fix="check that the process that serves it is alive, and keeps the object that serve_store returned",
        ) from exc


def clone_store(store: Store) -> Store:
    """Return another connection to ``store``'s server."""
    clone: Callable[[], Store] = store.clone  # type: ignore[attr-defined]  # missing from torch's stubs
    dialer = _dialer_of(store)
    with store_failures():
        made = clone() if dialer is None else dialer.make(clone)
    keep_store(store, user=made)
    return made
