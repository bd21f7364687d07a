"""Two processes that share nothing but a store, each on a device of its own where there are two."""

from __future__ import annotations

import pytest

import hwrl
from hwrl.backend import Backend, Capability
from hwrl.comm import serve_store, store_address


class StoreAddress:
    """The address of a store that is served as long as this object lives."""

    def __init__(self) -> None:
        self._store = serve_store()

    def __str__(self) -> str:
        return store_address(self._store)


def need_two_ranks(backend: Backend) -> None:
    """Skip the test, with the reason, where two processes cannot be in one group."""
    support = backend.supports(Capability.SHARED_DEVICE_GROUPS)
    if backend.device_count() < 2 and not support.usable:
        pytest.skip(f"needs two devices: {support.reason}")


def need_ipc(backend: Backend) -> None:
    """Skip the test, with the reason, where one process cannot open another's device memory."""
    support = backend.supports(Capability.DEVICE_IPC)
    if not support.usable:
        pytest.skip(f"no {Capability.DEVICE_IPC.value}: {support.reason}")


def place(rank: int, name: str) -> Backend:
    """Return backend ``name`` in this child process, with the rank's device as the current one."""
    hwrl.set_backend(name)
    backend = hwrl.get_backend()
    backend.set_device(rank % backend.device_count())
    return backend
