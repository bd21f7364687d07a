"""One point of the sweep: a run with its faults, the run that continues it, and the checks on both."""

from __future__ import annotations

import atexit
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import cycle, islice
from pathlib import Path

from transformers.utils import logging

from hwrl.run.demo import write_demo
from hwrl.run.report import read_metrics
from tests.faults.acts import MACHINE_FILE, Scene, build_machine_library, set_machine
from tests.faults.phases import VARIABLE
from tests.faults.points import HEARTBEAT_S, WORDS_OF_PHASES, Injection, Point
from tests.faults.run_checks import FellError, check_accounts, name_end, require, shared_memory
from tests.support.speed import slow
from tests.support.train_run import Run

ROOT = Path(__file__).parents[2]
BATCH, MAX_STALENESS = 2, 1
SETTINGS: dict[str, object] = {
    "goals": "{}",
    "train.batch_groups": BATCH,
    "rollout.n": 2,
    "rollout.max_running": 8,
    "rollout.group_timeout_s": slow(20),
    "async_training.staleness_threshold": MAX_STALENESS,
    "weights.timeout_s": slow(6),
    "checkpoint.save_every_steps": 2,
    "eval.every_steps": 4,
    "eval.prompts": 3,  # rewards.py knows the number
    "reward.timeout_s": slow(5),
    "timeouts.heartbeat_s": HEARTBEAT_S,
    "timeouts.start_s": slow(60),
    "timeouts.trainer_s": slow(60),
    "timeouts.evaluation_s": slow(30),
}
"""The settings of every run."""
SILENCE_S = slow(60.0)
"""The longest time without output of a run. Its slowest silent stage is the start of the processes: 5 s on an idle
machine, 22 s under a load of 8 on two cores.
"""
CONTINUES_S = slow(1200.0)
LEFT_S, LEFT_BY_A_KILL_S = slow(30.0), slow(75.0)
"""Time limits for the end of all processes. Two of Ray's agents notice a killed driver or raylet after a minute."""


@dataclass(frozen=True)
class Verdict:
    """The result of a point. If it ``held``, ``reason`` describes the end of the run."""

    held: bool
    seconds: float
    reason: str
    output: str


def run_point(point: Point) -> Verdict:
    """Run ``point`` in a new directory, and check the result."""
    began_s = time.monotonic()
    # Ray's sockets are in TMPDIR, and the path of a socket has at most 107 characters.
    work = Path(tempfile.mkdtemp(prefix="f"))
    trial = _Trial(point, work)
    try:
        held, reason = True, trial.run()
    except FellError as exc:
        held, reason = False, str(exc)
    except (AssertionError, OSError, ValueError) as exc:  # a victim or a file of the run is missing
        held, reason = False, f"{type(exc).__name__}: {exc}"
    finally:
        output = trial.output()
        trial.close()
    shutil.rmtree(work, ignore_errors=True)
    return Verdict(held, time.monotonic() - began_s, reason, output)


@cache
def _template() -> Path:
    """Write the data and the model once for all points of this process."""
    place = Path(tempfile.mkdtemp(prefix="f"))
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    logging.disable_progress_bar()
    write_demo(place, seed=1, prompts=100, hidden=32, layers=1)
    return place


@cache
def _machine_library() -> Path:
    return build_machine_library(_template())


