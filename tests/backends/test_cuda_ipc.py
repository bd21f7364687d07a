"""A process reads another GPU's memory into memory that only its own GPU maps, as a sleeping engine's."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import hwrl
from hwrl.comm import await_keys, connect_store, serve_store, store_address
from hwrl.testing import run_processes

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM's allocator"),
    pytest.mark.skipif(os.environ.get("HWRL_BACKEND") != "cuda", reason="runs with HWRL_BACKEND=cuda"),
    pytest.mark.skipif(len([*Path("/dev").glob("nvidia[0-9]*")]) < 2, reason="needs two GPUs"),
]
_NBYTES = 1 << 24


def test_memory_of_another_gpu_is_copied_into_a_sleeping_allocators() -> None:
    store = serve_store()
    assert run_processes(export_or_copy, 2, store_address(store)) == [None, True]


def export_or_copy(rank: int, address: str) -> bool | None:
    hwrl.set_backend("cuda")
    backend, store = hwrl.get_backend(), connect_store(address)
    backend.set_device(rank)
    wanted = (torch.arange(_NBYTES, device=backend.device()) % 251).to(torch.uint8)
    if rank == 0:
        store.set("handle", json.dumps(backend.export_memory(wanted)))
        await_keys(store, ["copied"], timeout_s=600.0)
        return None
    from vllm.device_allocator.cumem import CuMemAllocator

    allocator: Any = CuMemAllocator.get_instance()
    with allocator.use_memory_pool(tag="weights"):
        memory = torch.zeros_like(wanted)
    await_keys(store, ["handle"], timeout_s=600.0)
    memory.copy_(backend.open_memory(json.loads(store.get("handle"))), non_blocking=True)
    backend.synchronize()
    store.set("copied", "")
    return torch.equal(memory, wanted)
