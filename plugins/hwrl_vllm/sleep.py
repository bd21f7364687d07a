"""Sleep with the weights in hwrl's page-locked memory, where vLLM lets a backend of its sleep mode be registered."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from vllm.device_allocator import get_mem_allocator_instance
from vllm.device_allocator.sleep_mode_backend import CuMemBackend, SleepModeBackendFactory

from hwrl.memory import PinnedPool
from hwrl.registry import get_backend

NAME = "hwrl"
"""The value of vLLM's ``sleep_mode_backend``."""
_WEIGHTS = "weights"


class PooledSleep(CuMemBackend):  # type: ignore[misc]  # vLLM's types are not followed
    """vLLM's sleep mode, but for the weights at level 1, which a :class:`~hwrl.memory.PinnedPool` keeps.

    vLLM page-locks in the first sleep, which takes seconds; here a thread does it while the engine starts.
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
                for address, memory in self._weights():
                    self._slab(address, memory).copy_(memory, non_blocking=True)
            self._stream.synchronize()
        super().suspend(2)  # keeps no weights itself
        self._kept = level == 1

    def resume(self, tags: list[str] | None = None) -> None:
        super().resume(tags)
        if self._kept and (tags is None or _WEIGHTS in tags):  # not earlier: mapping and copying at once are slower
            with self._stream:
                for address, memory in self._weights():
                    memory.copy_(self._slab(address, memory), non_blocking=True)
            self._stream.synchronize()
            self._kept = False

    def _lock(self, device: int) -> None:
        self._backend.set_device(device)  # of this thread
        for address, memory in self._weights():
            self._slab(address, memory)

    def _slab(self, address: int, memory: torch.Tensor) -> torch.Tensor:
        return self._pool.slab(str(address), nbytes=memory.nbytes)[: memory.nbytes]

    def _weights(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the address and the bytes of each of vLLM's allocations for weights."""
        for address, data in list(get_mem_allocator_instance().pointer_to_data.items()):
            if data.tag == _WEIGHTS:
                storage = torch._C._construct_storage_from_data_pointer(address, self._backend.device(), data.handle[1])
                memory: torch.Tensor = torch.empty(0, dtype=torch.uint8, device=self._backend.device())
                yield address, memory.set_(storage)


def pooled_sleep(model_config: Any) -> Any:
    """Return the backend, made by vLLM's registry, for a worker with ``model_config``."""
    if NAME not in SleepModeBackendFactory._registry:
        SleepModeBackendFactory.register_backend(NAME, __name__, PooledSleep.__name__)
    model_config.sleep_mode_backend = NAME
    return SleepModeBackendFactory.create_backend(model_config)