class _Trial:
    def __init__(self, point: Point, work: Path) -> None:
        self._point, self.work = point, work
        self._runs: list[Run] = []
        self._memory: set[Path] = set()
        self._scene: Scene | None = None
        self.notes: list[str] = []
        self._of_second: dict[Path, bytes] | None = None
        shutil.copytree(_template(), work, dirs_exist_ok=True)
        config = work / "config.yaml"
        config.write_text(config.read_text().replace(str(_template()), str(work)))
        shutil.copy(Path(__file__).with_name("rewards.py"), work / "reward.py")
        (work / "t").mkdir()
        if point.evaluates:
            rows = (work / "eval.jsonl").read_text().splitlines(keepends=True)
            (work / "eval.jsonl").write_text("".join(islice(cycle(rows), 1000)))
        _write_plugin(work / "plugin")

    def run(self) -> str:
        """Return a sentence about the end of the run with the faults. Raises FellError."""
        began_s = time.monotonic()
        first = self._start(self._point.reward, self._point.injections, "log-1", *self._point.words)
        scene = self._scene = Scene(self.work, first, self._run_again)
        watch = _Watch(first, limit_s=self._point.limit_s)
        for number, injection in enumerate(self._point.injections):
            self._wait_for_phase(injection, number, watch)
            self._memory |= shared_memory(first)
            for act in injection.acts:
                act(scene)
            (self.work / f"go-{number}").touch()
        status = watch.wait_for_end()
        ended_s = time.monotonic()
        end = name_end(status, first.output())
        if end not in self._point.ends:
            raise FellError(f"it ended with {end} (status {status}), not with {' or '.join(sorted(self._point.ends))}")
        alone = end == "killed" or bool(self._point.labels & {"raylet", "gcs"})  # then Ray must notice it alone
        sentences = [f"{end} after {ended_s - began_s:.0f} s"]
        if self._of_second is not None:
            require(self._files() == self._of_second, "the old run wrote into the new run's directory")
            require("the path leads to another directory now" in first.output(), "the error does not say what happened")
        if end != "done":
            self._continue(scene)
            if self._of_second is not None:
                require("resumed after step 4" in self._runs[-1].output(), "it did not resume the new run")
                self.notes.append("the new run kept every byte")
            if self._point.saves:
                self._check_saved(first)
            sentences.append(f"continued in {time.monotonic() - ended_s:.0f} s")
        require("; weights travel by " in self._runs[-1].output(), "the log does not say what the run consists of")
        check_accounts(
            self._runs[-1].directory,
            steps=self._point.steps,
            batch=BATCH,
            max_staleness=MAX_STALENESS,
            settled=["sequence_numbers", *(["filtered", "failed"] if self._point.filters else [])],
        )
        if self._point.evaluates:
            self._check_speed()
        sentences += self.notes
        self._check_processes(first, ended_s, limit_s=LEFT_BY_A_KILL_S if alone else LEFT_S)
        sentences.append(f"clean {time.monotonic() - ended_s:.0f} s after the end")
        self._check_processes(self._runs[-1], time.monotonic(), limit_s=LEFT_S)
        self._check_files()
        return ", ".join(sentences)

    def _run_again(self) -> None:
        """Run the point's configuration again, for four steps and without gates, while the first run waits."""
        gates = self.work / "again"
        gates.mkdir()
        shutil.copy(self.work / "eval.jsonl", gates)
        second = self._start("plain", (), "log-again", *self._point.words, "train.steps=4", gates=gates)
        status = _Watch(second, limit_s=CONTINUES_S).wait_for_end()
        require(status == 0, f"the second run ended with status {status}")
        self._of_second = self._files()

    def _files(self) -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in (self.work / "run").rglob("*") if path.is_file()}

    def _check_saved(self, first: Run) -> None:
        """Check that the run saved all steps that its log has, and that its continuation begins after them."""
        saved = re.search(r"then step (\d+) was saved in", first.output())
        require(saved is not None, "the error does not say what was saved")
        assert saved is not None
        require(f"resumed after step {saved[1]}" in self._runs[-1].output(), "it did not resume after the saved step")
        last = max([int(step) for step in re.findall(r"^step (\d+)/", first.output(), re.MULTILINE)], default=0)
        require(int(saved[1]) >= last, f"step {last} was trained, and step {saved[1]} was saved")
        self.notes.append(f"all {saved[1]} steps were saved")

    def _check_speed(self) -> None:
        """Check that steps beside the evaluation take at most 1 / 0.7 of the time of those before it."""
        times = [line["time_s"] for line in read_metrics(self._runs[-1].directory)]
        evaluated = [line["step"] for line in read_metrics(self._runs[-1].directory) if "eval/version" in line]
        first, last = 60, int(evaluated[0])
        require(last - first >= 20, f"the evaluation was over after {last - first} steps: no measurement")
        before = (times[first - 1] - times[9]) / (first - 10)
        beside = (times[last - 1] - times[first - 1]) / (last - first)
        self.notes.append(f"beside the evaluation ({last - first} steps) {before / beside:.2f} of the speed before it")
        require(before / beside >= 0.7, self.notes[-1])

    def output(self) -> str:
        """Return the output of the runs."""
        return "\n".join(run.output() for run in self._runs)

    def close(self) -> None:
        """End all processes of the runs."""
        for run in self._runs:
            run.close()
        if self._scene is not None:
            with suppress(OSError):  # a file is gone; the directory is deleted next
                self._scene.undo_all()

    def _start(
        self, reward: str, injections: tuple[Injection, ...], log: str, *words: str, gates: Path | None = None
    ) -> Run:
        gates = gates or self.work
        (gates / "gates.json").write_text(json.dumps([(each.phase, each.nth) for each in injections]))
        function = f"reward.function={self.work / 'reward.py'}:{reward}"
        path = os.pathsep.join([str(ROOT), str(self.work / "plugin")])
        env = {VARIABLE: str(gates), "PYTHONPATH": path, "HWRL_BACKEND": "gated", "TMPDIR": str(self.work / "t")}
        if self._point.labels & {"clock", "slow-disk"}:
            set_machine(self.work / MACHINE_FILE)
            env |= {"LD_PRELOAD": str(_machine_library()), "HWRL_FAULT_MACHINE": str(self.work / MACHINE_FILE)}
        settings = [f"{key}={value}" for key, value in SETTINGS.items()] + [f"train.steps={self._point.steps}"]
        self._runs.append(Run(self.work, *settings, function, *words, log=log, **env))
        return self._runs[-1]

    def _wait_for_phase(self, injection: Injection, number: int, watch: _Watch) -> None:
        words = WORDS_OF_PHASES.get(injection.phase)
        reached = self.work / f"reached-{number}"
        watch.until(
            lambda: words in watch.run.output() if words else reached.exists(),
            f"it ended before it came to {injection.phase} for the {injection.nth}. time",
        )

    def _continue(self, scene: Scene) -> None:
        """Undo the faults and continue the run, as a user does."""
        scene.undo_all()
        words = [word for word in self._point.words if not word.startswith("reward.")]
        reward = self._point.reward if self._point.filters else "plain"
        again = self._start(reward, (), "log-2", "resume=true", *words)
        status = _Watch(again, limit_s=CONTINUES_S).wait_for_end()
        end = name_end(status, again.output())
        if end != "done":
            raise FellError(f"its continuation ended with {end} (status {status})")

    def _check_processes(self, run: Run, ended_s: float, *, limit_s: float) -> None:
        while left := [command[:120] for _, command in run.commands()]:
            require(time.monotonic() < ended_s + limit_s, f"after {limit_s:g} s processes are left: {left}")
            time.sleep(0.1)

    def _check_files(self) -> None:
        kept = {"ray"} | {name for name in os.listdir(self.work / "t") if name.startswith("torchinductor_")}
        files = sorted(set(os.listdir(self.work / "t")) - kept)
        require(not files, f"left in the directory for temporary files: {files}")
        memory = sorted(str(path) for path in self._memory if path.exists())
        require(not memory, f"left in shared memory: {memory}")


