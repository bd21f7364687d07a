"""The crash matrix: it injects a fault at every change of the disk, and checks the promises after each.

A *life* is one run of a job: its ranks open the directory, resume, save and end. A *point* is a fault in one life, and
perhaps another in the recovering life; a life without faults comes last. Every life is a group of processes forked
from this one. This one has imported everything and started no thread, so a life costs milliseconds.
"""

from __future__ import annotations

import gc
import os
import random
import shutil
import signal
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

from tests.crash.disk import KILLS, KINDS, Fault, Kind, Operation, WatchedDisk, read_trace
from tests.support.speed import slow

LIFE_LIMIT_S = 1200.0
TIMEOUT_S, PATIENT_TIMEOUT_S, NOTICE_S = slow(1.0), slow(20.0), slow(5.0)
"""Timeout of survivors for a missing rank, the same on a busy machine, and the time for them to report it."""


class Session(ABC):
    """One rank's part in one life."""

    @abstractmethod
    def save(self, step: int) -> None:
        """Save a payload full of ``step``; return when the caller may rely on it."""

    @abstractmethod
    def resume(self) -> int | None:
        """Load like a new job; return the step in all of the payload, or None for a fresh start.

        Raises if the payload cannot be loaded, or has different steps.
        """


class Subject(ABC):
    """A way to keep checkpoints, for the matrix: ``ranks`` processes make the same calls of their sessions.

    ``name`` is unique, without colons. ``keep`` steps are kept. ``errors`` are the classes of errors after a fault of
    the disk or the loss of a rank.
    """

    name: str
    ranks = 1
    keep = 1
    errors: tuple[type[Exception], ...] = (OSError,)

    @abstractmethod
    def open(self, home: Path, *, rank: int, life: str, timeout_s: float) -> AbstractContextManager[Session]:
        """Begin a life on ``home``. Its ranks, and no others, share the name ``life``; they miss each other after
        ``timeout_s``.
        """

    def denies(self, step: int, exc: Exception) -> bool:
        """Return whether ``exc``, an error from saving ``step``, denies the save for sure."""
        return False

    @abstractmethod
    def steps(self, home: Path) -> list[int]:
        """Return the complete steps for a reader of ``home``; raise if ``home`` misleads the reader."""

    @abstractmethod
    def leftovers(self, home: Path) -> list[str]:
        """Return the leftovers in ``home`` after a life without faults."""


@dataclass(frozen=True)
class Point:
    """``first`` is a fault of rank ``victim`` of the subject; ``second``, if any, one of rank 0 in the next life."""

    subject: str
    victim: int
    first: Fault
    second: Fault | None = None

    def __str__(self) -> str:
        faults = [self.first, *([self.second] if self.second else [])]
        return ":".join([self.subject, str(self.victim), *map(str, faults)])

    @classmethod
    def parse(cls, text: str) -> Point:
        """Parse a point: ``fsdp2-2-async-keep1:0:kill-job@17:full@5``."""
        subject, victim, *faults = text.split(":")
        return cls(subject, int(victim), *map(Fault.parse, faults))


@dataclass(frozen=True)
class Result:
    """The result of a point: the number of faults met, and the broken promises."""

    met: int
    broken: list[str]


