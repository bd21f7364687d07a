"""Gloo process groups that know their sockets: with a working abort, and without strangers.

torch's ``ProcessGroupGloo.abort`` does nothing (measured on 2.13: a blocked recv stayed blocked until its peer died).
But after the shutdown of a socket, every operation on it fails within milliseconds. So each group gets its own Gloo
device, and the device's listening port identifies the group's sockets in this process.

Gloo's sockets authenticate nobody: the first process that connects and sends a small number takes a rank's place. So
the ranks compare their connections in the store before the group is used: each must have a rank at both ends. Delete
this module when Gloo has an abort and a key of its own.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist

from hwrl.comm import Store, await_keys, is_on_loopback, process_sockets
from hwrl.errors import CommError, CommTimeoutError, UnsupportedError

CHECKED = "hwrl_gloo"
"""The name in torch.distributed of groups that are checked for strangers."""

Address: TypeAlias = tuple[str, int]
Addresses: TypeAlias = frozenset[Address]
GlooLink: TypeAlias = tuple[Address, Address]
"""A connection: the address of this process's end, then the peer's."""

_Read = TypeVar("_Read")
_making_device = threading.Lock()
_ATTEMPTS = 5
_NOTICE_S = 5.0
"""How long an abort waits, after the first step of the shutdown, until Gloo has closed the sockets."""
# Concurrent operations. With torch's default of 2, a stream of 16 MB broadcasts waits for handshakes: 5 % slower.
_THREADS = 4


def register() -> str:
    """Let torch's own functions, such as ``init_process_group``, make checked groups; return their name in torch."""
    dist.Backend.register_backend(CHECKED, _create_in_torch, extended_api=True, devices=["cpu"])
    return CHECKED


def _create_in_torch(options: Any, _: Any) -> Any:
    place: dict[str, Any] = {"rank": options.group_rank, "size": options.group_size}
    return _connect(options.store, **place, timeout=options.timeout)[0]


