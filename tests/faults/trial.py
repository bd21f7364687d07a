"""One point of the sweep: a run with its faults, the run that continues it, and the judgement on both."""

from __future__ import annotations

import atexit
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from transformers.utils import logging

from hwrl.run.demo import write_demo
from tests.faults.acts import Scene
from tests.faults.gates import VARIABLE
from tests.faults.judgement import FellError, check_accounts, name_end, require, shared_memory
from tests.faults.points import HEARTBEAT_S, WORDS_OF_PHASES, Blow, Point
from tests.support.train_run import Run

ROOT = Path(__file__).parents[2]
STEPS, BATCH, MAX_STALENESS = 6, 2, 1
SETTINGS: dict[str, object] = {
    "goals": "{}",
    "train.steps": STEPS,
    "train.batch_groups": BATCH,
    "rollout.n": 2,
    "rollout.max_running": 8,
    "rollout.group_timeout_s": 20,
    "async_training.staleness_threshold": MAX_STALENESS,
    "weights.timeout_s": 6,
    "checkpoint.save_every_steps": 2,
    "eval.every_steps": 4,
    "eval.prompts": 3,  # rewards.py knows the number
    "reward.timeout_s": 5,
    "timeouts.heartbeat_s": HEARTBEAT_S,
    "timeouts.start_s": 60,
    "timeouts.trainer_s": 60,
    "timeouts.evaluation_s": 30,
}
"""Of every run; a key that this hwrl does not have is left out."""
SILENCE_S = 60.0
"""The longest time without a word from a run. Its slowest silent stage is the start of the processes: 5 s on an idle
machine, 22 s under a load of 8 on two cores.
"""
CONTINUES_S = 120.0
LEFT_S, LEFT_BY_A_KILL_S = 30.0, 75.0
"""How long processes may be left after a run: two of Ray's agents notice a killed driver or raylet after a minute."""


@dataclass(frozen=True)
class Verdict:
    """How a point went; ``reason`` tells the end of a run that held."""

    held: bool
    seconds: float
    reason: str
    output: str


def run_point(point: Point) -> Verdict:
    """Run ``point`` in a directory of its own, and judge."""
    began_s = time.monotonic()
    # Ray's sockets lie in TMPDIR, and a socket's path may have no more than 107 characters.
    work = Path(tempfile.mkdtemp(prefix="f"))
    trial = _Trial(point, work)
    try:
        held, reason = True, trial.run()
    except FellError as exc:
        held, reason = False, str(exc)
    except (AssertionError, OSError, ValueError) as exc:  # a victim or a file of the run is not there
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


