"""One publish on every rank of a group: what the ranks hold together, and what each holds whole."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from hwrl.comm import Comm, connect_store, serve_store, store_address
from hwrl.errors import CommAbortedError, TransferFailedError
from hwrl.testing.processes import run_processes
from hwrl.weights import PolicySender, WeightReceiver, WeightSender, WeightSource
from hwrl_cpu import INFO, CpuBackend
from tests.support.weight_link import store

__all__ = ["store"]  # the fixture

_KINDS = ["module", "state_dict", "iterator", "iterator", "source", "held"]


class Model(torch.nn.Module):
    """A sharded layer, and a head that is tied to the embeddings."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = torch.nn.Embedding(9, 6)
        self.middle = torch.nn.Linear(6, 5)
        self.head = torch.nn.Linear(6, 9, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor(2.5))


def _weights(kind: str, model: Model, group: Any) -> Any:
    if kind == "module":
        return model
    if kind == "source":
        return WeightSource.from_module(model, group=group, dtype=torch.bfloat16)
    if kind == "held":
        return Model().state_dict()
    named = model.state_dict()
    return named if kind == "state_dict" else iter(named.items())


def _publish_or_receive(rank: int, address: str, transport: str) -> Any:
    store, backend = connect_store(address), CpuBackend(INFO)
    if rank == 2:
        found = {}
        for number, kind in enumerate(_KINDS):
            with WeightReceiver(store, name=f"link {number}", replica="r0", backend=backend) as receiver:
                received = receiver.receive(timeout_s=600.0)
                found[number, kind] = {name: tensor.clone() for name, tensor in received.items()}
                store.set(f"received {number}", "")
        return found
    with Comm(backend).init_default(store=connect_store(address), rank=rank, size=2) as group:
        model, mesh = Model(), init_device_mesh("cpu", (2,))
        fully_shard(model.middle, mesh=mesh)
        fully_shard(model, mesh=mesh)
        reports = []
        for number, kind in enumerate(_KINDS):
            link: Any = {"name": f"link {number}", "transport": transport, "backend": backend}
            with WeightSender(store, group=group, **link) as sender:
                sender.wait_for_receivers(["r0"], timeout_s=600.0)
                reports.append(sender.publish(5, _weights(kind, model, group), {"step": 5}))
                assert sender.version == 5
                failures = []
                try:
                    sender.publish(4, _weights(kind, model, group))
                except (TransferFailedError, CommAbortedError) as exc:
                    failures.append(str(exc))
                assert len(failures) == 1 and "version 4" in failures[0], "every rank has the error"
                store.wait([f"received {number}"])  # the end of a sender deletes the versions of the host transport
                assert sender.new_receivers() == () and (rank == 0 or sender.receivers() == ())
            group.barrier()
        return [(report.version, report.receivers, report.nbytes) for report in reports]


@pytest.mark.parametrize("transport", ["device", "host"])
def test_every_rank_publishes_and_the_receiver_gets_whole_tensors(transport: str) -> None:
    served = serve_store()
    first, second, received = run_processes(_publish_or_receive, 3, store_address(served), transport)
    assert first == second and all(report[:2] == (5, 1) for report in first)
    expected = Model().state_dict()
    assert first[0][2] == sum(whole.nbytes for name, whole in expected.items() if name != "head.weight"), "it is tied"
    for (_, kind), found in received.items():
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            wanted = tensor.to(torch.bfloat16) if kind == "source" else tensor
            assert torch.equal(found[name], wanted), (kind, name)


def _make_together(rank: int, address: str) -> Any:
    store, backend, made = connect_store(address), CpuBackend(INFO), []
    with Comm(backend).init_default(store=connect_store(address), rank=rank, size=2) as group:

        def tensors(*, refused: Any = None) -> Iterator[Any]:
            for number in range(5):
                tensor = torch.ones(2000)
                group.all_reduce(tensor)
                yield refused if refused is not None and number == 1 else (f"t{number}", tensor)
            made.append(rank)

        with WeightSender(store, group=group, backend=backend) as sender:
            for refused in ((17, torch.ones(2)), ("t1", torch.ones(2).to_sparse()), ("t1", None)):
                with pytest.raises(CommAbortedError if rank else Exception, match=r"names|sparse|Sparse|NoneType"):
                    sender.publish(1, tensors(refused=refused if rank == 0 else None))
            for _ in range(2):  # nobody receives them
                assert sender.publish(1, tensors(), again=True).receivers == 0
            with pytest.raises(CommAbortedError if rank else TransferFailedError, match="version 0"):
                sender.publish(0, tensors())
        return made


def test_an_iterator_is_read_to_its_end_on_every_rank_whatever_happens() -> None:
    served = serve_store()
    assert run_processes(_make_together, 2, store_address(served)) == [[0] * 6, [1] * 6]


def _send_adapters(rank: int, address: str) -> Any:
    store, backend = connect_store(address), CpuBackend(INFO)
    with Comm(backend).init_default(store=connect_store(address), rank=rank, size=2) as group:
        named: Any = [("w", torch.ones(10))]
        model = WeightSource.of(named, group=group)
        sender = PolicySender(
            lambda name: WeightSender(store, group=group, name=name, transport="host", backend=backend), base=7
        )
        reports = [sender.send(version, model=model, adapter=model) for version in (1, 2)]
        sender.close()
        return [(report.plan.what, report.base and report.base.nbytes, report.policy.nbytes) for report in reports]


def test_all_ranks_follow_one_plan_of_what_is_sent() -> None:
    served = serve_store()
    first, second = run_processes(_send_adapters, 2, store_address(served))
    assert first == second == [("base + adapter", 40, 40), ("adapter", None, 40)]
