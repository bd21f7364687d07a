"""Gloo process groups with a working abort: they know their sockets.

torch's ``ProcessGroupGloo.abort`` does nothing (measured on 2.13: a blocked recv stayed blocked until its peer died).
But after the shutdown of a socket, every operation on it fails within milliseconds. So each group gets its own Gloo
device, and the device's listening port identifies the group's sockets in this process. Delete this module when Gloo's
own abort works.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from hwrl.comm import Store, is_on_loopback, process_sockets
from hwrl.errors import CommError, UnsupportedError

_making_device = threading.Lock()
_ATTEMPTS = 5
_NOTICE_S = 1.0
# Concurrent operations. With torch's default of 2, a stream of 16 MB broadcasts waits for handshakes: 5 % slower.
_THREADS = 4


class AbortableGroups:
    """The groups of one backend object, with the listening addresses of each."""

    def __init__(self) -> None:
        self._addresses: WeakKeyDictionary[Any, frozenset[tuple[str, int]]] = WeakKeyDictionary()

    def create(self, store: Store, *, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
        """Return a group for :meth:`abort`; blocks until all ranks are connected."""
        device, address = _device_of_its_own(on_loopback=is_on_loopback(store))
        options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # missing from torch's stubs
        options._devices, options._timeout, options._threads = [device], timeout, _THREADS
        store.set(f"listens/{rank}", f"{address[0]} {address[1]}")
        gloo = dist.ProcessGroupGloo(store, rank, size, options)
        addresses = frozenset(_parse(store.get(f"listens/{peer}")) for peer in range(size))
        group = dist.ProcessGroup(store, rank, size)
        group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
        self._addresses[group] = addresses
        return group

    def abort(self, group: dist.ProcessGroup) -> None:
        """Shut down this process's sockets of ``group``; blocked operations fail at once, here and at the peers."""
        addresses = self._addresses.pop(group, None)
        if addresses is None:
            raise UnsupportedError(
                "cannot abort this process group",
                why="torch made it, and torch's own Gloo groups ignore abort",
                fix="use a group from Comm.standalone_group, or end the process",
            )
        _shut_down(addresses, socket.SHUT_RD)
        deadline_s = time.monotonic() + _NOTICE_S
        while _connections(addresses) and time.monotonic() < deadline_s:
            time.sleep(0.001)
        _shut_down(addresses, socket.SHUT_RDWR)


def _shut_down(addresses: frozenset[tuple[str, int]], how: int) -> None:
    """Shut down the sockets of ``addresses``. Gloo closes a socket when it sees the end of the incoming data.

    The shutdown has two steps, reading first: Gloo must see the end before its writes fail. Otherwise an operation may
    start in between, fail to write, and block everything, even the end of the group, until its timeout (seen with
    torch 2.13 on a busy machine, in 1 of 12 aborts).
    """
    for _, mine in process_sockets():
        with contextlib.suppress(OSError):  # not connected, or closed meanwhile: nothing to end
            if mine.getpeername()[:2] in addresses or mine.getsockname()[:2] in addresses:
                mine.shutdown(how)


def _connections(addresses: frozenset[tuple[str, int]]) -> bool:
    """Return whether this process has a connection to or from ``addresses``."""
    for _, mine in process_sockets():
        with contextlib.suppress(OSError):  # it listens, or was closed meanwhile
            if mine.getpeername()[:2] in addresses or mine.getsockname()[:2] in addresses:
                return True
    return False


def _device_of_its_own(*, on_loopback: bool) -> tuple[Any, tuple[str, int]]:
    """Return a new Gloo device and its listening address: the only new listener of the process."""
    for _ in range(_ATTEMPTS):
        with _making_device:
            before = set(_listeners())
            device = _device(on_loopback=on_loopback)
            new = set(_listeners()) - before
        if len(new) == 1:
            return device, new.pop()
    raise CommError(
        "cannot tell a new group's sockets from others",
        why=f"other listeners appeared at the same time, {_ATTEMPTS} times in a row",
        fix="make groups while this process starts no server",
    )


def _device(*, on_loopback: bool) -> Any:
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    if interface:
        return dist.ProcessGroupGloo.create_device(interface=interface)
    if on_loopback:  # Gloo's sockets authenticate nobody: other machines need not reach them
        return dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")
    return dist.ProcessGroupGloo.create_default_device()


def _listeners() -> Iterator[tuple[str, int]]:
    for _, mine in process_sockets():
        with contextlib.suppress(OSError):
            if mine.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                yield mine.getsockname()[:2]


def _parse(text: bytes) -> tuple[str, int]:
    host, port = text.decode().split(" ")
    return host, int(port)
