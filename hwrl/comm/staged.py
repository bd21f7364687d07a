"""Process groups for devices without a collective library: each operation is staged through host memory.

A staged group keeps torch's contract: an operation runs after the earlier work on the caller's current stream, and
waiting for it orders the caller's current stream. It copies the inputs to the host, runs the operation in a group of
the host's backend, and copies the results back in ``wait``. DeviceMesh and FSDP2 run on it. It serves tensors on the
host, too. A library of the device is faster: a staged group moves each byte over the host's bus twice.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, Work

from hwrl.discovery import host_backend
from hwrl.interfaces import Backend, Capability

STAGED = "hwrl_staged"
"""The name of staged groups in torch.distributed."""

_IN_PLACE = ("allreduce", "allreduce_coalesced", "broadcast", "reduce")
_TO_FIRST = (
    "_allgather_base",
    "_reduce_scatter_base",
    "all_gather_single",
    "all_gather_single_coalesced",
    "all_to_all_single",
    "allgather",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "alltoall",
    "alltoall_base",
    "gather",
    "recv",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
    "scatter",
)
_READING = ("send", "barrier")
PAIRWISE = ("recv", "send")


def collectives_of(backend: Backend) -> Backend | StagedCollectives:
    """Return ``backend``, or staged groups for its device if it lacks collectives: both make process groups."""
    return backend if backend.supports(Capability.COLLECTIVES).usable else StagedCollectives(backend)


class StagedCollectives:
    """Makes staged groups for the device of ``backend``, on the host's backend."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def group_library(self) -> str:
        """Register staged groups with torch, as the device's library if torch knows none; return their name."""
        device_type = self._backend.info.device_type
        create = functools.partial(_create_in_torch, device_type)
        dist.Backend.register_backend(STAGED, create, extended_api=True, devices=[device_type])
        return STAGED

    def library_timeout(self, timeout_s: float) -> timedelta:
        """Return ``timeout_s`` in the form of the host's library."""
        return host_backend().library_timeout(timeout_s)

    def create_process_group(
        self, store: Store, *, rank: int, size: int, name: str, timeout: timedelta
    ) -> dist.ProcessGroup:
        """Return a staged group over ``store``. Blocks until all ranks came."""
        device_type = self._backend.info.device_type
        return _create(store, device_type, rank=rank, size=size, name=name, timeout=timeout)

    def await_work(self, work: Any) -> None:
        """Wait for the host's operation, and queue the copies of its results on this thread's current stream."""
        work.wait()

    def abort_process_group(self, group: dist.ProcessGroup) -> None:
        """End the host's operations of ``group``. Raises UnsupportedError if the backend denies ``comm_abort``."""
        self._backend.require(Capability.COMM_ABORT, needed_for="abort a process group")
        group.abort()


