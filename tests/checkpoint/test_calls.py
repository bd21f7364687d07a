"""Calls of CheckpointManager: interrupted, wrong, too late, or missing."""

import gc
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hwrl.checkpoint import CheckpointManager, DurableFS, Manifest, SaveTuning
from hwrl.checkpoint.layout import seal
from hwrl.cli import main
from hwrl.errors import CheckpointError, CheckpointSaveError
from hwrl_cpu import INFO, CpuBackend
from tests.support.gated import Gated

BACKEND = CpuBackend(INFO)


class Preempted(BaseException):
    """Raised by a signal's handler."""


@contextmanager
def interrupted_by(action: Any = lambda: None) -> Iterator[None]:
    """Have a signal end the block, and run ``action`` in its handler."""

    def handle(*_: object) -> None:
        action()
        raise Preempted

    before = signal.signal(signal.SIGALRM, handle)
    try:
        with pytest.raises(Preempted):
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def small(value: int) -> dict[str, Any]:
    return {"weight": torch.full((3,), float(value)), "count": value}


def manager(directory: Path, **options: Any) -> CheckpointManager:
    return CheckpointManager(directory, **{"backend": BACKEND, **options})


# -- interrupts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["save", "wait", "close"])
def test_a_save_outlives_an_interrupt_of_the_call_that_waits_for_it(tmp_path: Path, call: str) -> None:
    fs = Gated(only="step_1.")
    opened = manager(tmp_path, async_save=True, fs=fs)
    opened.save(1, small(1))
    assert fs.arrived.wait(300)
    with interrupted_by(fs.gate.set if call == "close" else lambda: None):  # close waits for it all the same
        opened.save(2, small(2)) if call == "save" else getattr(opened, call)()
    if call != "close":
        threading.Timer(0.2, fs.gate.set).start()
        opened.save(3, small(3))
        assert fs.gate.is_set(), "it has waited for step 1, whose staging it needs"
    opened.close()
    state = small(-1)
    with manager(tmp_path) as again:
        assert again.resume(state, step=1) is not None
    assert state["weight"].tolist() == [1.0] * 3 and state["count"] == 1


def test_a_failure_is_raised_though_the_call_before_was_interrupted(tmp_path: Path) -> None:
    fs = Gated(only="step_1.")
    fs.error = OSError(28, "No space left on device", "somewhere")
    with manager(tmp_path, async_save=True, fs=fs) as opened:
        opened.save(1, small(1))
        with interrupted_by():
            opened.wait()
        fs.gate.set()
        with pytest.raises(CheckpointSaveError, match="step 1 was not saved"):
            opened.save(2, small(2))


def test_an_interrupted_save_in_the_foreground_leaves_no_thread_that_reads_the_state(tmp_path: Path) -> None:
    fs = Gated(only="step_1.")
    with manager(tmp_path, fs=fs) as opened:
        with interrupted_by(lambda: threading.Timer(0.2, fs.gate.set).start()):
            opened.save(1, small(1))
        assert fs.gate.is_set(), "it has waited for the thread that writes"
        opened.save(2, small(2))
        assert [info.step for info in opened.checkpoints()] == [2]


# -- refusals ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["step", "weight_version"])
@pytest.mark.parametrize("value", [None, 3.0, True, -1, "5", np.float32(3)])
def test_numbers_that_no_manifest_holds_are_refused(tmp_path: Path, name: str, value: Any) -> None:
    with manager(tmp_path) as opened:
        with pytest.raises(CheckpointSaveError, match=f"{name}=.* cannot be saved"):
            opened.save(**{"step": 1, "weight_version": 1, name: value}, state=small(1))
        opened.save(1, small(1))
        assert opened.resume(small(0)) is not None


def test_integers_of_other_libraries_are_integers(tmp_path: Path) -> None:
    with manager(tmp_path) as opened:
        counts: dict[str, Any] = {"step": np.int64(5), "weight_version": torch.tensor(7)}
        opened.save(state=small(1), **counts)
        resumed = opened.resume(small(0))
    assert resumed is not None and (resumed.step, resumed.info.weight_version) == (5, 7)


def test_nothing_is_sealed_that_could_not_be_read(tmp_path: Path) -> None:
    nothing: Any = None
    manifest = Manifest(1, "id", 1, weight_version=nothing, saved_unix_s=time.time(), versions={}, files={})
    with pytest.raises(TypeError):
        seal(DurableFS(), tmp_path, [], {}, manifest)
    assert not (tmp_path / "MANIFEST.json").exists()


