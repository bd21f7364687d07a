"""Whole runs of ``hwrl train`` for tests: start one, watch it, kill parts of it, and read its files."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hwrl.models import load_model
from hwrl.rollout.rollouter import SLEEPS_AFTER_S
from hwrl.run.demo import write_demo
from hwrl.run.report import METRICS, read_metrics
from tests.support.speed import slow

HWRL = str(Path(sys.executable).with_name("hwrl"))
_LINE_NBYTES = 16384
"""More than the longest line of metrics."""

SMALL = [
    "train.steps=24",
    "train.batch_groups=4",
    "rollout.n=4",
    "rollout.max_running=16",
    "checkpoint.save_every_steps=5",
    "eval.every_steps=12",
    "eval.prompts=32",
    "goals={}",
    f"timeouts.heartbeat_s={slow(60)}",
    f"weights.timeout_s={slow(60)}",
]
"""A short run: 24 steps with 4 prompts each."""
ADAPTER = "model/adapter_model.safetensors"
LORA = ("model.lora_rank=4", "optimizer.learning_rate=1e-2")
TWO = ("train.ranks=2", "rollout.replicas=2")


class Run:
    """One ``hwrl train`` process and all processes that it starts. A mark in the environment identifies them."""

    def __init__(self, demo: Path, *words: str, log: str = "log", **env: str) -> None:
        self.directory = demo / "run"
        self._mark = f"HWRL_TEST_RUN={uuid.uuid4().hex}"
        name, _, value = self._mark.partition("=")
        self._log = (demo / log).open("a+")
        self.process = subprocess.Popen(
            self.place([HWRL, "train", str(demo / "config.yaml"), *words]),
            env={**os.environ, name: value, **env},
            stdout=self._log,
            stderr=subprocess.STDOUT,
            process_group=0,
        )

    def place(self, command: list[str]) -> list[str]:
        """Return the command that starts ``command`` at the place of the run: by default this machine."""
        return command

    def output(self) -> str:
        self._log.seek(0)
        return self._log.read()

    def wait(self, *, timeout_s: float = 2400.0) -> int:
        return self.process.wait(timeout_s)

    def metrics(self) -> list[dict[str, float]]:
        return read_metrics(self.directory)

    def last_metrics(self) -> dict[str, float]:
        """Return the metrics of the last whole line, or an empty dictionary; reads no other line."""
        with contextlib.suppress(FileNotFoundError), (self.directory / METRICS).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _LINE_NBYTES))
            whole, _, _ = file.read().rpartition(b"\n")
            if whole:
                return dict(json.loads(whole.rpartition(b"\n")[2]))
        return {}

    def wait_for_step(self, step: int, *, timeout_s: float = 2400.0) -> None:
        """Return when ``step`` is in the metrics. Fails if the run ends first."""
        self.wait_until(lambda: self.last_metrics().get("step", -1) >= step, timeout_s, f"step {step}")

    def wait_for_checkpoint(self, step: int, *, timeout_s: float = 2400.0) -> None:
        """Return when the checkpoint of ``step`` is complete. Fails if the run ends first."""
        manifest = self.directory / "checkpoints" / f"global_step_{step}" / "MANIFEST.json"
        self.wait_until(manifest.exists, timeout_s, f"checkpoint of step {step}")

    def wait_for_output(self, text: str, *, timeout_s: float = 1200.0) -> None:
        self.wait_until(lambda: text in self.output(), timeout_s, repr(text))

    def processes(self, title: str) -> list[int]:
        """Return the run's processes with a command line that begins with ``title``."""
        return [pid for pid, command in self.commands() if command.startswith(title)]

    def commands(self) -> list[tuple[int, str]]:
        """Return all of the run's processes with their command lines."""
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and self._mark.encode() in (entry / "environ").read_bytes():
                    command = (entry / "cmdline").read_bytes().replace(b"\0", b" ")
                    found.append((int(entry.name), command.decode(errors="replace").strip()))
            except OSError:  # it has just ended
                continue
        return found

    def kill(self, title: str = "", *, at_most: int | None = None) -> int:
        """Send SIGKILL to the run's processes with ``title``, by default to all; return their number."""
        victims = self.processes(title)[:at_most]
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        return len(victims)

    def signal(self, title: str, number: signal.Signals) -> None:
        """Send a signal to each of the run's processes with ``title``."""
        for pid in self.processes(title):
            os.kill(pid, number)

    def terminate_group(self) -> None:
        """Send SIGTERM to the process and to its group, as coreutils' timeout does."""
        self.process.terminate()
        os.killpg(self.process.pid, signal.SIGTERM)

    def wait_until_all_ended(self, *, timeout_s: float = 600.0) -> None:
        """Return when all processes have ended, also Ray's. Killed processes may need a moment."""
        deadline_s = time.monotonic() + timeout_s
        while left := self.processes(""):
            assert time.monotonic() < deadline_s, f"processes {left} are left:\n{self.output()}"
            time.sleep(0.05)

    def close(self) -> None:
        while self.kill():
            time.sleep(0.05)  # until the kernel has removed them from /proc
        self.process.wait(100)
        self._log.close()

    def wait_until(self, condition: Callable[[], bool], timeout_s: float, event: str) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            assert self.process.poll() is None, f"the run ended before {event}:\n{self.output()}"
            assert time.monotonic() < deadline_s, f"no {event} in {timeout_s} s:\n{self.output()}"
            time.sleep(0.05)


