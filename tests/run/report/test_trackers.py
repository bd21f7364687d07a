"""Trackers of users and plugins: their thread, their errors, and the id that a run keeps."""

from __future__ import annotations

import os
import re
import shutil
import threading
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import pytest

from hwrl.errors import ConfigError, DataError, EngineError
from hwrl.interfaces import RunStatus, TrackedRun, Tracker
from hwrl.run.config import Config
from hwrl.run.report.run_report import RunReport
from hwrl.run.report.trackers import TrackerThread, make_tracker, start_trackers, tracked_run
from hwrl_trackers.tensorboard import TensorboardTracker
from tests.support.run_config import load

DOCS = Path(__file__).parents[3] / "docs"
RUN = TrackedRun("0" * 32, "sorting", Path("/nowhere"), {}, 0)


def configured(directory: Path, *words: str) -> Config:
    return load(directory, f"dir={directory}", *words)


class Recorder(Tracker):
    """Notes its calls, each with the thread. ``fails`` names a method that raises."""

    def __init__(self, fails: str = "", error: Callable[[], BaseException] = lambda: OSError("no network")) -> None:
        self.calls: list[object] = []
        self.threads: set[str] = set()
        self._fails, self._error = fails, error

    def start(self, run: TrackedRun) -> None:
        self._note("start", run.name)

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        self._note("log", step, dict(metrics))

    def finish(self, status: RunStatus) -> None:
        self._note("finish", status)

    def _note(self, name: str, *what: object) -> None:
        self.threads.add(threading.current_thread().name)
        self.calls.append((name, *what))
        if name == self._fails:
            raise self._error()


def test_a_tracker_gets_everything_in_order_in_its_own_thread() -> None:
    tracker = Recorder()
    thread = TrackerThread("mine", lambda: tracker, RUN, log=pytest.fail)
    for step in (1, 2):
        thread.log({"reward/mean": 0.5}, step=step)
    thread.finish("finished")
    thread.finish("failed")
    assert tracker.calls == [
        ("start", "sorting"),
        ("log", 1, {"reward/mean": 0.5}),
        ("log", 2, {"reward/mean": 0.5}),
        ("finish", "finished"),
    ]
    assert tracker.threads == {"hwrl tracker mine"}


@pytest.mark.parametrize("fails", ["start", "log", "finish"])
@pytest.mark.parametrize("error", [OSError, SystemExit, KeyboardInterrupt])
def test_an_error_is_logged_once_and_ends_the_tracking_only(fails: str, error: type[BaseException]) -> None:
    tracker, logged = Recorder(fails, lambda: error("no network")), list[str]()
    thread = TrackerThread("mine", lambda: tracker, RUN, log=logged.append)
    for step in range(1, 4):
        thread.log({}, step=step)
    thread.finish("finished")
    (told,) = logged
    assert f"the tracker mine failed ({error.__name__}: no network)" in told
    assert sum(call[0] == fails for call in tracker.calls if isinstance(call, tuple)) == 1


def test_a_tracker_that_hangs_delays_the_end_only_up_to_a_limit() -> None:
    release, logged = threading.Event(), list[str]()

    class Hanging(Recorder):
        def log(self, metrics: Mapping[str, float], *, step: int) -> None:
            release.wait(600)

    thread = TrackerThread("mine", Hanging, RUN, log=logged.append)
    for step in range(20_000):
        thread.log({}, step=step)
    thread.finish("finished", timeout_s=0.2)
    release.set()
    (told,) = logged
    assert "10,000 of its calls are waiting" in told
    slow = TrackerThread("slow", Hanging, RUN, log=logged.append)
    release.clear()
    slow.log({}, step=1)
    slow.finish("finished", timeout_s=0.2)
    release.set()
    assert "the tracker slow failed (it did not finish within 0.2 s)" in logged[-1]


def test_the_report_sends_metrics_and_amendments_and_the_status(tmp_path: Path) -> None:
    tracker = Recorder()
    thread = TrackerThread("mine", lambda: tracker, RUN, log=pytest.fail)
    report = RunReport(tmp_path, log=pytest.fail, trackers=[thread])
    report.add(1, {"reward/mean": 0.5}, prompts=[])
    report.amend({"eval/reward": 0.25})
    report.close("interrupted")
    assert tracker.calls[1:] == [
        ("log", 1, {"reward/mean": 0.5}),
        ("log", 1, {"eval/reward": 0.25}),
        ("finish", "interrupted"),
    ]