class StagedWork(Work):
    """An operation of the host's group, and the copies of its results to the device."""

    def __init__(self, work: Any, results: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        super().__init__()
        self._work, self._results = work, results
        self._targets = [target for target, _ in results]

    def wait(self, *timeout: timedelta) -> bool:
        """Block until the host's operation is done; queue the copies on the caller's current stream."""
        done = self._work.wait(*timeout)
        while self._results:
            target, staged = self._results.pop()
            with torch.inference_mode(target.is_inference()), torch.no_grad():  # as libraries write: past autograd
                target.copy_(staged)
        return bool(done)

    def is_completed(self) -> bool:
        """Return whether the host's operation is done; the copies to the device come with :meth:`wait`."""
        return bool(self._work.is_completed())

    def get_future(self) -> Any:
        """Return the results as a future, done already. Blocks as :meth:`wait` does."""
        future: Any = torch.futures.Future()
        self.wait()
        future.set_result(self._targets)
        return future


class _Awaited:
    """Waits for ``work`` in a thread. The host's library notices the end of a send or receive only in ``wait``."""

    def __init__(self, work: Any) -> None:
        self._end: Future[bool] = Future()
        threading.Thread(target=self._await, args=(work,), name="hwrl-staged-wait", daemon=True).start()

    def _await(self, work: Any) -> None:
        try:
            self._end.set_result(work.wait())
        except Exception as exc:  # noqa: BLE001 - raised again in `wait`
            self._end.set_exception(exc)

    def wait(self, *_: timedelta) -> bool:
        return self._end.result()

    def is_completed(self) -> bool:
        return self._end.done()


class StagedGroup(dist.ProcessGroup):
    """Runs each operation in ``group``, a process group of the backend ``host``, on copies of its tensors.

    ``device_type`` is torch's name for the tensors' device.
    """

    def __init__(self, group: dist.ProcessGroup, host: Backend, device_type: str, *, name: str) -> None:
        super().__init__(group.rank(), group.size())  # type: ignore[call-arg]  # the stubs lack this form
        self._group, self._host, self._name, self._description = group, host, name, ""
        self._device_type = device_type

    def getBackendName(self) -> str:
        """Return :data:`STAGED`."""
        return STAGED

    @property
    def group_name(self) -> str:  # type: ignore[override]  # torch returns a text, too
        """The group's name in torch."""
        return self._name

    @property
    def group_desc(self) -> str:
        """The group's description in torch."""
        return self._description

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    def abort(self) -> None:
        """End the host's operations that block in other threads."""
        self._host.abort_process_group(self._group)

    def shutdown(self) -> None:
        """Do nothing: the host's group ends with this object."""

    def barrier(self, *args: Any, **options: Any) -> Work:
        """Wait for the earlier work on the caller's current stream, then for the other ranks."""
        torch.empty(1).copy_(torch.zeros(1, device=self._device_type))
        return self._run("barrier", *args, **options)

    def _run(self, operation: str, *args: Any, **options: Any) -> Work:
        """Run ``operation`` on the host. Tensors of its first argument get results unless it only reads."""
        pairs: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in args]
        staged = [
            _map_tensors(arg, _stage(pairs[place], read=place > 0 or operation not in _TO_FIRST))
            for place, arg in enumerate(args)
        ]
        results = [] if operation in _READING else pairs[0]
        work = getattr(self._group, operation)(*staged, **options)
        return StagedWork(_Awaited(work) if operation in PAIRWISE else work, results)


def _operation(name: str) -> Callable[..., Work]:
    def run(self: StagedGroup, *args: Any, **options: Any) -> Work:
        return self._run(name, *args, **options)

    return run


for _name in (*_IN_PLACE, *_TO_FIRST, "send"):
    if hasattr(dist.ProcessGroup, _name):  # the names differ by version
        setattr(StagedGroup, _name, _operation(_name))


def _stage(results: list[tuple[torch.Tensor, torch.Tensor]], *, read: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function: it returns a copy of a tensor on the host, with its values if they are ``read``.

    It appends the tensor and its copy to ``results``.
    """

    def staged(tensor: torch.Tensor) -> torch.Tensor:
        host = torch.empty(tensor.shape, dtype=tensor.dtype)
        if read:
            host.copy_(tensor.detach())  # blocks until the earlier work on the current stream is done
        results.append((tensor, host))
        return host

    return staged


def _map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    return [_map_tensors(one, change) for one in value] if isinstance(value, list) else value


def _create_in_torch(device_type: str, options: Any, _: Any) -> dist.ProcessGroup:
    """Make a group for torch's own functions, such as ``init_process_group``."""
    return _create(
        PrefixStore("staged", options.store),
        device_type,
        rank=options.group_rank,
        size=options.group_size,
        name=str(options.group_id),
        timeout=options.timeout,
    )


def _create(store: Store, device_type: str, *, rank: int, size: int, name: str, timeout: timedelta) -> StagedGroup:
    host = host_backend()
    group = host.create_process_group(store, rank=rank, size=size, name=f"{name}/host", timeout=timeout)
    return StagedGroup(group, host, device_type, name=name)