class AbortableGroups:
    """The groups of one backend object, with the listening addresses of each."""

    def __init__(self) -> None:
        self._groups: weakref.WeakKeyDictionary[Any, tuple[Any, Addresses]] = weakref.WeakKeyDictionary()

    def create(self, store: Store, *, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
        """Return a group for :meth:`abort`; blocks until all ranks are connected. Raises CommError for a stranger."""
        gloo, addresses = _connect(store, rank=rank, size=size, timeout=timeout)
        group = dist.ProcessGroup(store, rank, size)
        group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
        self._groups[group] = gloo, addresses
        return group

    def abort(self, group: dist.ProcessGroup) -> None:
        """Shut down this process's sockets of ``group``; blocked operations fail at once, here and at the peers."""
        gloo, addresses = self._groups.pop(group, (None, None))
        if addresses is None:
            raise UnsupportedError(
                "cannot abort this process group",
                why="torch made it, and torch's own Gloo groups ignore abort",
                fix="use a group from Comm.standalone_group, or end the process",
            )
        _shut_down(addresses, socket.SHUT_RD)
        deadline_s = time.monotonic() + _NOTICE_S
        while any(_links(addresses)) and time.monotonic() < deadline_s:
            time.sleep(0.001)
        _shut_down(addresses, socket.SHUT_RDWR)
        threading.Thread(target=_end, args=(weakref.ref(group), [gloo]), name="hwrl-gloo-end", daemon=True).start()


def _end(group: weakref.ref[Any], gloo: list[Any]) -> None:
    """Free ``gloo``, of the aborted ``group``, after that is freed: in this thread, because it may block.

    Gloo forgets an operation whose write fails before it sees that the peer has left. It ends at its timeout only.
    """
    while group() is not None:
        time.sleep(0.02)
    time.sleep(0.1)  # the group's part in C++ is freed just after its references
    gloo.clear()


def _connect(store: Store, *, rank: int, size: int, timeout: timedelta) -> tuple[Any, Addresses]:
    """Return Gloo's group, connected with all ranks and nobody else, and the addresses where its ranks listen."""
    made = [_device_of_its_own(make) for make in _devices(on_loopback=size == 1 or is_on_loopback(store))]
    options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # missing from torch's stubs
    options._devices = [device for device, _ in made]
    options._timeout, options._threads = timeout, _THREADS * len(made)
    store.set(f"listens/{rank}", json.dumps([address for _, address in made]))
    gloo = dist.ProcessGroupGloo(store, rank, size, options)
    notes = (store.get(f"listens/{peer}") for peer in range(size))
    addresses = frozenset(address for note in notes for address in _read(note, _address))
    if size > 1:
        _refuse_strangers(store, addresses, rank=rank, size=size, timeout_s=timeout.total_seconds())
    return gloo, addresses


def _refuse_strangers(store: Store, addresses: Addresses, *, rank: int, size: int, timeout_s: float) -> None:
    """Raise CommError, in every rank, and shut down all, if a connection of the group lacks a rank at one end.

    A stranger cannot write to the store, so each rank writes its connections there. Each member's connection is in two
    notes: once from each end. A connection made later takes nobody's place: Gloo has no free one by then.
    """
    store.set(f"links/{rank}", json.dumps(sorted(_links(addresses))))
    keys = [f"links/{peer}" for peer in range(size)]
    missing = await_keys(store, keys, timeout_s=timeout_s)
    if missing:
        raise CommTimeoutError(
            "cannot make a process group",
            why=f"within {timeout_s:g} s these ranks did not report their connections: {', '.join(missing)}",
            fix="look at those processes' logs",
        )
    links = {link for key in keys for link in _read(store.get(key), _link)}
    strangers = sorted({peer for mine, peer in links if (peer, mine) not in links})
    if strangers:
        _shut_down(addresses, socket.SHUT_RDWR)
        raise CommError(
            "cannot make a process group",
            why=f"a process that is no rank of it has connected, from {', '.join(f'{h}:{p}' for h, p in strangers)}",
            fix="make it again; if it happens again, find that process, or set GLOO_SOCKET_IFNAME to an interface that "
            "only the run can reach",
        )


def _links(addresses: Addresses) -> Iterator[GlooLink]:
    """Yield this process's connections to and from ``addresses``."""
    for _, mine in process_sockets():
        with contextlib.suppress(OSError):  # it listens, or was closed meanwhile
            link = _plain(mine.getsockname()), _plain(mine.getpeername())
            if not addresses.isdisjoint(link):
                yield link


def _shut_down(addresses: Addresses, how: int) -> None:
    """Shut down the sockets of ``addresses``. Gloo closes a socket when it sees the end of the incoming data.

    The shutdown has two steps, reading first: Gloo must see the end before its writes fail. Otherwise an operation may
    start in between, fail to write, and block everything, even the end of the group, until its timeout (seen with
    torch 2.13 on a busy machine, in 1 of 12 aborts).
    """
    for _, seen in process_sockets():
        with contextlib.suppress(OSError):  # not connected, or closed meanwhile: nothing to end
            if _is_of(seen, addresses):
                with seen.dup() as mine:  # Gloo may close its own at any time, and the number become another socket's
                    if _is_of(mine, addresses):
                        mine.shutdown(how)


def _is_of(mine: socket.socket, addresses: Addresses) -> bool:
    """Return whether a connection goes to or from ``addresses``. Raises OSError for a socket without a connection."""
    return not addresses.isdisjoint((_plain(mine.getpeername()), _plain(mine.getsockname())))


def _device_of_its_own(make: Callable[[], Any]) -> tuple[Any, Address]:
    """Return the new Gloo device of ``make``, and its listening address: the only new listener of the process."""
    for _ in range(_ATTEMPTS):
        with _making_device:
            before = set(_listeners())
            device = make()
            new = set(_listeners()) - before
        if len(new) == 1:
            return device, new.pop()
    raise CommError(
        "cannot tell a new group's sockets from others",
        why=f"other listeners appeared at the same time, {_ATTEMPTS} times in a row",
        fix="make groups while this process starts no server",
    )


def _devices(*, on_loopback: bool) -> list[Callable[[], Any]]:
    """Return functions that make Gloo's devices: one for each interface that the user names.

    They connect at once, also with TORCH_GLOO_LAZY_INIT=1: later connections are not compared.
    """
    gloo: Any = dist.ProcessGroupGloo  # torch's stubs lack arguments
    interfaces = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    if interfaces:
        return [functools.partial(gloo.create_device, interface=name, lazy_init=False) for name in interfaces]
    if on_loopback:  # other machines need not reach these sockets
        return [functools.partial(gloo.create_device, hostname="127.0.0.1", lazy_init=False)]
    return [functools.partial(gloo.create_default_device, lazy_init=False)]


def _listeners() -> Iterator[Address]:
    for _, mine in process_sockets():
        with contextlib.suppress(OSError):
            if mine.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                yield _plain(mine.getsockname())


def _plain(address: tuple[Any, ...]) -> Address:
    """Return a socket's address without IPv6's extra fields; an IPv4 address as such, also on IPv6 sockets."""
    return str(address[0]).removeprefix("::ffff:"), int(address[1])


def _address(found: Any) -> Address:
    host, port = found
    return str(host), int(port)


def _link(found: Any) -> GlooLink:
    mine, peer = found
    return _address(mine), _address(peer)


def _read(note: bytes, kind: Callable[[Any], _Read]) -> list[_Read]:
    try:
        return [kind(found) for found in json.loads(note)]
    except (ValueError, TypeError, OverflowError, RecursionError) as exc:
        raise CommError(
            "cannot make a process group", why=f"a rank wrote {note[:80]!r}", fix="use the same hwrl in all ranks"
        ) from exc
