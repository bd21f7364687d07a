"""Two processes with only a store in common, each on its own device if there are two."""

from __future__ import annotations

import hwrl
from hwrl.comm import Store, await_keys, serve_store, store_address
from hwrl.interfaces import Backend
from hwrl.testing.limits import scaled


class StoreAddress:
    """The address of a store; the object serves the store while it lives."""

    def __init__(self) -> None:
        self._store = serve_store()

    def __str__(self) -> str:
        return store_address(self._store)


def await_others(store: Store, *keys: str, limit_s: float) -> None:
    """Wait until other processes have set ``keys``; raise TimeoutError after ``limit_s``."""
    missing = await_keys(store, keys, timeout_s=scaled(limit_s))
    if missing:
        raise TimeoutError(f"no other process came to {', '.join(missing)} within {scaled(limit_s):g} s")


def backend_of_rank(rank: int, name: str) -> Backend:
    """Return backend ``name`` in this child process, with the rank's device as the current one."""
    hwrl.set_backend(name)
    backend = hwrl.get_backend()
    backend.set_device(rank % backend.device_count())
    return backend
