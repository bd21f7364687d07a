"""verl's NCCL checkpoint engine, unedited, without NCCL: it broadcasts over Gloo, from the host.

Only for a comparison of times: :mod:`tests.plugins.verl.compare`.
"""

from __future__ import annotations

import os
import sys
import types
from typing import Any

import torch

from hwrl.comm import Comm, connect_store

STORE = "HWRL_TEST_GLOO_STORE"
"""The environment variable with the address of a store, where the group meets."""

cupy: Any = types.ModuleType("cupy")
cupy.ndarray, cupy.uint8 = torch.Tensor, torch.uint8
cupy.zeros = lambda nbytes, dtype: torch.zeros(nbytes, dtype=dtype)
cupy.asarray = lambda tensor: tensor


class Collective:
    """The functions of ray.util.collective that the engine calls."""

    def __init__(self) -> None:
        self.group: Any = None

    def is_group_initialized(self, name: str) -> bool:
        return self.group is not None

    def init_collective_group(self, world_size: int, rank: int, backend: str, name: str) -> None:
        store = connect_store(os.environ[STORE])
        self.group = Comm().standalone_group(store, rank=rank, size=world_size, name="nccl on gloo")

    def barrier(self, name: str) -> None:
        self.group.barrier()

    def broadcast(self, tensor: torch.Tensor, src_rank: int, group_name: str) -> None:
        self.group.broadcast(tensor, src=src_rank)


def install(store: str) -> None:
    """Register the engine in this process, with the store at the address ``store``."""
    os.environ[STORE] = store
    sys.modules["cupy"] = cupy
    from verl.checkpoint_engine import nccl_checkpoint_engine as module

    module.collective = Collective()
    zeros, on_host = torch.zeros, types.SimpleNamespace(**vars(torch))
    on_host.zeros = lambda *shape, **options: zeros(*shape, **{**options, "device": "cpu"})
    on_host.cuda = types.SimpleNamespace(synchronize=lambda: None, empty_cache=lambda: None)
    module.torch = on_host
