"""A run whose directory was replaced writes nothing into the other run's, and ends with what happened."""

from __future__ import annotations

import io
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hwrl.checkpoint import DurableFS
from hwrl.errors import HwrlError, RunDirectoryError, with_notes
from hwrl.files import make_directory
from hwrl.run.config import Config
from hwrl.run.interrupts import Interrupts
from hwrl.run.report import PlainView, RecordedView
from hwrl.run.report.run_report import RunReport
from hwrl.run.report.trackers import tracked_run
from hwrl.run.run_directory import claimed_directory, record_replicas
from hwrl.run.scaling import answer_request
from hwrl.run.trainer import StepOutcome
from hwrl_trackers.tensorboard import TensorboardTracker
from tests.support import run_config
from tests.support.two_step_run import METRICS_OF_A_STEP, StandInFleet, train


def config_of(directory: Path) -> Config:
    return run_config.config_of(directory, report={"trackers": ["none"]})


def other_run(directory: Path) -> dict[Path, bytes]:
    """Write what a second run of the same configuration has in its directory; return the content of the files."""
    with claimed_directory(config_of(directory)):
        report = RunReport(directory, log=pytest.fail)
        report.add(1, METRICS_OF_A_STEP, prompts=[7])
        report.close()
    (directory / "checkpoint").write_text("7")
    (directory / "samples.jsonl").write_text('{"step": 7}\n')
    return content_of(directory)


def content_of(directory: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() if path.is_file() else b"" for path in directory.rglob("*")}


def delete(path: Path) -> None:
    shutil.rmtree(path)


def rename(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))


def delete_lock(path: Path) -> None:
    (path / ".hwrl.lock").unlink()


def writes_of(config: Config, report: RunReport, view: RecordedView) -> dict[str, Callable[[], object]]:
    """Return every kind of write of a run to its directory."""
    home = config.dir
    return {
        "line": lambda: report.add(2, METRICS_OF_A_STEP, prompts=[1], samples=[{"step": 2}]),
        "amend": lambda: report.amend({"eval/reward": 1.0}),
        "sync": report.sync,
        "event": lambda: view.log("a line"),
        "report": lambda: RunReport(home, log=lambda text: None, resume_step=1),
        "view": lambda: RecordedView(PlainView(1, stream=io.StringIO()), home),
        "configuration": lambda: record_replicas(config, 3),
        "run id": lambda: tracked_run(config, resume_step=0),
        "tensorboard": lambda: TensorboardTracker().start(tracked_run(config, resume_step=0)),
        "answer": lambda: answer_request(home, {"id": "7", "replicas": 1}, text="done"),
        "directory": lambda: make_directory(home / "profile"),
        "close": report.close,
    }


@pytest.mark.parametrize("is_recreated", [True, False], ids=["recreated", "gone"])
@pytest.mark.parametrize(
    ("act", "said"),
    [
        (delete, "the directory was deleted"),
        (rename, "its files are in "),
        (delete_lock, "hwrl.lock in it"),
    ],
)
def test_no_write_of_a_run_reaches_a_directory_that_it_lost(
    tmp_path: Path, act: Callable[[Path], None], said: str, is_recreated: bool
) -> None:
    config = config_of(tmp_path / "run")
    with claimed_directory(config), RecordedView(PlainView(1, stream=io.StringIO()), config.dir) as view:
        report = RunReport(config.dir, log=lambda text: None)
        report.add(1, METRICS_OF_A_STEP, prompts=[0])
        act(config.dir)
        if is_recreated and act is not delete_lock:
            other_run(tmp_path / "run-2")
            (tmp_path / "run-2").rename(config.dir)
        elif is_recreated:
            (config.dir / ".hwrl.lock").touch()
        before = content_of(config.dir)
        for name, write in writes_of(config, report, view).items():
            try:
                write()
            except (HwrlError, OSError) as exc:
                assert said in str(exc), name
        after = content_of(config.dir)
        appended = {"events.jsonl", "metrics.jsonl", "trained_prompts.jsonl"} if act is delete_lock else set()
        assert {path for path in after if after[path] != before.get(path)} <= {config.dir / name for name in appended}
        with pytest.raises(RunDirectoryError, match=said):
            record_replicas(config, 3)


class LosesItsDirectory(StandInFleet):
    """Before the end of its second step, another run gets the directory."""

    def __init__(self, home: Path, act: Callable[[Path], None]) -> None:
        super().__init__(home, DurableFS())
        self._act = act
        self.before: dict[Path, bytes] = {}

    def step(self, groups: list[Any]) -> StepOutcome:
        outcome = super().step(groups)
        if self._step == 2:
            self._act(self._home)
            other_run(self._home.with_name("run-2"))
            self._home.with_name("run-2").rename(self._home)
            self.before = content_of(self._home)
        return outcome


@pytest.mark.parametrize("act", [delete, rename])
def test_a_run_that_lost_its_directory_ends_without_a_save(tmp_path: Path, act: Callable[[Path], None]) -> None:
    home = tmp_path / "run"
    fleet = LosesItsDirectory(home, act)
    with claimed_directory(config_of(home)), pytest.raises(HwrlError) as caught:
        train(home, fleet, Interrupts())
    told = with_notes(caught.value)
    assert "the path leads to another directory now" in told and "was saved" not in told
    assert content_of(home) == fleet.before
    assert (home / "checkpoint").read_text() == "7"


def test_the_directory_of_a_run_is_closed_to_others_unless_it_exists(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o2770)
    for name, mode in (("new", 0o700), ("shared", 0o2770)):
        with claimed_directory(config_of(tmp_path / name)):
            assert stat.S_IMODE((tmp_path / name).stat().st_mode) == mode
            assert stat.S_IMODE((tmp_path / name / ".hwrl.lock").stat().st_mode) == 0o600


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", [".hwrl.lock", "config.yaml", "metrics.jsonl"])
@pytest.mark.parametrize("plant", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")], ids=["pipe", "device"])
def test_a_pipe_or_a_device_in_the_directory_is_an_error_at_once(
    tmp_path: Path, name: str, plant: Callable[[Path], None]
) -> None:
    plant(tmp_path / name)
    with (
        pytest.raises(HwrlError, match=r"symbolic link|not a regular file|overwrite"),
        claimed_directory(config_of(tmp_path)),
    ):
        pytest.fail("it was claimed")


def test_a_run_writes_through_no_link(tmp_path: Path) -> None:
    home, victim = tmp_path / "run", tmp_path / "victim"
    victim.write_text("precious\n")
    with claimed_directory(config_of(home)):
        pass
    names = ["events.jsonl", "samples.jsonl", "run_id", "config.yaml", "metrics.jsonl", "trained_prompts.jsonl"]
    for name in [*names[:3], *(f".tmp_{name}" for name in names)]:
        (home / name).symlink_to(victim)
    config = config_of(home)
    with claimed_directory(config), RecordedView(PlainView(1, stream=io.StringIO()), home) as view:
        report = RunReport(home, log=lambda text: None)
        report.add(1, METRICS_OF_A_STEP, prompts=[0], samples=[{"step": 1}])
        report.amend({"eval/reward": 1.0})
        view.log("a line")
        report.close()
    assert victim.read_text() == "precious\n"
