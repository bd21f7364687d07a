"""A load that fails for another reason than damage names this reason."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hwrl.checkpoint import CheckpointManager, SavedTensors
from hwrl.checkpoint.manifest import inspect_checkpoint
from hwrl.errors import CheckpointCorruptError, CheckpointError, DeviceMemoryError
from hwrl_cpu import INFO, CpuBackend

BACKEND = CpuBackend(INFO)


def _remove(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data.unlink()


def _break_disk(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every read fail: no memory is mapped at the low addresses of ``/proc/self/mem``, a regular file."""
    real = os.open

    def open_broken(path: Any, *args: Any, **kwargs: Any) -> int:
        return real("/proc/self/mem" if os.fspath(path) == os.fspath(data) else path, *args, **kwargs)

    monkeypatch.setattr(os, "open", open_broken)


@pytest.mark.parametrize(
    ("change", "reason"),
    [(_remove, "No such file or directory: .*__0_0"), (_break_disk, "Input/output error: .*step_1")],
)
def test_an_error_of_the_disk_is_not_called_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path, pytest.MonkeyPatch], None], reason: str
) -> None:
    state = {"weight": torch.ones(64)}
    with CheckpointManager(tmp_path, backend=BACKEND) as manager:
        manager.save(1, state)
    info = inspect_checkpoint(tmp_path / "global_step_1")
    load = SavedTensors(info).plan(state)
    change(info.path / "__0_0.distcp", monkeypatch)
    with pytest.raises(CheckpointError, match=reason) as caught:
        load.run()
    assert not isinstance(caught.value, CheckpointCorruptError)


class Full(torch.Tensor):
    """A tensor on a device without room for the copy of a tensor."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.copy_:
            raise torch.OutOfMemoryError("tried to allocate 256 bytes")
        parent: Any = super()
        return parent.__torch_function__(func, types, args, kwargs or {})


def test_a_full_device_is_not_called_damage(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, backend=BACKEND) as manager:
        manager.save(1, {"weight": torch.ones(64)})
        with pytest.raises(DeviceMemoryError, match="the checkpoint does not fit"):
            manager.resume({"weight": torch.zeros(64).as_subclass(Full)})
