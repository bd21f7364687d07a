"""A backend of vLLM's sleep mode: it keeps sleeping weights in hwrl's page-locked host memory."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from vllm.device_allocator import get_mem_allocator_instance
from vllm.device_allocator.sleep_mode_backend import CuMemBackend, SleepModeBackendFactory

from hwrl.discovery import get_backend
from hwrl.memory import PinnedPool

NAME = "hwrl"
"""The value of vLLM's ``sleep_mode_backend``."""
_WEIGHTS = "weights"
"""vLLM's tag of the allocations for weights."""
_PIECE_NBYTES = 32 << 20
"""The bytes that one kernel copies in a wake."""
_SMALL_NBYTES = 1 << 16
"""Smaller pieces than this are copied together."""


class PooledSleep(CuMemBackend):  # type: ignore[misc]  # vLLM's types are not followed
    """vLLM's own sleep mode, but a :class:`~hwrl.memory.PinnedPool` keeps the weights at level 1.

    vLLM locks the pages of host memory in the first sleep, and that takes seconds. Here a thread locks them while the
    engine starts; the first sleep waits for it.

    A wake of the weights alone maps their memory, and copies nothing into it yet: an update follows, and
    :meth:`replaced` ends it. Without an update the wake of the rest copies them back, or :meth:`restore` does.
    """

    def __init__(self) -> None:
        super().__init__()
        self._backend = get_backend()
        self._pool = PinnedPool(self._backend)
        self._stream = self._backend.stream()
        self._kept = False  # whether only the pool has the weights
        self._asleep: set[str] = set()
        thread = ThreadPoolExecutor(1, thread_name_prefix="hwrl-page-lock")
        self._locked = thread.submit(self._lock, self._backend.current_index())
        thread.shutdown(wait=False)

    def suspend(self, level: int = 1) -> None:
        self._locked.result()
        if level == 1 and not self._kept:
            with self._stream:
                for memory, kept in self._weights():
                    kept.copy_(memory, non_blocking=True)
            self._stream.synchronize()
        self._asleep = {data.tag for data in get_mem_allocator_instance().pointer_to_data.values()}
        super().suspend(2)  # at level 2 vLLM itself keeps no weights
        self._kept = level == 1

    def resume(self, tags: list[str] | None = None) -> None:
        wanted = set(self._asleep) if tags is None else self._asleep.intersection(tags)
        if _WEIGHTS in wanted:
            super().resume([_WEIGHTS])
            self._asleep.discard(_WEIGHTS)  # at once: if the rest finds no memory, another wake maps the rest only
        others = sorted(wanted - {_WEIGHTS})
        if self._kept and self._asleep.issubset(others):
            self._copy_back()
        try:
            if others:
                super().resume(others)  # the weights' copies run meanwhile
                self._asleep.difference_update(others)
        finally:
            self._stream.synchronize()

    def restore(self) -> None:
        """Copy the weights back to the device if they are not there, and wait. Their memory must be awake."""
        if self._kept:
            self._copy_back()
            self._stream.synchronize()

    def replaced(self, targets: Iterable[torch.Tensor]) -> None:
        """Say that an update has overwritten ``targets``, contiguous tensors: copy only the rest back, and wait."""
        if self._kept:
            self._copy_back(beside=targets)
            self._stream.synchronize()

    def _copy_back(self, *, beside: Iterable[torch.Tensor] = ()) -> None:
        """Start to copy the weights to the device, but not to ``beside``. Does not wait.

        The driver clears newly mapped memory with the copy engines, and a copy by these engines would meanwhile have
        half the speed. So kernels read the page-locked memory. Mapping waits for a running kernel, so each is short.
        """
        taken = sorted((tensor.data_ptr(), tensor.nbytes) for tensor in beside if tensor.nbytes)
        small: list[tuple[torch.Tensor, torch.Tensor]] = []
        with self._stream:
            for memory, kept in self._weights():
                source = self._on_device(kept.data_ptr(), kept.nbytes)
                for begin, end in _spans_beside(taken, memory.data_ptr(), memory.nbytes):
                    if end - begin < _SMALL_NBYTES:
                        small.append((memory[begin:end], source[begin:end]))
                        continue
                    for at in range(begin, end, _PIECE_NBYTES):
                        stop = min(at + _PIECE_NBYTES, end)
                        words = torch.uint8 if at % 8 or stop % 8 else torch.int64
                        torch._foreach_copy_([memory[at:stop].view(words)], [source[at:stop].view(words)])
            if small:  # mostly the gaps between tensors: one kernel for many of them
                torch._foreach_copy_([to for to, _ in small], [part for _, part in small])
        self._kept = False

    def _lock(self, device: int) -> None:
        """Make the pool's memory for all weights."""
        self._backend.set_device(device)  # each thread has a current device of its own
        for _ in self._weights():
            pass

    def _weights(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield each of vLLM's allocations for weights, as bytes, with the pool's memory of the same size."""
        for address, data in list(get_mem_allocator_instance().pointer_to_data.items()):
            if data.tag == _WEIGHTS:
                nbytes = data.handle[1]
                yield self._on_device(address, nbytes), self._pool.slab(str(address), nbytes=nbytes)[:nbytes]

    def _on_device(self, address: int, nbytes: int) -> torch.Tensor:
        """Return the bytes at ``address`` as a tensor on the device."""
        device = self._backend.device()
        storage = torch._C._construct_storage_from_data_pointer(address, device, nbytes)
        return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def _spans_beside(taken: list[tuple[int, int]], address: int, nbytes: int) -> Iterator[tuple[int, int]]:
    """Yield begin and end of each part of the ``nbytes`` at ``address`` that is in no part of ``taken``, in order.

    ``taken`` are sorted pairs of address and size, not empty and not overlapping.
    """
    begin = 0
    first = max(0, bisect.bisect(taken, (address, 0)) - 1)  # it may reach into these bytes
    for start, size in taken[first : bisect.bisect(taken, (address + nbytes, 0))]:
        if begin < start - address:
            yield begin, start - address
        begin = max(begin, start + size - address)
    if begin < nbytes:
        yield begin, nbytes


def pooled_sleep(model_config: Any) -> Any:
    """Return a :class:`PooledSleep` from vLLM's registry, for a worker with ``model_config``; register it if needed."""
    if NAME not in SleepModeBackendFactory._registry:
        SleepModeBackendFactory.register_backend(NAME, __name__, PooledSleep.__name__)
    model_config.sleep_mode_backend = NAME
    return SleepModeBackendFactory.create_backend(model_config)
