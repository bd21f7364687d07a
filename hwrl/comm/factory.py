"""Make process groups: :class:`Comm`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from hwrl.comm.failures import translated
from hwrl.comm.group import CALLED_OFF, DECISION, Group, make_standalone_group
from hwrl.comm.staged import collectives_of
from hwrl.comm.store import PrefixStore, keep_store, store_failures
from hwrl.discovery import backend_or_default
from hwrl.errors import CommError
from hwrl.interfaces import Backend, fill_stream_functions

_TIMEOUT_S = 600.0
_timeouts: WeakKeyDictionary[Any, float] = WeakKeyDictionary()
"""The timeouts of the default groups that were made here."""


class Comm:
    """Makes groups on one backend (by default, the process's backend)."""

    def __init__(self, backend: Backend | None = None) -> None:
        self.backend = backend_or_default(backend)

    def init_default(
        self,
        *,
        store: Store | None = None,
        rank: int | None = None,
        size: int | None = None,
        timeout_s: float = _TIMEOUT_S,
    ) -> Group:
        """Make torch's default group, the group of DeviceMesh and FSDP2, and return it.

        Without ``store`` the ranks meet by torchrun's environment (MASTER_ADDR, RANK, …). Blocks until all ranks came.
        A device without collectives gets a group staged through the host. FSDP2 calls stream functions of torch's
        module for the device; if the module lacks some, it gets the backend's.
        """
        rendezvous: dict[str, Any] = {}
        if store is not None:
            rendezvous = {"store": store, "rank": _required(rank, "rank"), "world_size": _required(size, "size")}
        collectives = collectives_of(self.backend)
        fill_stream_functions(self.backend)
        timeout = collectives.library_timeout(timeout_s)
        try:
            dist.init_process_group(collectives.group_library(), timeout=timeout, **rendezvous)
        except (RuntimeError, ValueError) as exc:
            raise translated(exc, "make the default group") from exc
        _timeouts[dist.group.WORLD] = timeout_s
        if store is not None:
            keep_store(store, user=dist.group.WORLD)
        return self._default(borrowed=False)

    def default_group(self) -> Group:
        """Return torch's default group, with the timeout that it was made with; raises CommError if there is none.

        Closing the result does not destroy torch's group: it belongs to its maker, which has :meth:`init_default`'s
        result or called torch itself.
        """
        if not dist.is_initialized():
            raise CommError("there is no default group", why="it was not made", fix="call Comm.init_default() first")
        return self._default(borrowed=True)

    def _default(self, *, borrowed: bool) -> Group:
        from torch.distributed import distributed_c10d as c10d

        world: Any = dist.group.WORLD
        timeout_s = _timeouts.get(world)
        if timeout_s is None:  # torch made it; a library without options has torch's usual timeout
            options = getattr(world._get_backend(self.backend.device()), "options", None)
            timeout_s = options._timeout.total_seconds() if options is not None else _TIMEOUT_S
        store = c10d._get_default_store()
        return Group(self.backend, world, name="default", store=store, timeout_s=timeout_s, borrowed=borrowed)

    def new_group(self, ranks: Sequence[int], *, timeout_s: float = _TIMEOUT_S) -> Group | None:
        """Return a group of some ranks of the default group, and None on the others; every rank must call it.

        The group counts its ranks in the default group's order, whatever the order of ``ranks``.
        """
        default = self.default_group()
        collectives = collectives_of(self.backend)
        timeout = collectives.library_timeout(timeout_s)
        name = f"ranks {','.join(str(rank) for rank in ranks)}"
        try:
            process_group = dist.new_group(list(ranks), timeout=timeout, backend=collectives.group_library())
        except (RuntimeError, ValueError) as exc:
            raise translated(exc, f"make the group of {name}") from exc
        if default.rank not in ranks:
            return None
        store = PrefixStore(process_group.group_name, default.store)
        return Group(self.backend, process_group, name=name, store=store, timeout_s=timeout_s)

    def standalone_group(self, store: Store, *, rank: int, size: int, name: str, timeout_s: float = 60.0) -> Group:
        """Return a group of ``size`` processes that share only ``store``; the default group is not involved.

        A device without collectives gets a group staged through the host.

        ``name`` must be new on this store. Blocks until all ranks came; raises CommTimeoutError with the ranks that
        did not come within ``timeout_s``. The same ``timeout_s`` then bounds each operation of the group.
        """
        return make_standalone_group(self.backend, store, rank=rank, size=size, name=name, timeout_s=timeout_s)


def forget_group(store: Store, *, name: str) -> None:
    """Delete the keys in ``store`` of the standalone group ``name`` and of groups named ``name``/….

    Call it when no process will join these groups any longer. Afterwards a new group may have the name.
    """
    for key in store.list_keys():
        if key.startswith(f"group/{name}/"):
            store.delete_key(key)


def call_off_group(store: Store, *, name: str) -> None:
    """End the making of the standalone group ``name``: ranks that wait for others raise CommAbortedError.

    They do so within a fifth of a second. Any thread or process may call this. If all ranks have come, it does nothing:
    either every rank makes the group, or none does.
    """
    with store_failures():
        store.compare_set(f"group/{name}/{DECISION}", "", CALLED_OFF)


def _required(value: int | None, name: str) -> int:
    if value is None:
        raise CommError("a store needs rank and size", why=f"{name} is missing", fix=f"pass {name}= with store=")
    return value
