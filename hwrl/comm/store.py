"""Stores: key-value servers where processes meet before they have a group."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Collection, Iterator
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore

from hwrl.errors import CommError, CommTimeoutError, PeerLostError


def serve_store(host: str = "127.0.0.1", port: int = 0, *, timeout_s: float = 300.0) -> TCPStore:
    """Return a new store, served by this process at ``store_address(store)`` while the object lives.

    It listens only on the address of ``host``; "0.0.0.0" means every IPv4 interface. Any process with access to the
    port may read and write. ``port`` 0 takes a free port. ``timeout_s`` bounds blocking calls of the store. Raises
    CommError if the port is taken, or if ``host`` is not an address of this machine.
    """
    listener = _listen(host, port)
    bound, timeout = listener.getsockname()[1], timedelta(seconds=timeout_s)
    try:  # without a socket, TCPStore listens on every interface, whatever its host is
        return TCPStore(
            host, bound, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=listener.detach()
        )
    except dist.DistError as exc:
        raise _cannot_serve(host, port, first_line(exc)) from exc


def _listen(host: str, port: int) -> socket.socket:
    """Return a listening socket on the first address of ``host`` on this machine."""
    if not 0 <= port < 65536:
        raise _cannot_serve(host, port, "ports are 0 to 65535")
    why = "the name has no address"
    try:
        for family, _, _, _, (address, _, *scope) in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM):
            try:
                return socket.create_server((address, port, *scope), family=family)
            except OSError as exc:
                why = str(exc)
    except (OSError, UnicodeError) as exc:  # the name does not resolve
        why = str(exc)
    raise _cannot_serve(host, port, why)


def _cannot_serve(host: str, port: int, why: str) -> CommError:
    return CommError(
        f"cannot serve a store on {host}:{port}",
        why=why,
        fix="use an address of this machine, and another port, or 0 for a free one",
    )


def store_address(store: TCPStore) -> str:
    """Return ``host:port`` ("[host]:port" for IPv6), for :func:`connect_store`."""
    host = f"[{store.host}]" if ":" in store.host else store.host
    return f"{host}:{store.port}"


def connect_store(address: str, *, timeout_s: float = 30.0) -> TCPStore:
    """Return a client of the store at ``address`` ("host:port"); wait up to ``timeout_s`` for the server.

    Raises CommTimeoutError if nothing answers there in time.
    """
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise CommError(f"{address!r} is no store address", why="it must be host:port", fix="use store_address(store)")
    _wait_for_server(host, int(port), timeout_s)
    try:
        return TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=max(timeout_s, 1.0)))
    except dist.DistError as exc:
        raise CommError(f"cannot use the store at {address}", why=first_line(exc), fix="is it a torch store?") from exc


def _wait_for_server(host: str, port: int, timeout_s: float) -> None:
    # TCPStore retries, too, but prints a C++ stack for each attempt and exceeds its timeout (torch 2.13).
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection((host, port), timeout=max(0.05, deadline - time.monotonic())).close()
            return
        except OSError as exc:
            if time.monotonic() >= deadline:
                raise CommTimeoutError(
                    f"no store answers at {host}:{port}",
                    why=f"tried for {timeout_s:g} s; the last answer was: {exc}",
                    fix="start the process that serves it, or correct the address",
                ) from exc
            time.sleep(0.05)


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
            "the store cannot be reached", why=first_line(exc), fix="check that the process that serves it is alive"
        ) from exc


def clone_store(store: Store) -> Store:
    """Return another connection to ``store``'s server."""
    with store_failures():
        cloned: Store = store.clone()  # type: ignore[attr-defined]  # missing from torch's stubs
    return cloned


def first_line(exc: BaseException) -> str:
    """Return the message of torch's error without the C++ stack below it."""
    return str(exc).partition("\n")[0]
