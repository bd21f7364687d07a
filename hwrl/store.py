"""Stores, over which processes find each other before they have a group."""

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
    """Return a store that other processes reach at ``store_address(store)``; it lives as long as this object.

    ``port`` 0 takes a free one. ``timeout_s`` bounds its blocking calls. Raises CommError if the port is taken.
    """
    try:
        return TCPStore(host, port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))
    except dist.DistError as exc:
        raise CommError(
            f"cannot serve a store on {host}:{port}",
            why=first_line(exc),
            fix="choose another port, or 0 for a free one",
        ) from exc


def store_address(store: TCPStore) -> str:
    """Return ``host:port``, which :func:`connect_store` takes."""
    return f"{store.host}:{store.port}"


def connect_store(address: str, *, timeout_s: float = 30.0) -> TCPStore:
    """Return a client of the store at ``address`` ("host:port"), waiting up to ``timeout_s`` for it to be served.

    Raises CommTimeoutError if nothing answers there in time.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise CommError(f"{address!r} is no store address", why="it must be host:port", fix="use store_address(store)")
    _await_server(host, int(port), timeout_s)
    try:
        return TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=max(timeout_s, 1.0)))
    except dist.DistError as exc:
        raise CommError(f"cannot use the store at {address}", why=first_line(exc), fix="is it a torch store?") from exc


def _await_server(host: str, port: int, timeout_s: float) -> None:
    # TCPStore retries too, but prints a C++ stack for every try and overruns its timeout (torch 2.13).
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
    """Block until ``keys`` are in ``store`` or ``timeout_s`` passed; return those still missing, in order.

    Asks again and again, because ``Store.wait`` locks the client for other threads and logs each timeout.
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
    """Sleep between two looks at a store or a device: not at all in the first millisecond, then 0.1 to 5 ms, so that
    after ``passed_s`` an answer is seen half a hundredth of that late.
    """
    time.sleep(0.0 if passed_s < 0.001 else min(max(0.0001, passed_s / 200), 0.005))


@contextlib.contextmanager
def store_failures() -> Iterator[None]:
    """Raise PeerLostError for what torch raises when a store cannot be reached."""
    try:
        yield
    except dist.DistError as exc:
        raise PeerLostError(
            "the store cannot be reached", why=first_line(exc), fix="is the process alive that serves it?"
        ) from exc


def clone_store(store: Store) -> Store:
    """Return another connection to ``store``'s server."""
    with store_failures():
        cloned: Store = store.clone()  # type: ignore[attr-defined]  # missing from torch's stubs
    return cloned


def first_line(exc: BaseException) -> str:
    """Return what torch's error says, without the C++ stack below it."""
    return str(exc).partition("\n")[0]
