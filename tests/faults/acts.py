"""The faults: signals to a run's processes, limits on them, and changes of their files."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from tests.support.train_run import Run

MACHINE_FILE = "machine"
"""The file that ``machine.c`` maps, in the directory of the run's inputs."""
MEMORY_GROUPS = Path("/sys/fs/cgroup/memory")
"""The control groups for memory, version 1."""
VICTIMS: dict[str, tuple[str, ...]] = {
    "trainer": ("ray::TrainActor",),
    "replica": ("ray::RolloutActor",),
    "ledger": ("ray::LedgerActor",),
    "reward-workers": ("hwrl.rollout.reward_process",),
    "raylet": ("/raylet/raylet ",),
    "gcs": ("/gcs/gcs_server ",),
    "agent": ("/dashboard/agent.py ", "ray::DashboardAgent"),
    "env-agent": ("/runtime_env/agent/main.py ", "ray::RuntimeEnvAgent"),
    "everything": ("",),
}
"""Parts of the command lines of each victim's processes. The driver is the process that the sweep started."""


@dataclass
class Scene:
    """A run and its files: configuration, data, model and reward in ``work``, the results in ``work/run``."""

    work: Path
    run: Run
    run_again: Callable[[], None]
    """Runs the same configuration again, to its end."""
    undo: list[Callable[[], None]] = field(default_factory=list)

    def find(self, victim: str) -> list[int]:
        """Return the process ids of ``victim``. Fails if there are none."""
        if victim == "driver":
            return [self.run.process.pid]
        pids = [pid for pid, command in self.run.commands() if any(part in command for part in VICTIMS[victim])]
        assert pids, f"the run has no {victim}"
        return sorted(pids)

    def undo_all(self) -> None:
        """Undo the faults that can be undone, the last one first."""
        while self.undo:
            self.undo.pop()()

    def put_aside(self, name: str) -> Path:
        """Move ``work/name`` away until the faults are undone; return its old path."""
        path, aside = self.work / name, self.work / f"aside-{len(self.undo)}"
        path.rename(aside)
        self.undo.append(lambda: _restore(aside, path))
        return path


