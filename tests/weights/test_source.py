"""WeightSource.from_module: plain, tied and sharded modules."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from hwrl.comm import Comm, Store, connect_store, serve_store, store_address
from hwrl.errors import LayoutMismatchError, WeightsError
from hwrl.testing.processes import run_processes
from hwrl.weights import SharedReads, WeightLayout, WeightSource
from hwrl_cpu import INFO, CpuBackend
from tests.support.weight_link import beside, receiver_of, sender_of, store

__all__ = ["store"]  # the fixture


class Tied(torch.nn.Module):
    """A model with tied weights, a bias that two ranks share unevenly, a persistent buffer and a temporary one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.embed = torch.nn.Embedding(9, 6)
        self.middle = torch.nn.Linear(6, 5)
        self.back = torch.nn.Linear(5, 6, dtype=torch.bfloat16)
        self.head = torch.nn.Linear(6, 9, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("cache", torch.ones(4), persistent=False)


def test_a_plain_module_is_read_without_a_copy_under_the_names_of_its_state_dict() -> None:
    model = Tied()
    source = WeightSource.from_module(model)
    read, expected = dict(source), model.state_dict()
    assert read.keys() == expected.keys() and "cache" not in read
    assert all(read[name].data_ptr() == tensor.data_ptr() for name, tensor in expected.items())
    assert source.holds_tensors and not any(tensor.requires_grad for tensor in read.values())


def test_dtype_casts_floating_point_tensors_only() -> None:
    source = WeightSource.from_module(Tied(), dtype=torch.float16)
    described = {name: (tensor.dtype, tensor.shape) for name, tensor in source.metadata()}
    assert described == {name: (tensor.dtype, tensor.shape) for name, tensor in source}
    assert {name for name, (dtype, _) in described.items() if dtype != torch.float16} == {"count"}
    assert not source.holds_tensors


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_tied_weights_travel_once_and_arrive_tied(store: Any, dtype: torch.dtype | None) -> None:
    source = WeightSource.from_module(Tied(), dtype=dtype)
    with sender_of(store) as sender, receiver_of(store) as receiver:
        waiting = beside(lambda: receiver.receive(timeout_s=100.0))
        report = sender.publish(1, source)
        received = waiting()
    assert all(torch.equal(received[name], tensor) for name, tensor in source)
    assert received["head.weight"].data_ptr() == received["embed.weight"].data_ptr()
    assert report.nbytes == sum(tensor.nbytes for name, tensor in source if name != "head.weight")


def test_a_module_whose_ties_change_is_read_as_it_is_now() -> None:
    model = Tied()
    source = WeightSource.from_module(model)
    assert WeightLayout.plan(source.metadata()).payload_nbytes == sum(
        tensor.nbytes for name, tensor in model.state_dict().items() if name != "head.weight"
    )
    model.head.weight = torch.nn.Parameter(torch.zeros(9, 6))
    assert dict(source)["head.weight"].sum() == 0


def _read_sharded(rank: int, address: str) -> Any:
    backend = CpuBackend(INFO)
    with Comm(backend).init_default(store=connect_store(address), rank=rank, size=2) as group:
        model = Tied()
        fully_shard(model.middle, mesh=init_device_mesh("cpu", (2,)))
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        with pytest.raises(WeightsError, match=r"over 2 ranks[\s\S]*pass these ranks as WeightSource.from_module"):
            WeightSource.from_module(model)
        source = WeightSource.from_module(model, group=group)
        read = dict(source)
        with SharedReads([source], group) as shared:
            if rank:
                shared.follow()
            else:
                layout = WeightLayout.plan(source.metadata())
                assert [entry.name for entry in layout.entries if entry.alias_of] == ["head.weight"]
                assert dict(shared.sources[0]).keys() == dict(shared.sources[0]).keys() == read.keys()
        tied = not read or read["head.weight"] is read["embed.weight"]
        return read, tied


def test_of_a_sharded_module_the_first_rank_reads_whole_tensors_and_the_others_nothing() -> None:
    served = serve_store()
    (whole, tied), (nothing, _) = run_processes(_read_sharded, 2, store_address(served))
    expected = Tied().state_dict()
    assert nothing == {} and tied
    assert whole.keys() == expected.keys()
    for name, tensor in expected.items():
        assert whole[name].dtype == tensor.dtype and torch.equal(whole[name], tensor), name


class Lazy(Mapping[str, torch.Tensor]):
    """Makes each tensor when it is read."""

    def __getitem__(self, name: str) -> torch.Tensor:
        return torch.zeros(3)

    def __iter__(self) -> Iterator[str]:
        return iter(("a", "b"))

    def __len__(self) -> int:
        return 2


def test_only_lists_tuples_and_items_of_dicts_hold_their_tensors() -> None:
    named = {"a": torch.zeros(3)}
    held = (named.items(), OrderedDict(named).items(), list(named.items()), tuple(named.items()), iter(named.items()))
    assert all(WeightSource.of(weights).holds_tensors for weights in held)
    assert not WeightSource.of(Lazy().items()).holds_tensors


@pytest.mark.parametrize("slab_nbytes", [512, 1 << 20])
@pytest.mark.parametrize("transport", ["device", "host"])
def test_views_that_conjugate_or_negate_arrive_as_they_are_read(store: Store, transport: str, slab_nbytes: int) -> None:
    first = torch.complex(torch.arange(200.0), torch.arange(200.0) + 0.5)
    weights = {"first": first, "conjugated": first.conj(), "again": first.conj(), "negated": first.conj().imag}
    with (
        sender_of(store, transport=transport, slab_nbytes=slab_nbytes) as sender,
        receiver_of(store) as receiver,
    ):
        waiting = beside(lambda: receiver.receive(timeout_s=600.0))
        sender.publish(1, weights.items())
        received = waiting()
        for name, tensor in weights.items():
            assert torch.equal(received[name], tensor), name
        with pytest.raises(LayoutMismatchError, match="was tied to 'conjugated' and no longer is"):
            sender.publish(2, {**weights, "again": first}.items())
