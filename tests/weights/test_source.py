"""What can be sent: modules, plain and tied ones, and other weights; refusals by name."""

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
from hwrl.weights import WeightLayout, WeightSource
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


@pytest.mark.parametrize("bucket_nbytes", [512, 1 << 20])
@pytest.mark.parametrize("transport", ["device", "host"])
def test_views_that_conjugate_or_negate_arrive_as_they_are_read(
    store: Store, transport: str, bucket_nbytes: int
) -> None:
    first = torch.complex(torch.arange(200.0), torch.arange(200.0) + 0.5)
    weights = {"first": first, "conjugated": first.conj(), "again": first.conj(), "negated": first.conj().imag}
    with (
        sender_of(store, transport=transport, bucket_nbytes=bucket_nbytes) as sender,
        receiver_of(store) as receiver,
    ):
        waiting = beside(lambda: receiver.receive(timeout_s=600.0))
        sender.publish(1, weights.items())
        received = waiting()
        for name, tensor in weights.items():
            assert torch.equal(received[name], tensor), name
        with pytest.raises(LayoutMismatchError, match="was tied to 'conjugated' and no longer is"):
            sender.publish(2, {**weights, "again": first}.items())


@pytest.mark.parametrize(
    "give", [lambda model: model, lambda model: model.state_dict(), lambda model: iter(model.state_dict().items())]
)
@pytest.mark.parametrize("divided", [False, True])
def test_publish_takes_a_module_a_mapping_and_pairs(store: Store, give: Any, divided: bool) -> None:
    model = Tied()
    if divided:  # by FSDP2 over one rank: its DTensors are whole
        group = Comm(CpuBackend(INFO)).init_default(store=store, rank=0, size=1)
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    try:
        with sender_of(store, transport="host") as sender, receiver_of(store) as receiver:
            for version in (1, 2):
                sender.publish(version, give(model))
                received = receiver.receive(timeout_s=0.0)
                assert {name: whole.tolist() for name, whole in received.items()} == {
                    name: whole.tolist() for name, whole in Tied().state_dict().items()
                }
    finally:
        if divided:
            group.close()


_ONE = torch.ones(3)


@pytest.mark.parametrize(
    ("weights", "text"),
    [
        (5, "a int cannot be sent as weights"),
        (_ONE, "a Tensor cannot be sent as weights"),
        ([_ONE], "these weights have no names"),
        ({1: _ONE}, "these weights have no names"),
        ({"extra": b"state", "w": _ONE}, "'extra' cannot be sent"),
        ({"w": torch.eye(3).to_sparse()}, "'w' cannot be sent"),
    ],
)
@pytest.mark.parametrize("given", ["first", "later", "as an iterator"])
def test_what_is_no_weights_is_refused_by_name(store: Store, weights: Any, text: str, given: str) -> None:
    with sender_of(store, transport="host") as sender:
        if given == "later":
            sender.publish(1, {"w": _ONE})
        if given == "as an iterator" and not isinstance(weights, int):
            weights = iter(weights.items() if isinstance(weights, dict) else [weights] if weights is _ONE else weights)
            text = "have no names" if "a Tensor" in text else text
        with pytest.raises(WeightsError, match=text):
            sender.publish(2, weights)


def test_a_source_made_of_a_list_is_refused_by_name() -> None:
    with pytest.raises(WeightsError, match="needs a function as metadata"):
        WeightSource([("w", _ONE)], Tied().named_parameters)  # type: ignore[arg-type]  # the mistake


def _publish_shards(rank: int, address: str) -> list[str]:
    backend, store = CpuBackend(INFO), connect_store(address)
    Comm(backend).init_default(store=store, rank=rank, size=2)
    model = Tied()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    errors = []
    if rank == 0:
        for transport in ("host", "device"):
            for weights in (model, model.state_dict(), iter(model.state_dict().items())):
                with sender_of(store, name=transport, transport=transport) as sender:
                    try:
                        sender.publish(1, weights)
                    except WeightsError as exc:
                        errors.append(str(exc))
    return errors


def test_tensors_of_several_ranks_are_refused_with_the_call_that_sends_them() -> None:
    store = serve_store()
    errors = run_processes(_publish_shards, 2, store_address(store))[0]
    assert len(errors) == 6
    for error in errors:
        assert "cannot be" in error and "'embed.weight'" in error and "WeightSender(store, group=group)" in error