class Matrix:
    """Runs points, in ``work``: an empty directory, best in memory, since the loss by a kill depends on no disk.

    Forked processes may run points at the same time. ``operations`` has the changes of each rank in a life without
    faults, in order, by subject and rank.
    """

    def __init__(self, subjects: Sequence[Subject], work: Path) -> None:
        self._subjects, self._work = {subject.name: subject for subject in subjects}, work.resolve()
        self._lives = 0
        self._templates = {subject.name: self._template(subject) for subject in subjects}
        self.operations = {
            (subject.name, victim): self._find_operations(subject, victim)
            for subject in subjects
            for victim in range(subject.ranks)
        }

    # -- points -------------------------------------------------------------------------------------------------

    def every_point(self, *, kinds: Sequence[Kind] = KINDS) -> Iterator[Point]:
        """Yield each kind of fault at each change of each rank, in a life with one save."""
        for (name, victim), operations in self.operations.items():
            for at, operation in enumerate(operations):
                for kind in kinds:
                    alone = self._subjects[name].ranks == 1
                    if (kind == "short" and operation.name != "write") or (kind == "frozen" and alone):
                        continue
                    yield Point(name, victim, Fault(kind, at))
                    if kind in KILLS and not alone:
                        yield Point(name, victim, Fault(kind, at, whole_job=True))

    def random_points(self, points: Sequence[Point], *, seed: int) -> Iterator[Point]:
        """Yield points for ever: one of ``points``, and a second fault in the recovering life."""
        chance = random.Random(seed)
        while True:
            point = chance.choice(points)
            kind, at = (
                chance.choice([kind for kind in KINDS if kind != "frozen"]),
                chance.randrange(len(self.operations[point.subject, 0])),
            )
            yield replace(point, second=Fault(kind, at, whole_job=kind in KILLS))

    def _find_operations(self, subject: Subject, victim: int) -> list[Operation]:
        """Return the changes by ``victim`` in a life without faults, in order."""
        home, trace = self._fresh(subject), self._work / "trace"
        trace.unlink(missing_ok=True)
        disk = WatchedDisk(home)
        complaints = _Life(subject, home, self._name(), steps=[10], victim=victim, disk=disk, trace=trace).run()
        assert not complaints, complaints
        assert disk.escapes == 0, "the directory is changed in a way that the matrix cannot meet"
        return read_trace(trace)

    # -- one point ----------------------------------------------------------------------------------------------

    def run(self, point: Point) -> Result:
        """Let the faults of ``point`` happen, and look at all promises."""
        result = self._run(point, timeout_s=TIMEOUT_S)
        if result.met == 0:  # on a busy machine a rank may be given up before its fault
            result = self._run(point, timeout_s=PATIENT_TIMEOUT_S)
        return result

    def _run(self, point: Point, *, timeout_s: float) -> Result:
        subject = self._subjects[point.subject]
        home = self._fresh(subject)
        acknowledged = attempted = set(range(1, subject.keep + 1))  # the steps of the template
        faults = [point.first, *([point.second] if point.second else []), None]
        met = 0
        for number, fault in enumerate(faults, start=1):
            disk, victim = WatchedDisk(home), point.victim if number == 1 else 0
            life = _Life(
                subject,
                home,
                self._name(),
                steps=[10 * number],
                acknowledged=acknowledged,
                timeout_s=timeout_s,
                resumes=number > 1,
                victim=victim,
                disk=disk,
                fault=fault,
            )
            complaints = life.run()
            attempted = attempted | {10 * number, 10 * number + 1}
            complaints += _check_resumed(life, acknowledged, attempted)
            acknowledged = acknowledged | life.saved
            complaints += _check_disk(subject, home, acknowledged, life.denied)
            met += disk.fired
            if fault is point.first and not disk.fired:
                complaints.append("the fault was not met")
            if complaints:
                return Result(met, [f"life {number}: {complaint}" for complaint in complaints])
        return Result(met, [f"left over: {name}" for name in subject.leftovers(home)])

    def _template(self, subject: Subject) -> Path:
        home = self._work / f"template-{subject.name}"
        home.mkdir()
        complaints = _Life(subject, home, self._name(), steps=list(range(1, subject.keep + 1))).run()
        assert not complaints, complaints
        return home

    def _fresh(self, subject: Subject) -> Path:
        home = self._work / f"home-{os.getpid()}"
        shutil.rmtree(home, ignore_errors=True)
        shutil.copytree(self._templates[subject.name], home, symlinks=True)
        return home

    def _name(self) -> str:
        self._lives += 1
        return f"{self._work.name}-{os.getpid()}-{self._lives}"


