"""Whole tensors out of shards on two real ranks."""

import math
from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch

import hwrl
from hwrl.comm import Comm, Group, Pending, connect_store, serve_store, store_address
from hwrl.errors import WeightsError
from hwrl.testing.processes import run_processes
from hwrl.weights import WeightShard, gather_weights


def _gather_small(rank: int, address: str) -> tuple[int, dict[str, torch.Tensor]]:
    backend = hwrl.get_backend()
    backend.set_device(rank % backend.device_count())
    with Comm(backend).init_default(store=connect_store(address), rank=rank, size=2) as group:
        device, sends = backend.device(), 0

        def shards() -> Iterator[tuple[str, torch.Tensor | WeightShard]]:
            for number in range(200):
                whole = small_tensor(number)
                if number % 50 == 7:
                    yield f"t{number}", whole.to(device)  # every rank has it
                    continue
                dim = number % whole.dim()
                halves = whole.split(-(-whole.shape[dim] // 2), dim)
                mine = halves[rank] if rank < len(halves) else whole.narrow(dim, 0, 0)
                yield f"t{number}", WeightShard(mine.to(device), tuple(whole.shape), dim, range(2))

        class Counting:
            rank, size, recv = group.rank, group.size, group.recv

            def send(self, *args: Any, **kwargs: Any) -> Pending:
                nonlocal sends
                sends += 1
                return group.send(*args, **kwargs)

        gathered_now = gather_weights(shards(), cast(Group, Counting()), dtype=torch.bfloat16)
        whole = {name: tensor.cpu() for name, tensor in gathered_now}
        return sends, whole


def small_tensor(number: int) -> torch.Tensor:
    shape = [(number % 9 + 1,), (3, 5), (1, 4), (6, 2, 3)][number % 4]
    values = torch.arange(math.prod(shape), dtype=torch.float32).view(shape) + number / 3
    return values.to(torch.int32) if number % 20 == 3 else values


def test_shards_of_small_tensors_travel_together() -> None:
    store = serve_store()
    (_, whole), (sends, nothing) = run_processes(_gather_small, 2, store_address(store))
    assert nothing == {} and 0 < sends < 50
    for number in range(200):
        wanted, got = small_tensor(number), whole[f"t{number}"]
        assert torch.equal(got, wanted.bfloat16() if wanted.is_floating_point() else wanted), number
    assert list(whole) == [f"t{number}" for number in range(200)]


def test_a_shard_without_a_group_is_refused_by_name() -> None:
    with pytest.raises(WeightsError, match="'w' cannot be gathered"):
        list(gather_weights([("w", WeightShard(torch.ones(2), (4,), 0, range(2)))], None, dtype=None))
