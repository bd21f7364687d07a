"""The runtime under the real torch_npu, in one process: asynchrony, order and memory."""

import time

import pytest
import torch
import torch.multiprocessing as mp
from conftest import MEMORY, held

NPU = torch.npu


@pytest.fixture
def stream() -> torch.npu.Stream:
    NPU.synchronize()
    return NPU.Stream()


def test_the_whole_chain() -> None:
    assert torch.accelerator.current_accelerator() == torch.device("npu")
    assert torch.equal((torch.ones(3, device="npu") + 1).cpu(), torch.full((3,), 2.0))
    assert NPU.device_count() == 8
    assert NPU.get_device_properties(0).total_memory == MEMORY


def test_a_stream_runs_beside_the_others(stream: torch.npu.Stream) -> None:
    source, target, done = torch.ones(4, device="npu"), torch.zeros(4, device="npu"), NPU.Event()
    NPU.synchronize()
    with held(stream):
        with NPU.stream(stream):
            target.copy_(source)
            done.record()
        assert not done.query()
        assert not stream.query()
        assert torch.equal(source.cpu(), torch.ones(4))
    assert done.query()
    assert torch.equal(target.cpu(), torch.ones(4))


@pytest.mark.parametrize("waits", [True, False])
def test_only_a_wait_orders_two_streams(stream: torch.npu.Stream, waits: bool) -> None:
    """The bug that the simulator is to show: without the wait, the reader sees what was there before."""
    source, target = torch.ones(4, device="npu"), torch.zeros(4, device="npu")
    reader, seen = NPU.Stream(), torch.zeros(4).pin_memory()
    NPU.synchronize()
    with held(stream):
        with NPU.stream(stream):
            target.copy_(source)
        if waits:
            reader.wait_stream(stream)
        with NPU.stream(reader):
            seen.copy_(target, non_blocking=True)
        if not waits:
            reader.synchronize()
    reader.synchronize()
    assert torch.equal(seen, torch.ones(4) if waits else torch.zeros(4))


def test_a_wait_is_for_the_record_before_it(stream: torch.npu.Stream) -> None:
    """Whoever records the event anew elsewhere does not let those go that wait already."""
    reader, event = NPU.Stream(), NPU.Event()
    with held(stream):
        event.record(stream)
        reader.wait_event(event)
        event.record(NPU.current_stream())
        event.synchronize()
        assert not reader.query()
    reader.synchronize()


def test_events_have_times(stream: torch.npu.Stream) -> None:
    before, after = NPU.Event(enable_timing=True), NPU.Event(enable_timing=True)
    before.record(stream)
    before.synchronize()
    with held(stream):
        after.record(stream)
        time.sleep(0.05)
    assert before.elapsed_time(after) >= 50


def test_a_copy_to_pinned_memory_does_not_wait(stream: torch.npu.Stream) -> None:
    source, target = torch.ones(4, device="npu"), torch.zeros(4).pin_memory()
    assert target.is_pinned()
    assert not torch.zeros(4).is_pinned()
    NPU.synchronize()
    with held(stream):
        with NPU.stream(stream):
            target.copy_(source, non_blocking=True)
        assert torch.equal(target, torch.zeros(4))
    assert torch.equal(target, torch.ones(4))


@pytest.mark.parametrize("expandable", [False, True])
def test_out_of_memory_is_torch_npus_own_error(expandable: bool) -> None:
    NPU.empty_cache()
    NPU.memory._set_allocator_settings(f"expandable_segments:{expandable}")
    free, total = NPU.mem_get_info()
    assert total == MEMORY
    half = torch.zeros(total // 2, dtype=torch.uint8, device="npu")
    assert NPU.mem_get_info()[0] <= free - half.nbytes
    with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 162.00 MiB .*256.00 MiB total capacity"):
        torch.empty(160 << 20, dtype=torch.uint8, device="npu")
    assert not half.any()
    del half
    NPU.empty_cache()
    assert NPU.mem_get_info()[0] == free
    NPU.memory._set_allocator_settings("expandable_segments:False")


def _double(tensor: torch.Tensor, done: "mp.Event") -> None:
    tensor.mul_(2)
    NPU.synchronize()
    done.set()


def test_a_tensor_is_shared_with_another_process() -> None:
    context = mp.get_context("spawn")
    tensor, done = torch.ones(4, device="npu"), context.Event()
    NPU.synchronize()
    process = context.Process(target=_double, args=(tensor, done))
    process.start()
    assert done.wait(600)
    process.join()
    assert torch.equal(tensor.cpu(), torch.full((4,), 2.0))