class _Life:
    """The processes of one life, and their reports."""

    def __init__(
        self,
        subject: Subject,
        home: Path,
        name: str,
        *,
        steps: list[int],
        acknowledged: Collection[int] = (),
        timeout_s: float = TIMEOUT_S,
        resumes: bool = False,
        victim: int = 0,
        disk: WatchedDisk | None = None,
        fault: Fault | None = None,
        trace: Path | None = None,
    ) -> None:
        self._subject, self._home, self._name = subject, home, name
        self._steps, self._acknowledged, self._resumes = steps, acknowledged, resumes
        self._timeout_s = timeout_s
        self._victim, self._disk, self._fault, self._trace = victim, disk, fault, trace
        self.resumed: list[int | None] = []
        self.saved: set[int] = set()
        self.denied: set[int] = set()

    def run(self) -> list[str]:
        """Live; return complaints."""
        children: dict[int, int] = {}
        pipes: dict[Connection, int] = {}
        for rank in range(self._subject.ranks):
            mine, theirs = Pipe(duplex=False)
            if (child := os.fork()) == 0:
                _be_rank(self, rank, leader=children.get(0, 0), reports=theirs)
            os.setpgid(child, children.get(0, child))
            theirs.close()
            children[rank], pipes[mine] = child, rank
        reports, in_time = self._collect(pipes, children)
        if not in_time:
            os.killpg(children[0], signal.SIGKILL)
        statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children.values()]
        orphans = _end_group(children[0])
        return self._judge(reports, statuses) + ["it hung"] * (not in_time) + ["it left a process"] * orphans

    def _collect(
        self, pipes: dict[Connection, int], children: dict[int, int]
    ) -> tuple[list[tuple[int, dict[str, Any]]], bool]:
        """Return the ranks' reports, and whether all ended in time. A frozen rank is resumed when it is missed."""
        reports: list[tuple[int, dict[str, Any]]] = []
        deadline_s = time.monotonic() + LIFE_LIMIT_S
        while pipes:
            ready = wait(list(pipes), max(0.0, deadline_s - time.monotonic()))
            if not ready:
                return reports, False
            for pipe in ready:
                assert isinstance(pipe, Connection), "nothing else was waited for"
                rank, report = pipes[pipe], _receive(pipe)
                if report is None:
                    del pipes[pipe]
                else:
                    reports.append((rank, report))
                if self._freezes() and rank != self._victim and (report is None or "failed" in report):
                    os.kill(children[self._victim], signal.SIGCONT)
        return reports, True

    def _judge(self, reports: list[tuple[int, dict[str, Any]]], statuses: list[int]) -> list[str]:
        complaints = [f"rank {rank}: {report['complaint']}" for rank, report in reports if "complaint" in report]
        self.resumed = [report["resumed"] for _, report in reports if "resumed" in report]
        self.saved = {int(report["saved"]) for _, report in reports if "saved" in report}
        self.denied = {step for _, report in reports for step in report.get("denied", ())}
        for rank, status in enumerate(statuses):
            expected = (0, -signal.SIGKILL) if self._may_die(rank) else (0,)
            if status not in expected:
                complaints.append(f"rank {rank} ended with status {status}")
        return complaints

    def _may_die(self, rank: int) -> bool:
        fault = self._fault
        return fault is not None and fault.kills and (rank == self._victim or fault.whole_job)

    def _freezes(self) -> bool:
        return self._fault is not None and self._fault.kind == "frozen"

    def _loses_a_rank(self) -> bool:
        return self._freezes() or (self._fault is not None and self._fault.kills and not self._fault.whole_job)

    # -- in the children ----------------------------------------------------------------------------------------

    def play(self, rank: int, reports: Connection) -> None:
        """Be ``rank``: open, resume, save, end; after a failure once more, on a good disk."""
        if self._disk is not None and rank == self._victim:
            self._disk.enter(trace=self._trace)
            self._disk.arm(self._fault)
        self._began_s = time.monotonic()
        try:
            with self._open(rank, "first") as session:
                if self._resumes:
                    reports.send({"resumed": session.resume()})
                self._save(rank, session, self._steps, reports)
        except self._subject.errors as exc:
            self._note(exc, reports)
            if self._mended():
                with self._open(rank, "second") as session:
                    self._save(rank, session, [self._steps[-1] + 1], reports)

    def _open(self, rank: int, attempt: str) -> AbstractContextManager[Session]:
        timeout_s = self._timeout_s if self._loses_a_rank() else LIFE_LIMIT_S
        return self._subject.open(self._home, rank=rank, life=f"{self._name}/{attempt}", timeout_s=timeout_s)

    def _save(self, rank: int, session: Session, steps: list[int], reports: Connection) -> None:
        for step in steps:
            self._began_s = time.monotonic()
            try:
                session.save(step)
                reports.send({"saved": step})
            except self._subject.errors as exc:
                self._note(exc, reports)
                denied = {step} if self._subject.denies(step, exc) else set()
                reports.send({"denied": denied})
                if self._mended():
                    if rank == self._victim:
                        for complaint in _check_disk(self._subject, self._home, self._acknowledged, denied):
                            reports.send({"complaint": f"before the next save, {complaint}"})
                    session.save(step + 1)
                    reports.send({"saved": step + 1})
        if self._fault is None and session.resume() != steps[-1]:
            reports.send({"complaint": "the step that was just saved is not found"})

    def _note(self, exc: Exception, reports: Connection) -> None:
        reports.send({"failed": str(exc)})
        late_s = time.monotonic() - self._began_s - self._timeout_s
        if self._fault is None:
            reports.send({"complaint": f"it failed without a fault: {exc}"})
        elif late_s > NOTICE_S and self._loses_a_rank():
            reports.send({"complaint": f"told {late_s:.1f} s after the deadline: {exc}"})

    def _mended(self) -> bool:
        """End the fault; return whether all ranks are still there to go on."""
        if self._disk is None or self._fault is None or self._fault.kills:
            return False
        self._disk.disarm()
        return True