class _Trial:
    def __init__(self, point: Point, work: Path) -> None:
        self._point, self.work = point, work
        self._runs: list[Run] = []
        self._memory: set[Path] = set()
        shutil.copytree(_template(), work, dirs_exist_ok=True)
        config = work / "config.yaml"
        config.write_text(config.read_text().replace(str(_template()), str(work)))
        shutil.copy(Path(__file__).with_name("rewards.py"), work / "reward.py")
        (work / "t").mkdir()
        _write_plugin(work / "plugin")

    def run(self) -> str:
        """Return how the run with the faults ended; raises FellError."""
        began_s = time.monotonic()
        first = self._start(self._point.reward, self._point.blows, "log-1", *self._point.words)
        scene = Scene(self.work, first)
        watch = _Watch(first, limit_s=self._point.limit_s)
        for number, blow in enumerate(self._point.blows):
            self._await_phase(blow, number, watch)
            self._memory |= shared_memory(first)
            for act in blow.acts:
                act(scene)
            (self.work / f"go-{number}").touch()
        status = watch.await_end()
        ended_s = time.monotonic()
        end = name_end(status, first.output())
        if end not in self._point.ends:
            raise FellError(f"it ended with {end} (status {status}), not with {' or '.join(sorted(self._point.ends))}")
        alone = end == "killed" or bool(self._point.labels & {"raylet", "gcs"})  # so Ray must notice by itself
        told = [f"{end} after {ended_s - began_s:.0f} s"]
        if end != "done":
            self._continue(scene)
            told.append(f"continued in {time.monotonic() - ended_s:.0f} s")
        check_accounts(self._runs[-1].directory, steps=STEPS, batch=BATCH, max_staleness=MAX_STALENESS)
        self._check_processes(first, ended_s, patience_s=LEFT_BY_A_KILL_S if alone else LEFT_S)
        told.append(f"clean {time.monotonic() - ended_s:.0f} s after the end")
        self._check_processes(self._runs[-1], time.monotonic(), patience_s=LEFT_S)
        self._check_files()
        return ", ".join(told)

    def output(self) -> str:
        """Return what the runs have said."""
        return "\n".join(run.output() for run in self._runs)

    def close(self) -> None:
        """End what is left of the runs."""
        for run in self._runs:
            run.close()

    def _start(self, reward: str, blows: tuple[Blow, ...], log: str, *words: str) -> Run:
        gates = [(blow.phase, blow.nth) for blow in blows]
        (self.work / "gates.json").write_text(json.dumps(gates))
        function = f"reward.function={self.work / 'reward.py'}:{reward}"
        path = os.pathsep.join([str(ROOT), str(self.work / "plugin")])
        env = {VARIABLE: str(self.work), "PYTHONPATH": path, "HWRL_BACKEND": "gated", "TMPDIR": str(self.work / "t")}
        self._runs.append(
            Run(self.work, *(f"{key}={value}" for key, value in SETTINGS.items()), function, *words, log=log, **env)
        )
        return self._runs[-1]

    def _await_phase(self, blow: Blow, number: int, watch: _Watch) -> None:
        words = WORDS_OF_PHASES.get(blow.phase)
        reached = self.work / f"reached-{number}"
        watch.until(
            lambda: words in watch.run.output() if words else reached.exists(),
            f"it ended before it came to {blow.phase} for the {blow.nth}. time",
        )

    def _continue(self, scene: Scene) -> None:
        """Undo the faults and continue the run, as a user does."""
        for undo in reversed(scene.undo):
            undo()
        words = [word for word in self._point.words if not word.startswith("reward.")]
        again = self._start("plain", (), "log-2", "resume=true", *words)
        status = _Watch(again, limit_s=CONTINUES_S).await_end()
        end = name_end(status, again.output())
        if end != "done":
            raise FellError(f"its continuation ended with {end} (status {status})")

    def _check_processes(self, run: Run, ended_s: float, *, patience_s: float) -> None:
        while left := [command[:120] for _, command in run.commands()]:
            require(time.monotonic() < ended_s + patience_s, f"after {patience_s:g} s processes are left: {left}")
            time.sleep(0.1)

    def _check_files(self) -> None:
        kept = {"ray"} | {name for name in os.listdir(self.work / "t") if name.startswith("torchinductor_")}
        files = sorted(set(os.listdir(self.work / "t")) - kept)
        require(not files, f"left in the directory for temporary files: {files}")
        memory = sorted(str(path) for path in self._memory if path.exists())
        require(not memory, f"left in shared memory: {memory}")


class _Watch:
    """Waits for a run, which may neither be silent for SILENCE_S nor last longer than ``limit_s``."""

    def __init__(self, run: Run, *, limit_s: float) -> None:
        self.run, self._limit_s = run, limit_s
        self._began_s = self._heard_s = time.monotonic()
        self._said = 0

    def until(self, condition: Callable[[], bool], otherwise: str) -> None:
        """Return when ``condition`` holds; FellError with ``otherwise`` if the run ends first."""
        while not condition():
            if self.run.process.poll() is not None and not condition():
                raise FellError(f"{otherwise} (status {self.run.process.returncode})")
            self._listen()
            time.sleep(0.02)

    def await_end(self) -> int:
        """Return the exit status."""
        while (status := self.run.process.poll()) is None:
            self._listen()
            time.sleep(0.05)
        return status

    def _listen(self) -> None:
        now_s, said = time.monotonic(), len(self.run.output())
        if said != self._said:
            self._said, self._heard_s = said, now_s
        require(now_s - self._heard_s < SILENCE_S, f"it hung: not a word for {SILENCE_S:g} s")
        require(now_s - self._began_s < self._limit_s, f"it was not over after {self._limit_s:g} s")


def _write_plugin(place: Path) -> None:
    """Write what makes ``HWRL_BACKEND=gated`` known, as an installed package does."""
    info = place / "gated-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: gated\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[hwrl.backends]\ngated = tests.faults.gates\n")
