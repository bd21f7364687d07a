"""A backend of vLLM's sleep mode: the weights sleep in hwrl's page-locked memory."""

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
_PIECE_NBYTES = 32 << 20


class PooledSleep(CuMemBackend):  # type: ignore[misc]  # vLLM's types are not followed
    """vLLM's own sleep mode, except for the weights at level 1: a :class:`~hwrl.memory.PinnedPool` keeps them.

    vLLM locks pages in the first sleep, for seconds. Here a thread does it while the engine starts.
    """

    def __init__(self) -> None:
        super().__init__()
        self._backend = get_backend()
        self._pool = PinnedPool(self._backend)
        self._stream = self._backend.stream()
        self._kept = False
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
        super().suspend(2)  # vLLM keeps no weights then
        self._kept = level == 1

    def resume(self, tags: list[str] | None = None) -> None:
        mapped = {data.tag for data in get_mem_allocator_instance().pointer_to_data.values()}
        wanted = mapped if tags is None else {*tags}
        if _WEIGHTS in wanted:
            super().resume([_WEIGHTS])
            if self._kept:
                self._bring_back()
        try:
            if wanted - {_WEIGHTS}:
                super().resume(sorted(wanted - {_WEIGHTS}))  # meanwhile the weights are copied
        finally:
            self._stream.synchronize()

    def _bring_back(self) -> None:
        """Start to copy the weights to the device, by kernels.

        The driver clears newly mapped memory with the copy engines. Meanwhile a copy by these engines would have half
        the speed, so kernels read the page-locked memory instead. Mapping waits for a running kernel, so each is short.
        """
        with self._stream:
            for memory, kept in self._weights():
                source = self._on_device(kept.data_ptr(), kept.nbytes)
                for to, part in zip(memory.split(_PIECE_NBYTES), source.split(_PIECE_NBYTES), strict=True):
                    torch._foreach_copy_([to.view(torch.int64)], [part.view(torch.int64)])
        self._kept = False

    def _lock(self, device: int) -> None:
        self._backend.set_device(device)  # for this thread
        for _ in self._weights():
            pass

    def _weights(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield each of vLLM's allocations for weights, as bytes, with its page-locked copy."""
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
    """Return this sleep backend from vLLM's registry, for a worker with ``model_config``."""
    if NAME not in SleepModeBackendFactory._registry:
        SleepModeBackendFactory.register_backend(NAME, __name__, PooledSleep.__name__)
    model_config.sleep_mode_backend = NAME
    return SleepModeBackendFactory.create_backend(model_config)