def _be_rank(life: _Life, rank: int, *, leader: int, reports: Connection) -> None:
    status = 1
    gc.freeze()  # the collector would copy the memory of all inherited objects
    try:
        os.setpgid(0, leader)
        life.play(rank, reports)
        status = 0
    except BaseException:  # noqa: BLE001 - nothing may escape into the parent's code: this process is a copy of it
        reports.send({"complaint": traceback.format_exc()})
    finally:
        os._exit(status)


def _receive(pipe: Connection) -> dict[str, Any] | None:
    """Return the next report; None, and close ``pipe``, if its process ended, perhaps in the middle of one."""
    try:
        report: dict[str, Any] = pipe.recv()
    except (EOFError, OSError):
        pipe.close()
        return None
    return report


def _end_group(leader: int) -> bool:
    """Kill the rest of a process group after its known members have ended; return whether there was any."""
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def _check_resumed(life: _Life, acknowledged: set[int], attempted: set[int]) -> list[str]:
    newest = max(acknowledged)
    wrong = [step for step in life.resumed if step is None or step < newest or step not in attempted]
    if wrong or len(set(life.resumed)) > 1:
        return [f"the ranks resumed from {life.resumed}, and {newest} was acknowledged"]
    return []


def _check_disk(subject: Subject, home: Path, acknowledged: Collection[int], denied: Collection[int]) -> list[str]:
    try:
        complete = set(subject.steps(home))
    except Exception as exc:  # noqa: BLE001 - whatever a reader runs into is the finding
        return [f"a reader is misled: {type(exc).__name__}: {exc}"]
    lost = set(sorted(complete.union(acknowledged))[-subject.keep :]) - complete
    complaints = [f"lost: {sorted(lost)}; there is {sorted(complete)}"] if lost else []
    if complete.intersection(denied):
        complaints.append(f"it was said that {sorted(denied)} was not saved; there is {sorted(complete)}")
    return complaints