@pytest.fixture
def demo(tmp_path: Path) -> Path:
    write_demo(tmp_path, seed=1, prompts=600)
    return tmp_path


@pytest.fixture
def start(demo: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def begin(*words: str, **env: str) -> Run:
        runs.append(Run(demo, *SMALL, *words, **env))
        return runs[-1]

    yield begin
    for run in runs:
        run.close()


def late_reward(directory: Path) -> str:
    """Return the word for a reward that takes longer than a replica waits before it sleeps, written to a file."""
    module = directory / "late_reward.py"
    module.write_text(
        "import time\n"
        "from hwrl.run.demo import sort_reward\n\n"
        "def late(prompt, response, answer):\n"
        f"    time.sleep({1.5 * SLEEPS_AFTER_S})\n"
        "    return sort_reward(prompt, response, answer)\n"
    )
    return f"reward.function={module}:late"


def trained_prompts(run: Run) -> list[int]:
    lines = (run.directory / "trained_prompts.jsonl").read_text().splitlines()
    return [number for line in lines for number in json.loads(line)["sequence_numbers"]]


def assert_whole(run: Run) -> None:
    """All steps in order, every prompt exactly once. A line of step 0 is that of an evaluation before the training."""
    assert [line["step"] for line in run.metrics() if line["step"]] == list(range(1, 25))
    assert sorted(trained_prompts(run)) == list(range(24 * 4))


def assert_interrupted(run: Run) -> None:
    """It has ended after a signal, in order, with a checkpoint of its last step and without a process left."""
    assert run.wait() == 130, run.output()
    assert "interrupted after step" in run.output() and "Traceback" not in run.output()
    run.wait_until_all_ended()
    last = int(run.metrics()[-1]["step"])
    assert (run.directory / "checkpoints" / f"global_step_{last}" / "MANIFEST.json").exists()


def saved_steps(run: Run) -> list[int]:
    return [int(path.name.rpartition("_")[2]) for path in (run.directory / "checkpoints").glob("global_step_*")]


def change_an_input(run: Run, demo: Path, *, replaced: int = 0) -> None:
    """Change the prompts while the run replaces a process, after ``replaced`` others, and check that it ends."""
    rows = (demo / "train.jsonl").read_text().splitlines()
    (demo / "train.jsonl").write_text("\n".join(reversed(rows)))
    assert run.kill("ray::RolloutActor") == 1
    assert run.wait() == 1, run.output()
    told = run.output().partition("InputChangedError: ")[2]
    assert told.startswith(f"{demo / 'train.jsonl'} changed during the run"), run.output()
    assert run.output().count("a new replica starts") == replaced + 1, "another one would be refused as well"
    assert [line["step"] for line in run.metrics()] == list(range(1, max(saved_steps(run)) + 1))


def base_nbytes(demo: Path) -> int:
    return sum(tensor.nbytes for tensor in load_model(demo / "model", dtype=torch.float32).state_dict().values())


def adapter_nbytes(run: Run) -> int:
    return sum(tensor.nbytes for tensor in load_file(run.directory / ADAPTER).values())


def sent(run: Run, name: str) -> list[float]:
    """Return ``sync/<name>`` of each step."""
    return [line[f"sync/{name}"] for line in run.metrics()]


def assert_adapters_travel(run: Run, lines: list[dict[str, float]], base_nbytes: int) -> None:
    """``lines``, from the first on, have one transfer of the base, and then each version is an adapter."""
    nbytes = adapter_nbytes(run)
    assert [sum(line[f"sync/{name}"] for line in lines) for name in ("base_sent", "base_nbytes")] == [1, base_nbytes]
    assert [line["sync/adapter_nbytes"] for line in lines[1:]] == [nbytes] * len(lines[1:])
    assert [line["sync/nbytes"] for line in lines] == [nbytes] * len(lines)
    assert all(line["sync/receivers"] >= 1 and line["sync/excluded"] == 0 for line in lines)
