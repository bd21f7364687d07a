"""What a save does for other programs: its export reads the saved tensors, and after_commit tells of the checkpoint."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hwrl.checkpoint import CheckpointInfo, CheckpointManager, DurableFS, SavedTensors, SaveTuning
from hwrl.errors import CheckpointSaveError
from hwrl.safetensors_files import write_tensors
from hwrl_cpu import INFO, CpuBackend
from tests.support.gated import Gated

BACKEND = CpuBackend(INFO)
TRACKER = "latest_checkpointed_iteration.txt"
MODES = pytest.mark.parametrize("async_save", [False, True], ids=["foreground", "background"])


def open_manager(directory: Path, **options: Any) -> CheckpointManager:
    return CheckpointManager(directory, backend=BACKEND, **options)


def state(value: float) -> dict[str, Any]:
    return {
        "model": {"weight": torch.full((40, 3), float(value)), "bias": torch.arange(5, dtype=torch.int32)},
        "count": 3,
    }


# -- export -----------------------------------------------------------------------------------------------------


def export_model(directory: Path, saved: SavedTensors) -> None:
    names = {name.removeprefix("model."): name for name in saved}
    described = ((short, saved.on_meta(name)) for short, name in names.items())
    write_tensors(directory, described, ((short, saved[name]) for short, name in names.items()))


@MODES
def test_an_export_writes_the_saved_tensors_and_not_the_changed_ones(tmp_path: Path, async_save: bool) -> None:
    fs, saved = Gated(), state(1)
    with open_manager(tmp_path, async_save=async_save, fs=fs, tuning=SaveTuning(max_item_nbytes=64)) as opened:
        if not async_save:
            fs.gate.set()
        opened.save(1, saved, export=export_model)
        saved["model"]["weight"].fill_(9)
        fs.gate.set()
        opened.wait()
        info = opened.checkpoints()[0]
    exported = load_file(info.path / "hf" / "model.safetensors")
    assert exported["weight"].tolist() == [[1.0] * 3] * 40 and exported["bias"].tolist() == [0, 1, 2, 3, 4]
    assert "hf/model.safetensors" in info.manifest.files


def test_an_export_may_take_one_tensor_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def look(_: Path, saved: SavedTensors) -> None:
        seen.update(names=sorted(saved), shape=saved.on_meta("model.weight").shape, own=saved["model.bias"].fill_(7))
        with pytest.raises(KeyError, match="count"):
            saved["count"]
        with monkeypatch.context() as unread:
            unread.setattr(SavedTensors, "read", None)
            assert "model.bias" in saved and "count" not in saved

    with open_manager(tmp_path) as opened:
        opened.save(1, state(1), export=look)
        loaded = state(0)
        opened.resume(loaded)
    assert seen["names"] == ["model.bias", "model.weight"] and seen["shape"] == (40, 3)
    assert loaded["model"]["bias"].tolist() == [0, 1, 2, 3, 4], "what the export read is its own"


# -- after_commit -----------------------------------------------------------------------------------------------


class Follower:
    """A tracker of another program. It notes what lay on the disk at each call."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.calls: list[tuple[int, int, str, list[str]]] = []
        self.threads: set[str] = set()
        self.error: Exception | None = None

    def __call__(self, info: CheckpointInfo) -> None:
        kept = sorted(path.name for path in self.directory.glob("global_step_*"))
        self.calls.append((info.step, info.weight_version, (self.directory / TRACKER).read_text(), kept))
        self.threads.add(threading.current_thread().name)
        if self.error is not None:
            raise self.error
        (info.path.parent / "own_tracker.json").write_text(json.dumps({"step": info.step, "nbytes": info.nbytes}))


@MODES
def test_after_commit_comes_once_before_the_checkpoint_before_is_removed(tmp_path: Path, async_save: bool) -> None:
    follower = Follower(tmp_path)
    with open_manager(tmp_path, async_save=async_save, max_ckpt_to_keep=1) as opened:
        for step in (1, 2):
            opened.save(step, state(step), weight_version=step + 5, after_commit=follower)
        opened.wait()
        assert [info.step for info in opened.checkpoints()] == [2]
        nbytes = opened.checkpoints()[0].nbytes
    assert follower.calls == [(1, 6, "1", ["global_step_1"]), (2, 7, "2", ["global_step_1", "global_step_2"])]
    assert json.loads((tmp_path / "own_tracker.json").read_text()) == {"step": 2, "nbytes": nbytes}
    assert (threading.current_thread().name in follower.threads) is not async_save


@MODES
def test_an_after_commit_that_raises_leaves_a_complete_step(tmp_path: Path, async_save: bool) -> None:
    follower = Follower(tmp_path)
    with open_manager(tmp_path, async_save=async_save, max_ckpt_to_keep=1) as opened:
        opened.save(1, state(1), after_commit=follower)
        opened.wait()
        follower.error = OSError(28, "No space left on device", "own_tracker.json")
        with pytest.raises(CheckpointSaveError, match=r"step 2 is complete, but its after_commit failed") as caught:
            opened.save(2, state(2), after_commit=follower)
            opened.wait()
        assert "No space left" in caught.value.why
        assert [info.step for info in opened.checkpoints()] == [1, 2], "its error comes before retention"
        loaded = state(0)
        resumed = opened.resume(loaded)
        assert resumed is not None and resumed.step == 2 and float(loaded["model"]["weight"][0, 0]) == 2
        follower.error = None
        opened.save(3, state(3), after_commit=follower)
        opened.wait()
        assert [info.step for info in opened.checkpoints()] == [3]
    assert [call[0] for call in follower.calls] == [1, 2, 3], "no step is told of twice"


def test_after_commit_is_not_called_for_a_failed_save(tmp_path: Path) -> None:
    follower = Follower(tmp_path)
    with open_manager(tmp_path) as opened, pytest.raises(CheckpointSaveError, match="step 1 was not saved"):
        opened.save(1, state(1), export=lambda *_: 1 / 0, after_commit=follower)
    assert follower.calls == []


class Unsynced(DurableFS):
    """The directory cannot be synced after a step has its final name."""

    def before(self, operation: str, path: Path) -> None:
        if operation == "sync_directory" and (path / "global_step_1").exists():
            raise OSError(5, "Input/output error", str(path))


def test_a_step_whose_name_may_not_be_durable_is_complete_on_this_disk(tmp_path: Path) -> None:
    with open_manager(tmp_path, fs=Unsynced()) as opened:
        with pytest.raises(CheckpointSaveError, match="is complete on this disk, but its name may not be durable"):
            opened.save(1, state(1.0))
        assert [info.step for info in opened.checkpoints()] == [1]
