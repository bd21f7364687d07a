"""A backend of vLLM's sleep mode: it keeps sleeping weights in hwrl's page-locked host memory."""

from __future__ import annotations

from collections.abc import Iterator
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


class PooledSleep(CuMemBackend):  # type: ignore[misc]  # vLLM's types are not followed
    """vLLM's own sleep mode, but a :class:`~hwrl.memory.PinnedPool` keeps the weights at level 1.

    vLLM locks the pages of host memory in the first sleep, and that takes seconds. Here a thread locks them while the
    engine starts; the first sleep waits for it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._backend = get_backend()
        self._pool = PinnedPool(self._backend)
        self._stream = self._backend.stream()
        self._kept = False  # whether the pool holds the weights of a sleep that has not ended
        thread = ThreadPoolExecutor(1, thread_name_prefix="hwrl-page-lock")
        self._locked = thread.submit(self._lock, self._backend.current_index())
        thread.shutdown(wait=False)

    def suspend(self, level: int = 1) -> None:
        self._locked.result()
        if level == 1:
            with self._stream:
                for memory, kept in self._weights():
                    kept.copy_(memory, non_blocking=True)
            self._stream.synchronize()
        super().suspend(2)  # at level 2 vLLM itself keeps no weights
        self._kept = level == 1

    def resume(self, tags: list[str] | None = None) -> None:
        mapped = {data.tag for data in get_mem_allocator_instance().pointer_to_data.values()}
        wanted = mapped if tags is None else {*tags}
        if _WEIGHTS in wanted:
            super().resume([_WEIGHTS])
            if self._kept:
                self._copy_back()
        try:
            if wanted - {_WEIGHTS}:
                super().resume(sorted(wanted - {_WEIGHTS}))  # the weights' copies run meanwhile
        finally:
            self._stream.synchronize()

    def _copy_back(self) -> None:
        """Start to copy the weights to the device. Does not wait.

        The driver clears newly mapped memory with the copy engines, and a copy by these engines would meanwhile have
        half the speed. So kernels read the page-locked memory. Mapping waits for a running kernel, so each is short.
        """
        with self._stream:
            for memory, kept in self._weights():
                source = self._on_device(kept.data_ptr(), kept.nbytes)
                for to, part in zip(memory.split(_PIECE_NBYTES), source.split(_PIECE_NBYTES), strict=True):
                    torch._foreach_copy_([to.view(torch.int64)], [part.view(torch.int64)])
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


def pooled_sleep(model_config: Any) -> Any:
    """Return a :class:`PooledSleep` from vLLM's registry, for a worker with ``model_config``; register it if needed."""
    if NAME not in SleepModeBackendFactory._registry:
        SleepModeBackendFactory.register_backend(NAME, __name__, PooledSleep.__name__)
    model_config.sleep_mode_backend = NAME
    return SleepModeBackendFactory.create_backend(model_config)
