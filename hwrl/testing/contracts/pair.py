"""Two processes that share nothing but a store, each on a device of its own where there are two."""

from __future__ import annotations

import hwrl
from hwrl.comm import serve_store, store_address
from hwrl.interfaces import Backend


class StoreAddress:
    """The address of a store that is served as long as this object lives."""

    def __init__(self) -> None:
        self._store = serve_store()

    def __str__(self) -> str:
        return store_address(self._store)


def place(rank: int, name: str) -> Backend:
    """Return backend ``name`` in this child process, with the rank's device as the current one."""
    hwrl.set_backend(name)
    backend = hwrl.get_backend()
    backend.set_device(rank % backend.device_count())
    return backend
