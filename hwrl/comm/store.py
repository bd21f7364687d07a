"""Stores: key-value servers where processes meet before they have a group."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
import weakref
from collections.abc import Callable, Collection, Iterator
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore as _PrefixStore
from torch._C._distributed_c10d import Store, TCPStore

from hwrl.comm.dialer import Dialer, Peer
from hwrl.comm.signed import KeyedAddress, new_key, require_key, warn_once
from hwrl.comm.sockets import reachable_host
from hwrl.errors import CommError, PeerLostError, first_line

_BACKLOG = 4096
_served_or_joined: list[Dialer] = []
"""The stores of this process. Torch connects to some of them by itself, at any time, so a dialer stays."""
_of_parent: list[Peer] = []
"""Where the clients of the process that forked this one connect: their threads and connections stay with it."""
_ended: dict[KeyedAddress, Peer] = {}
"""The stores that this process has served until the last reference was dropped, and where their clients connected."""


def _leave_to_parent() -> None:
    _of_parent.extend(dialer.near for dialer in _served_or_joined)
    _served_or_joined.clear()


os.register_at_fork(after_in_child=_leave_to_parent)


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
    listener = _bind(host, port)
    try:
        key = new_key(secrets.token_urlsafe(32), listener.getsockname()[0], warn)
        require_key(listener, key)
        listener.listen(_BACKLOG)
    except (OSError, CommError) as exc:
        listener.close()
        if isinstance(exc, CommError):
            raise
        raise _cannot_serve(host, port, str(exc)) from exc
    address = KeyedAddress(reachable_host(host), listener.getsockname()[1], key)
    dialer = Dialer(address, _listen_near(address.port))
    try:
        store = dialer.make(lambda: _make_server(listener, dialer.near[0], timeout_s), starts_server=True)
    except dist.DistError as exc:
        dialer.close()
        raise _cannot_serve(host, port, first_line(exc)) from exc
    _served_or_joined.append(dialer)
    weakref.finalize(store, _end_service, dialer, os.getpid())
    return store


def _make_server(listener: socket.socket, near: str, timeout_s: float) -> TCPStore:
    """Return torch's store on ``listener``. Its own client connects to the same port, but at address ``near``."""
    return TCPStore(
        near,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listener.detach(),  # without a socket, TCPStore listens on every interface
    )


def _end_service(dialer: Dialer, server: int) -> None:
    if os.getpid() != server:  # a fork: the socket still serves its parent
        return
    dialer.close()
    _served_or_joined.remove(dialer)
    _ended[dialer.address] = dialer.near


def _bind(host: str, port: int) -> socket.socket:
    """Return a socket bound to the first address of ``host`` on this machine. It does not listen."""
    if not 0 <= port < 65536:
        raise _cannot_serve(host, port, "ports are 0 to 65535")
    why = "the name has no address"
    try:
        for family, _, _, _, (address, _, *scope) in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM):
            bound = socket.socket(family)
            try:
                bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                bound.bind((address, port, *scope))
                return bound
            except OSError as exc:
                bound.close()
                why = str(exc)
    except (OSError, UnicodeError) as exc:  # the name does not resolve
        why = str(exc)
    raise _cannot_serve(host, port, why)


def _listen_near(port: int) -> socket.socket:
    """Return a socket that listens at ``port`` of a loopback address; ``port`` may be taken at other addresses.

    Torch's server wants its own client to connect to the server's port, but leaves the address to us.
    """
    for host in ("127.0.0.1", "127.0.0.2", "::1"):
        with contextlib.suppress(OSError):
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            return socket.create_server((host, port), family=family, backlog=128)
    raise _cannot_serve(
        "the loopback interface", port, "it is taken there; a store on all interfaces leaves ::1 alone, and needs IPv6"
    )


def _cannot_serve(host: str, port: int, why: str) -> CommError:
    return CommError(
        f"cannot serve a store on {host}:{port}",
        why=why,
        fix="use an address of this machine, and another port, or 0 for a free one",
    )


def store_address(store: TCPStore) -> str:
    """Return ``host:port#key`` ("[host]:port#key" for IPv6), for :func:`connect_store`.

    The key opens the store: hand the address only to processes of the run, and never log it.
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
    if wanted in _ended:
        raise _has_ended()
    dialer = next((dialer for dialer in _served_or_joined if dialer.address == wanted), None) or Dialer(
        wanted, _listen_near(0)
    )
    host, port = dialer.near
    try:
        timeout = timedelta(seconds=max(timeout_s, 1.0))
        store = dialer.make(lambda: TCPStore(host, port, is_master=False, timeout=timeout), timeout_s=timeout_s)
    except (dist.DistError, CommError) as exc:
        if dialer not in _served_or_joined:
            dialer.close()
        if isinstance(exc, CommError):
            raise
        raise CommError(
            f"cannot use the store at {wanted.place}", why=first_line(exc), fix="is its process alive?"
        ) from exc
    if dialer not in _served_or_joined:
        _served_or_joined.append(dialer)
    return store


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
    found = next((dialer for dialer in _served_or_joined if dialer.near == near), None)
    if found is None and near in _of_parent:
        raise CommError(
            "the store cannot be used in this process",
            why="another process made it and then forked this one: a fork has no part in its parent's connections",
            fix="take store_address(store) before the fork, and call connect_store(address) here",
        )
    if found is None and near in _ended.values():
        raise _has_ended()
    return found


def _has_ended() -> PeerLostError:
    return PeerLostError(
        "the store has ended",
        why="this process served it, and has dropped the object that serve_store returned",
        fix="keep that object as long as processes use the store",
    )


def await_keys(store: Store, keys: Collection[str], *, timeout_s: float) -> tuple[str, ...]:
    """Block until ``keys`` are in ``store`` or ``timeout_s`` has passed; return the missing keys, in order.

    It polls, because ``Store.wait`` locks the client for other threads and logs each timeout.
    """
    begin = time.monotonic()
    with store_failures():
        missing = [key for key in keys if not store.check([key])]
        while missing:
            passed_s = time.monotonic() - begin
            if passed_s >= timeout_s:
                break
            pause(passed_s)
            missing = [key for key in missing if not store.check([key])]
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