def test_the_documented_tracker_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = re.findall(r"^```python\n(.*?)^```", (DOCS / "report.md").read_text(), re.MULTILINE | re.DOTALL)
    assert len(block.splitlines()) <= 30
    (tmp_path / "my_tracker.py").write_text(block)
    monkeypatch.chdir(tmp_path)
    config = configured(tmp_path, "report.trackers=[my_tracker.py:csv_files]", "report.run_name=sorting")
    for resume_step, steps in ((0, (1, 2)), (1, (2, 3))):
        (thread,) = start_trackers(config, resume_step=resume_step, log=pytest.fail)
        for step in steps:
            thread.log({"reward/mean": step / 4}, step=step)
            thread.log({"eval/reward": 1.0}, step=step)
        thread.finish("finished")
    assert (tmp_path / "rewards.csv").read_text().splitlines() == [
        "step,reward of sorting from step 1 on",
        *("1,0.25", "2,0.5"),
        "step,reward of sorting from step 2 on",
        *("2,0.5", "3,0.75"),
    ]


def test_a_run_keeps_its_id_and_another_run_has_another(tmp_path: Path) -> None:
    config = configured(tmp_path)
    first, again = tracked_run(config, resume_step=0), tracked_run(config, resume_step=7)
    assert first.run_id == again.run_id and re.fullmatch("[0-9a-f]{32}", first.run_id)
    assert again.resume_step == 7 and first.name == tmp_path.name and first.config["train"]["steps"] == 100
    (tmp_path / "run_id").unlink()
    assert tracked_run(config, resume_step=0).run_id != first.run_id


@pytest.mark.parametrize(
    ("name", "error", "told"),
    [
        ("tensorbord", ConfigError, "did you mean 'tensorboard'"),
        ("bench", EngineError, "does not have the hook hwrl_tracker"),
        ("nothing.py:there", DataError, "there is no file"),
        ("builtins:dict", EngineError, "not a hwrl.interfaces.Tracker"),
    ],
)
def test_a_tracker_that_cannot_be_made_is_an_error_before_the_run(
    tmp_path: Path, name: str, error: type[Exception], told: str
) -> None:
    config = configured(tmp_path, f"report.trackers=['{name}']")
    with pytest.raises(error, match=told):
        make_tracker(config, config.report.trackers[0])


def test_a_tracker_that_is_gone_after_a_resume_does_not_end_the_run(tmp_path: Path) -> None:
    logged: list[str] = []
    (thread,) = start_trackers(configured(tmp_path, "report.trackers=[gone]"), resume_step=3, log=logged.append)
    thread.log({}, step=4)
    thread.finish("finished")
    assert len(logged) == 1 and "the tracker gone failed (ConfigError" in logged[0]


FAILING = """
import sqlite3
import sys

def database(options):
    sqlite3.connect("/nowhere/metrics.db")

def option(options):
    return options["projct"]

def leaves(options):
    sys.exit(3)
"""


@pytest.mark.parametrize(
    ("function", "told"),
    [("database", "OperationalError: unable to open"), ("option", "KeyError: 'projct'"), ("leaves", "SystemExit: 3")],
)
def test_any_error_of_a_users_tracker_is_told_before_the_run_and_ends_no_run(
    tmp_path: Path, function: str, told: str
) -> None:
    (tmp_path / "mine.py").write_text(FAILING)
    name, logged = f"{tmp_path}/mine.py:{function}", list[str]()
    config = configured(tmp_path, f"report.trackers=['{name}']")
    with pytest.raises(DataError, match=told):
        make_tracker(config, name)
    (thread,) = start_trackers(config, resume_step=3, log=logged.append)
    thread.finish("finished")
    assert len(logged) == 1 and told in logged[0]


