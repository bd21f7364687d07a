"""One ``hwrl train`` process and all that it starts: watched, hurt and cleaned up by tests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from hwrl.run.report import read_metrics

HWRL = str(Path(sys.executable).with_name("hwrl"))


class Run:
    """One ``hwrl train`` process and everything that it starts, found again by a mark in the environment."""

    def __init__(self, demo: Path, *words: str, log: str = "log", **env: str) -> None:
        self.directory = demo / "run"
        self._mark = f"HWRL_TEST_RUN={uuid.uuid4().hex}"
        name, _, value = self._mark.partition("=")
        self._log = (demo / log).open("a+")
        self.process = subprocess.Popen(
            [HWRL, "train", str(demo / "config.yaml"), *words],
            env={**os.environ, name: value, **env},
            stdout=self._log,
            stderr=subprocess.STDOUT,
            process_group=0,
        )

    def output(self) -> str:
        self._log.seek(0)
        return self._log.read()

    def wait(self, *, timeout_s: float = 240.0) -> int:
        return self.process.wait(timeout_s)

    def metrics(self) -> list[dict[str, float]]:
        return read_metrics(self.directory)

    def await_step(self, step: int, *, timeout_s: float = 240.0) -> None:
        """Return when ``step`` is in the metrics; fail if the run ends first."""
        self._await(lambda: bool(self.metrics()) and self.metrics()[-1]["step"] >= step, timeout_s, f"step {step}")

    def await_output(self, text: str, *, timeout_s: float = 120.0) -> None:
        self._await(lambda: text in self.output(), timeout_s, repr(text))

    def processes(self, title: str) -> list[int]:
        """Return the run's processes whose command line begins with ``title``."""
        return [pid for pid, command in self.commands() if command.startswith(title)]

    def commands(self) -> list[tuple[int, str]]:
        """Return all of the run's processes with their command lines."""
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and self._mark.encode() in (entry / "environ").read_bytes():
                    command = (entry / "cmdline").read_bytes().replace(b"\0", b" ")
                    found.append((int(entry.name), command.decode(errors="replace").strip()))
            except OSError:  # it ended while we looked
                continue
        return found

    def kill(self, title: str = "", *, at_most: int | None = None) -> int:
        """SIGKILL the run's processes with ``title`` (all of them by default); return how many."""
        victims = self.processes(title)[:at_most]
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        return len(victims)

    def signal(self, title: str, number: signal.Signals) -> None:
        """Send a signal to each of the run's processes with ``title``."""
        for pid in self.processes(title):
            os.kill(pid, number)

    def terminate_group(self) -> None:
        """Do what coreutils' timeout does: SIGTERM to the process that it started, and to the process group."""
        self.process.terminate()
        os.killpg(self.process.pid, signal.SIGTERM)

    def await_nothing_left(self, *, timeout_s: float = 30.0) -> None:
        """Return when none of its processes is there, Ray's included; those that Ray has killed may need a moment."""
        deadline_s = time.monotonic() + timeout_s
        while left := self.processes(""):
            assert time.monotonic() < deadline_s, f"processes {left} are left:\n{self.output()}"
            time.sleep(0.05)

    def close(self) -> None:
        while self.kill():
            time.sleep(0.05)  # the kernel needs a moment to take them out of /proc
        self.process.wait(10)
        self._log.close()

    def _await(self, condition: Callable[[], bool], timeout_s: float, what: str) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            assert self.process.poll() is None, f"the run ended before {what}:\n{self.output()}"
            assert time.monotonic() < deadline_s, f"no {what} in {timeout_s} s:\n{self.output()}"
            time.sleep(0.05)
