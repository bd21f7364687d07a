"""Staging on the device, and saving large tensors in pieces, through small read buffers."""

import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load

from hwrl.checkpoint import CheckpointManager, LocalShards, SaveTuning
from hwrl.checkpoint.shards import divide
from hwrl.errors import CheckpointSaveError, UnsupportedError
from hwrl.interfaces import Backend, BackendInfo, Capability, MemoryInfo, Support
from tests.support.halting import Halting
from tests.support.roomy import Roomy


def state_of(step: int) -> dict[str, Any]:
    """Return tensors of many kinds, each of them different at each step."""
    torch.manual_seed(step)
    ramp = torch.arange(600).remainder(7) + step
    return {
        "float32": torch.randn(30, 20),
        "bfloat16": torch.randn(5, 7, 11).bfloat16(),
        "float8": ramp.float().to(torch.float8_e4m3fn),
        "bool": (ramp % 2).bool(),
        "int64": ramp,
        "complex": torch.randn(17, 3, dtype=torch.complex64),
        "scalar": torch.tensor(float(step)),
        "empty": torch.zeros(0, 3),
        "transposed": torch.randn(40, 30).T,
        "part of a larger one": torch.randn(100, 50)[3:5, 7:],
        "pieces": LocalShards([2, 600], torch.float32, {(0, 0): torch.randn(1, 600), (1, 0): torch.randn(1, 600)}),
        "step": step,
    }


