"""Groups staged through the host keep torch's contract; the kit tests them on a device."""

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hwrl.comm import serve_store
from hwrl.comm.staged import StagedCollectives, StagedGroup
from hwrl_cpu import INFO, CpuBackend

HOST = CpuBackend(INFO)


def _group(collectives: Any = None) -> Any:
    collectives = collectives or StagedCollectives(HOST)
    return collectives.create_process_group(serve_store(), rank=0, size=1, name="one", timeout=timedelta(seconds=200))


def test_parameters_and_inference_tensors_are_written_past_autograd() -> None:
    group, parameter = _group(), torch.nn.Parameter(torch.ones(3))
    with torch.inference_mode():
        inferred = torch.ones(3)
    for tensor in (parameter, parameter * 2, inferred):
        function, version = tensor.grad_fn, None if tensor.is_inference() else tensor._version
        group.broadcast([tensor], dist.BroadcastOptions()).wait()
        assert tensor.grad_fn is function
        assert version is None or tensor._version > version, "autograd learns of the write"


def test_a_future_that_is_asked_for_late_has_the_results() -> None:
    tensor = torch.ones(3)
    work = _group().broadcast([tensor], dist.BroadcastOptions())
    work.wait()
    assert [found is tensor for found in work.get_future().value()] == [True]


def test_a_barrier_reads_from_the_device_so_that_it_waits_for_the_work_there() -> None:
    group = StagedGroup(_group(HOST), HOST, "meta", name="staged")  # such a device has nothing that can be read
    with pytest.raises(NotImplementedError, match="meta"):
        group.barrier(dist.BarrierOptions())


def test_any_error_of_a_send_reaches_its_waiter() -> None:
    class Work:
        def wait(self) -> bool:
            raise ValueError("no such peer")

    class Alone(dist.ProcessGroup):
        def send(self, *_: object) -> Any:
            return Work()

    group = StagedGroup(Alone(0, 1), HOST, "cpu", name="staged")  # type: ignore[call-arg]  # the stubs lack it
    with pytest.raises(ValueError, match="no such peer"):
        group.send([torch.ones(1)], 0, 0).wait()