@pytest.mark.parametrize("kind", ["damaged", "pipe", "device"])
def test_a_damaged_id_of_the_run_ends_no_run(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "run_id"
    if kind == "damaged":
        file.write_bytes(b"\xff")
    elif kind == "pipe":
        os.mkfifo(file)
    else:
        file.symlink_to("/dev/zero")
    logged: list[str] = []
    config = configured(tmp_path, "report.trackers=[tensorboard,builtins:dict]")
    assert start_trackers(config, resume_step=3, log=logged.append) == []
    assert len(logged) == 1 and "the trackers tensorboard, builtins:dict cannot start" in logged[0]


@pytest.mark.parametrize("calls", [1, 20_000])
def test_after_a_resume_a_tracker_starts_when_the_earlier_one_has_ended(tmp_path: Path, calls: int) -> None:
    release, order, logged = threading.Event(), list[str](), list[str]()

    class Slow(Recorder):
        def log(self, metrics: Mapping[str, float], *, step: int) -> None:
            release.wait(600)

        def finish(self, status: RunStatus) -> None:
            order.append(f"the first {status}")
            raise OSError("no network")

    class Next(Recorder):
        def start(self, run: TrackedRun) -> None:
            order.append("the next starts")

    first = TrackerThread("mine", Slow, RUN, log=logged.append)
    for step in range(calls):
        first.log({}, step=step)
    RunReport(tmp_path, log=pytest.fail, trackers=[first]).close("interrupted", waits=False)
    following = TrackerThread("mine", Next, RUN, log=logged.append, earlier=first)
    assert order == [], "nobody waited for the first"
    release.set()
    following.finish("finished")
    assert order == [*(["the first interrupted"] if calls == 1 else []), "the next starts"]
    assert len(logged) == 1 and ("no network" in logged[0] or "10,000 of its calls" in logged[0])


@pytest.mark.parametrize("hangs", ["log", "finish"])
def test_a_tracker_that_hangs_at_a_resume_is_given_up_and_a_new_one_goes_on(hangs: str) -> None:
    release, following_started = threading.Event(), threading.Event()
    hung, logged = list[threading.Thread](), list[str]()

    class Hanging(Recorder):
        def _note(self, name: str, *what: object) -> None:
            if name == hangs:
                hung.append(threading.current_thread())
                release.wait(600)
            super()._note(name, *what)

    class Next(Recorder):
        def start(self, run: TrackedRun) -> None:
            super().start(run)
            following_started.set()

    first_tracker, next_tracker = Hanging(), Next()
    first = TrackerThread("mine", lambda: first_tracker, RUN, log=logged.append)
    first.log({}, step=1)
    first.begin_finish("interrupted")
    following = TrackerThread("mine", lambda: next_tracker, RUN, log=logged.append, earlier=first, wait_s=0.05)
    started = following_started.wait(200)
    following.log({}, step=2)
    told = list(logged)
    release.set()
    following.finish("finished")
    hung[0].join(600)
    assert started, "the new tracker waited for ever"
    assert len(told) == 1 and "the tracker mine failed (it did not finish within 0.05 s)" in told[0]
    assert logged == told, "told once"
    assert next_tracker.calls == [("start", "sorting"), ("log", 2, {}), ("finish", "finished")]
    assert first_tracker.calls[-1] == (("log", 1, {}) if hangs == "log" else ("finish", "interrupted"))


def test_a_tracker_that_has_ended_is_dropped() -> None:
    class Next(Recorder):
        def __init__(self, started: threading.Event) -> None:
            super().__init__()
            self._started = started

        def start(self, run: TrackedRun) -> None:
            self._started.set()

    current, gone = TrackerThread("mine", Recorder, RUN, log=pytest.fail), list["weakref.ref[TrackerThread]"]()
    for step in range(3):
        current.begin_finish("interrupted")
        gone.append(weakref.ref(current))
        started = threading.Event()
        current = TrackerThread("mine", partial(Next, started), RUN, log=pytest.fail, earlier=current)
        assert started.wait(200)
        current.log({}, step=step)
    assert [ref() for ref in gone] == [None] * 3
    current.finish("finished")


def test_events_are_what_tensorboard_reads_also_after_a_resume(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for resume_step, steps in ((0, range(1, 6)), (3, range(4, 6))):
        thread = TrackerThread(
            "tensorboard",
            TensorboardTracker,
            TrackedRun("0" * 32, "sorting", tmp_path, {}, resume_step),
            log=pytest.fail,
        )
        for step in steps:
            thread.log({"reward/mean": 0.5}, step=step)
        thread.finish("finished")
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward/mean")] == [(n, 0.5) for n in range(1, 6)]


def test_events_that_cannot_be_written_are_an_error_of_their_tracker(tmp_path: Path) -> None:
    tracker = TensorboardTracker()
    tracker.start(TrackedRun("0" * 32, "sorting", tmp_path, {}, 0))
    shutil.rmtree(tmp_path / "tensorboard")
    with pytest.raises(OSError):
        tracker.log({"reward/mean": 0.5}, step=1)
    (tmp_path / "tensorboard").touch()
    with pytest.raises(OSError):
        TensorboardTracker().start(TrackedRun("0" * 32, "sorting", tmp_path, {}, 1))