@pytest.mark.parametrize(
    ("state", "why"),
    [
        ({"a": {"b": torch.ones(1)}, "a.b": torch.zeros(1)}, r"two values with the same name.*a\.b"),
        ({"a": torch.eye(3).to_sparse()}, "'a' cannot be saved.*sparse_coo"),
    ],
)
def test_state_that_the_format_cannot_hold_is_refused(tmp_path: Path, state: dict[str, Any], why: str) -> None:
    with manager(tmp_path) as opened:
        with pytest.raises(CheckpointSaveError, match=f"(?s){why}"):
            opened.save(1, state)
        opened.save(1, {"a": torch.ones(3, 3)})
        with pytest.raises(CheckpointError):
            opened.resume(state)


def test_the_default_device_is_the_callers_own_matter(tmp_path: Path) -> None:
    rows = torch.arange(12.0).reshape(4, 3)
    state: dict[str, Any] = {"rows": rows, "pair": (torch.ones(2), 3)}
    other: dict[str, Any] = {"rows": torch.zeros(4, 3), "pair": None}
    with torch.device("meta"), manager(tmp_path, async_save=True, tuning=SaveTuning(max_item_nbytes=16)) as opened:
        opened.save(1, state)
        opened.resume(other)
    assert torch.equal(other["rows"], rows) and other["pair"][0].tolist() == [1.0, 1.0]


# -- closed, or dropped -----------------------------------------------------------------------------------------


class Locking(CpuBackend):
    """Counts the bytes of page-locked memory."""

    def __init__(self) -> None:
        super().__init__(INFO)
        self.locked_nbytes = 0

    def register_host_memory(self, memory: torch.Tensor) -> None:
        self.locked_nbytes += memory.nbytes

    def unregister_host_memory(self, memory: torch.Tensor) -> None:
        self.locked_nbytes -= memory.nbytes


def test_a_closed_manager_saves_nothing_and_holds_nothing(tmp_path: Path) -> None:
    backend = Locking()
    opened = manager(tmp_path, async_save=True, backend=backend)
    opened.save(1, small(1))
    assert backend.locked_nbytes > 0
    opened.close()
    with pytest.raises(CheckpointSaveError, match="step 2 cannot be saved\n  why: the manager is closed"):
        opened.save(2, small(2))
    with pytest.raises(CheckpointError, match="nothing can be loaded"):
        opened.resume(small(1))
    assert backend.locked_nbytes == 0


def test_a_manager_that_is_dropped_frees_the_directory_when_its_save_is_written(tmp_path: Path) -> None:
    fs = Gated(only="step_1.")
    opened = manager(tmp_path, async_save=True, fs=fs)
    opened.save(1, small(1))
    assert fs.arrived.wait(300)
    del opened
    gc.collect()
    with pytest.raises(CheckpointError, match="this process has another open manager on it"):
        manager(tmp_path)
    fs.gate.set()
    deadline_s = time.monotonic() + 300
    while True:
        try:
            again = manager(tmp_path)
            break
        except CheckpointError:
            assert time.monotonic() < deadline_s
    with again:
        assert [info.step for info in again.checkpoints()] == [1]


# -- incomplete directories ---------------------------------------------------------------------------------------


def test_an_incomplete_checkpoint_keeps_its_name_until_its_step_is_saved_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another program may own it: trainers of other frameworks save under the same names."""
    foreign = tmp_path / "global_step_5"
    foreign.mkdir()
    (foreign / "model.pt").write_bytes(b"weights")
    with manager(tmp_path) as saving:
        saving.save(1, small(1))
        saving.save(2, small(2))
        with (tmp_path / "global_step_2" / "extra.json").open("r+b") as file:
            file.truncate(3)
        resumed = saving.resume(small(0))
        assert resumed is not None and (resumed.step, len(resumed.skipped)) == (1, 2)
        saving.save(3, small(3))
        assert (tmp_path / "global_step_2").exists() and foreign.exists()
        assert main(["checkpoints", "ls", str(tmp_path)]) == 0
        listed = capsys.readouterr().out
        assert "global_step_2 is not complete" in listed and "global_step_5 is not complete" in listed
        saving.save(5, small(5))
        assert [info.step for info in saving.checkpoints()] == [1, 3, 5]
    [aside] = tmp_path.glob(".broken_global_step_5.*")
    assert (aside / "model.pt").read_bytes() == b"weights"