def _restore(aside: Path, path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    aside.rename(path)


@dataclass(frozen=True)
class Send:
    """Send the signal ``name`` to the processes of ``victim``, to ``at_most`` of them."""

    name: str
    victim: str
    at_most: int | None = None

    @property
    def kind(self) -> str:
        return self.name.lower()

    def __call__(self, scene: Scene) -> None:
        for pid in scene.find(self.victim)[: self.at_most]:
            with suppress(ProcessLookupError):  # it ended together with the one before
                os.kill(pid, signal.Signals[f"SIG{self.name}"])


@dataclass(frozen=True)
class Freeze:
    """Stop the processes of ``victim`` for ``for_s`` seconds, or for ever."""

    victim: str
    for_s: float | None = None

    @property
    def kind(self) -> str:
        return "freeze" if self.for_s is None else "pause"

    def __call__(self, scene: Scene) -> None:
        Send("STOP", self.victim)(scene)
        if self.for_s is not None:
            wake = threading.Timer(self.for_s, _wake, [scene.find(self.victim)])
            wake.daemon = True
            wake.start()


def _wake(pids: list[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):  # the run has ended it
            os.kill(pid, signal.SIGCONT)


@dataclass(frozen=True)
class TerminateGroup:
    """SIGTERM to the driver and to its process group, as coreutils' timeout does."""

    victim: ClassVar[str] = "driver"
    kind: ClassVar[str] = "term"

    def __call__(self, scene: Scene) -> None:
        scene.run.terminate_group()


@dataclass(frozen=True)
class Limit:
    """Lower a soft limit of the processes of ``victim``: ``resource`` is FSIZE or NOFILE."""

    victim: str
    resource: str
    value: int
    kind: ClassVar[str] = "limit"

    def __call__(self, scene: Scene) -> None:
        number = getattr(resource, f"RLIMIT_{self.resource}")
        for pid in scene.find(self.victim):
            hard = resource.prlimit(pid, number)[1]
            resource.prlimit(pid, number, (self.value, hard))


@dataclass(frozen=True)
class FileFault:
    """A change of the file or directory ``name`` in the directory of the run's inputs."""

    name: str
    kind: ClassVar[str] = "disk"
    victim: ClassVar[str] = "files"


@dataclass(frozen=True)
class Replace(FileFault):
    """Replace it by nothing, by a directory, by a file or by a full device."""

    by: str = "nothing"

    def __call__(self, scene: Scene) -> None:
        path = scene.put_aside(self.name)
        if self.by == "directory":
            path.mkdir()
        elif self.by == "file":
            path.write_text("something else\n")
        elif self.by == "full":
            path.symlink_to("/dev/full")


@dataclass(frozen=True)
class Lose(FileFault):
    """Delete the directory for good, or rename it; then perhaps run the same configuration ``again``, to its end."""

    renames: bool = False
    again: bool = False

    @property
    def kind(self) -> str:  # type: ignore[override]  # a property for two kinds
        return "second-run" if self.again else "disk"

    def __call__(self, scene: Scene) -> None:
        elsewhere = (scene.work / self.name).rename(scene.work / "elsewhere")
        if not self.renames:
            shutil.rmtree(elsewhere)
        if self.again:
            scene.run_again()


@dataclass(frozen=True)
class Protect(FileFault):
    """Make the directory read-only. Root may still write."""

    def __call__(self, scene: Scene) -> None:
        path = scene.work / self.name
        path.chmod(0o555)
        scene.undo.append(lambda: path.chmod(0o755))


@dataclass(frozen=True)
class Edit(FileFault):
    """Change its content: rows in reverse order, other weights, another reward."""

    kind: ClassVar[str] = "edit"

    def __call__(self, scene: Scene) -> None:
        path = scene.put_aside(self.name)
        content = (scene.work / f"aside-{len(scene.undo) - 1}").read_bytes()
        if path.suffix == ".jsonl":
            path.write_bytes(b"".join(content.splitlines(keepends=True)[::-1]))
        elif path.suffix == ".safetensors":
            path.write_bytes(content[:-64] + bytes(64))
        else:
            path.write_bytes(content.replace(b"return sort_reward(", b"return 1.0 or sort_reward("))


@dataclass(frozen=True)
class DisturbMachine:
    """Add ``clock_s`` to the clock of the day of all processes, and ``sync_s`` to the time of each fsync."""

    clock_s: float = 0.0
    sync_s: float = 0.0
    victim: ClassVar[str] = "machine"

    @property
    def kind(self) -> str:
        return "clock" if self.clock_s else "slow-disk"

    def __call__(self, scene: Scene) -> None:
        set_machine(scene.work / MACHINE_FILE, clock_s=self.clock_s, sync_s=self.sync_s)


def set_machine(path: Path, *, clock_s: float = 0.0, sync_s: float = 0.0) -> None:
    """Write the file that ``machine.c`` reads. Processes have it mapped, so an existing file keeps its place."""
    path.touch()
    with path.open("r+b") as file:
        file.write(struct.pack("qq", int(clock_s * 1e9), int(sync_s * 1e9)))


def build_machine_library(place: Path) -> Path:
    """Build ``machine.c`` in ``place``; return the library. Raises OSError without a working compiler."""
    built, source = place / "machine.so", Path(__file__).with_name("machine.c")
    done = subprocess.run(
        ["cc", "-shared", "-fPIC", "-O1", "-o", built, source, "-ldl"], capture_output=True, text=True
    )
    if done.returncode:
        raise OSError(f"machine.c cannot be built: {done.stderr}")
    return built


@dataclass(frozen=True)
class Starve:
    """Give the next memory of ``victim`` a limit of ``nbytes``: the kernel kills the process that needs more."""

    victim: str
    nbytes: int = 1 << 20
    kind: ClassVar[str] = "out-of-memory"

    def __call__(self, scene: Scene) -> None:
        scene.undo.append(starve(f"hwrl-{scene.work.name}", scene.find(self.victim), nbytes=self.nbytes))


def starve(name: str, pids: Sequence[int], *, nbytes: int) -> Callable[[], None]:
    """Put ``pids`` into the new control group ``name``, with ``nbytes`` of further memory; return what removes it.

    Raises OSError if that is not permitted, or the kernel has other groups.
    """
    group = MEMORY_GROUPS / name
    group.mkdir()
    (group / "memory.limit_in_bytes").write_text(str(nbytes))
    for pid in pids:
        with suppress(ProcessLookupError):  # it has just ended
            (group / "cgroup.procs").write_text(str(pid))
    return lambda: _remove_group(group)


def _remove_group(group: Path) -> None:
    deadline_s = time.monotonic() + 100.0
    while group.exists() and time.monotonic() < deadline_s:
        for pid in (group / "cgroup.procs").read_text().split():
            with suppress(OSError):  # it has ended
                (MEMORY_GROUPS / "cgroup.procs").write_text(pid)  # it needed no more memory
        try:
            group.rmdir()
        except OSError:  # a killed process is still ending
            time.sleep(0.1)


Act = DisturbMachine | Starve | Send | Freeze | TerminateGroup | Limit | Replace | Lose | Protect | Edit
