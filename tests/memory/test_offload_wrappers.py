"""Offloader under torch's wrappers, each on one real rank: the next steps are those of a twin without it."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from hwrl.comm import HashStore
from hwrl_cpu import INFO, CpuBackend
from tests.support.offload_cases import Trained, check_equal_after_offloads

BACKEND = CpuBackend(INFO)
WIDTH = 16
DATA = torch.linspace(-1, 1, 4 * WIDTH).reshape(4, WIDTH)


def _net(*, buffers: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(WIDTH) if buffers else nn.LayerNorm(WIDTH)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), norm, nn.Linear(WIDTH, WIDTH))


def _trained(model: nn.Module, used: nn.Module) -> Trained:
    optimizer = torch.optim.AdamW(used.parameters(), lr=0.05)
    return Trained(model, optimizer, functools.partial(used, DATA))


def _ddp(*, given: str) -> Trained:
    # DDP broadcasts buffers before the module inside could refuse: see docs/memory.md.
    model = _net(buffers=given == "wrapper")
    used = DistributedDataParallel(model, gradient_as_bucket_view=True)
    return _trained(used if given == "wrapper" else model, used)


def _fsdp2() -> Trained:
    model = _net()
    fully_shard(model[0])
    fully_shard(model)
    return _trained(model, model)


def _compiled_in_place() -> Trained:
    model = _net()
    model.compile(backend="eager")
    return _trained(model, model)


def _compile_wrapper(*, given: str) -> Trained:
    model = _net()
    used: Any = torch.compile(model, backend="eager")
    return _trained(used if given == "wrapper" else model, used)


WRAPPERS: dict[str, Callable[[], Trained]] = {
    "DDP with bucket views": functools.partial(_ddp, given="wrapper"),
    "the module inside DDP": functools.partial(_ddp, given="module"),
    "FSDP2": _fsdp2,
    "module.compile()": _compiled_in_place,
    "torch.compile": functools.partial(_compile_wrapper, given="wrapper"),
    "the module inside torch.compile": functools.partial(_compile_wrapper, given="module"),
}


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", WRAPPERS)
def test_the_next_steps_are_those_of_a_twin_that_was_never_offloaded(name: str) -> None:
    check_equal_after_offloads(WRAPPERS[name], BACKEND)