class _Watch:
    """Waits for a run. It must not be silent for SILENCE_S, nor last longer than ``limit_s``."""

    def __init__(self, run: Run, *, limit_s: float) -> None:
        self.run, self._limit_s = run, limit_s
        self._began_s = self._last_output_s = time.monotonic()
        self._output_length = 0

    def until(self, condition: Callable[[], bool], otherwise: str) -> None:
        """Return when ``condition`` holds. Raises FellError with the text ``otherwise`` if the run ends first."""
        while not condition():
            if self.run.process.poll() is not None and not condition():
                raise FellError(f"{otherwise} (status {self.run.process.returncode})")
            self._check_output()
            time.sleep(0.02)

    def wait_for_end(self) -> int:
        """Return the exit status."""
        while (status := self.run.process.poll()) is None:
            self._check_output()
            time.sleep(0.05)
        return status

    def _check_output(self) -> None:
        now_s, length = time.monotonic(), len(self.run.output())
        if length != self._output_length:
            self._output_length, self._last_output_s = length, now_s
        require(now_s - self._last_output_s < SILENCE_S, f"it hung: no output for {SILENCE_S:g} s")
        require(now_s - self._began_s < self._limit_s, f"it was not over after {self._limit_s:g} s")


def _write_plugin(place: Path) -> None:
    """Write the metadata of an installed package, so that ``HWRL_BACKEND=gated`` is known."""
    info = place / "gated-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: gated\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[hwrl.backends]\ngated = tests.faults.gates\n")