def tensors_in(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors of a state, and the pieces of one."""
    tensors: dict[str, torch.Tensor] = {}
    for name, value in state.items():
        if isinstance(value, LocalShards):
            tensors |= {f"{name} {offset}": piece for offset, piece in value.pieces.items()}
        elif isinstance(value, torch.Tensor):
            tensors[name] = value
    return tensors


def assert_same(left: dict[str, Any], right: dict[str, Any]) -> None:
    assert left["step"] == right["step"]
    ours, theirs = tensors_in(left), tensors_in(right)
    for name, tensor in ours.items():
        as_bytes = (one.contiguous().view(-1).view(torch.uint8) for one in (tensor, theirs[name]))
        assert tensor.dtype == theirs[name].dtype and torch.equal(*as_bytes), name


@pytest.fixture(params=[16, 1000, 32 << 20], ids=["tiny pieces", "pieces", "whole"])
def tuning(request: pytest.FixtureRequest) -> SaveTuning:
    return SaveTuning(max_item_nbytes=int(request.param), min_file_nbytes=1000)  # several threads


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # torch says so when one process loads
@pytest.mark.parametrize(("async_save", "staging"), [(False, "host"), (True, "host"), (True, "device")])
def test_every_kind_of_tensor_comes_back_and_torch_reads_it_too(
    tmp_path: Path, async_save: bool, staging: Any, tuning: SaveTuning
) -> None:
    state, fs = state_of(1), Halting("create")
    if not async_save:
        fs.gate.set()
    options: dict[str, Any] = {"async_save": async_save, "staging": staging, "tuning": tuning}
    with CheckpointManager(tmp_path, backend=Roomy(), fs=fs, **options) as manager:
        report = manager.save(1, state)
        for tensor in tensors_in(state).values():
            tensor.zero_()  # the caller may
        fs.gate.set()
        manager.wait()
        nbytes = sum(tensor.nbytes for tensor in tensors_in(state).values())
        assert report.cloned_nbytes == nbytes * (staging == "device")
        assert report.staged_nbytes == nbytes * (async_save and staging == "host")
        if report.staged_nbytes == 0:
            assert report.held_nbytes <= tuning.max_files * (tuning.max_item_nbytes + 64)
        found = state_of(2)
        assert manager.resume(found) is not None
    assert_same(found, state_of(1))
    plain = {name: value for name, value in state_of(2).items() if not isinstance(value, LocalShards)}
    plain["pieces"] = torch.zeros(2, 600)
    load(plain, checkpoint_id=tmp_path / "global_step_1")
    rows = plain["pieces"].split(1)
    assert_same(
        {**plain, "pieces": LocalShards([2, 600], torch.float32, {(0, 0): rows[0], (1, 0): rows[1]})}, state_of(1)
    )


@pytest.mark.parametrize("shape", [(), (1,), (0, 5), (1000,), (7, 100), (3, 5, 70), (2, 1, 3, 999), (2, 2, 1000, 1)])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.complex128])
def test_a_tensor_is_divided_into_small_contiguous_pieces_that_make_it_up(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    covered = torch.zeros(shape, dtype=torch.int32)
    pieces = list(divide(shape, dtype.itemsize, max_nbytes=1000))
    for begin, sizes in pieces:
        assert math.prod(sizes) * dtype.itemsize <= 1000
        cut = covered[tuple(slice(start, start + size) for start, size in zip(begin, sizes, strict=True))]
        assert cut.is_contiguous() and cut.shape == sizes
        cut += 1
    assert (covered == 1).all()
    assert len(pieces) <= 2 + 4 * covered.numel() * dtype.itemsize // 1000, "too many"


def test_device_memory_is_given_back_while_the_save_runs_and_the_host_needs_a_ring_only(
    tmp_path: Path,
) -> None:
    tuning = SaveTuning(max_item_nbytes=1 << 20)
    backend, fs, nbytes = Roomy(), Halting("sync"), 40 << 20
    state = {"large": torch.ones(nbytes // 4)}
    options: dict[str, Any] = {"async_save": True, "staging": "device", "tuning": tuning}
    with CheckpointManager(tmp_path, backend=backend, fs=fs, **options) as manager:
        before_nbytes = backend.memory_info().allocated_nbytes
        report = manager.save(1, state)
        assert fs.arrived.wait(300)
        assert backend.memory_info().allocated_nbytes - before_nbytes < nbytes // 2, "the copy is still there"
        fs.gate.set()
        manager.wait()
    assert report.cloned_nbytes == nbytes and report.staged_nbytes == 0
    assert report.held_nbytes == tuning.max_files << 20


@pytest.mark.parametrize(("async_save", "staging"), [(False, "host"), (True, "host"), (True, "device")])
def test_tensors_without_elements_are_saved_also_by_themselves(tmp_path: Path, async_save: bool, staging: Any) -> None:
    with CheckpointManager(tmp_path, async_save=async_save, staging=staging, backend=Roomy()) as manager:
        manager.save(1, {"empty": torch.empty(0, 5)})
        manager.wait()
        found = {"empty": torch.empty(0, 5)}
        assert manager.resume(found) is not None


class Filling(Roomy):
    """A device of ``total_nbytes``. Its allocator keeps memory once it was taken."""

    def __init__(self, total_nbytes: int) -> None:
        super().__init__()
        self._before_nbytes, self._peak_nbytes = super().memory_info().allocated_nbytes, 0
        self._total_nbytes = total_nbytes

    def memory_info(self) -> MemoryInfo:
        real = super().memory_info()
        used = real.allocated_nbytes - self._before_nbytes
        peak = self._peak_nbytes = max(self._peak_nbytes, used)
        return replace(real, free_nbytes=self._total_nbytes - peak, reserved_nbytes=peak, peak_nbytes=peak)


def test_a_step_beside_a_save_takes_no_room_from_the_next(tmp_path: Path) -> None:
    backend, mib = Filling(100 << 20), 1 << 20
    state = {"weights": torch.ones(30 * mib // 4)}

    def step(*, nbytes: int) -> None:
        activations = torch.ones(nbytes // 4)
        backend.memory_info()
        del activations

    step(nbytes=20 * mib)
    fs = Halting("write")
    with CheckpointManager(tmp_path, async_save=True, staging="device", backend=backend, fs=fs) as manager:
        for number in range(1, 5):
            fs.halt_again()
            assert manager.save(number, state).cloned_nbytes == 30 * mib, number
            assert fs.arrived.wait(300)
            step(nbytes=20 * mib)  # 30 + 30 + 20
            fs.gate.set()
            manager.wait()
        step(nbytes=65 * mib)  # more than ever before, and nothing beside it
        assert manager.save(5, state).cloned_nbytes == 0


def test_a_failed_save_gives_the_device_memory_back(tmp_path: Path) -> None:
    backend, fs, nbytes = Roomy(), Halting("write"), 40 << 20
    fs.error = OSError(28, os.strerror(28), "somewhere")
    fs.gate.set()
    state = {name: torch.ones(nbytes // 8) for name in "ab"}
    with CheckpointManager(tmp_path, async_save=True, staging="device", backend=backend, fs=fs) as manager:
        before_nbytes = backend.memory_info().allocated_nbytes
        manager.save(1, state)
        with pytest.raises(CheckpointSaveError, match="step 1 was not saved"):
            manager.wait()
        assert backend.memory_info().allocated_nbytes - before_nbytes < nbytes // 4
        manager.save(2, state)
        manager.wait()
        assert [info.step for info in manager.checkpoints()] == [2]


@pytest.mark.parametrize("full", [False, True])
def test_what_has_no_room_on_the_device_is_staged_on_the_host(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, full: bool
) -> None:
    tuning = SaveTuning(clone_batch_nbytes=1)  # each tensor is allocated by itself
    state = {"large": torch.full((1000,), 1.0), "small": torch.full((100,), 2.0)}
    expected = {name: tensor.clone() for name, tensor in state.items()}
    backend = Roomy(1000, full=full)
    with CheckpointManager(tmp_path, async_save=True, staging="device", backend=backend, tuning=tuning) as manager:
        report = manager.save(1, state)
        for tensor in state.values():
            tensor.zero_()
    with CheckpointManager(tmp_path, backend=Roomy()) as manager:
        assert manager.resume(state) is not None
    assert (report.cloned_nbytes, report.staged_nbytes) == ((0, 4400) if full else (400, 4000))
    assert f"{report.staged_nbytes} bytes of the state do not fit on the device" in caplog.text
    for name, tensor in expected.items():
        assert torch.equal(state[name], tensor), name


def test_a_device_whose_memory_is_not_counted_is_no_place_to_stage(tmp_path: Path) -> None:
    class Uncounted(Backend):
        def supports(self, capability: Capability) -> Support:
            return Support("unsupported", "nobody counts")

    backend = Uncounted(BackendInfo(name="uncounted", device_type="cpu", description="one for this test"))
    with pytest.raises(UnsupportedError, match=r"stage a save on the device\n.*nobody counts"):
        CheckpointManager(tmp_path, async_save=True, staging="device", backend=backend)
