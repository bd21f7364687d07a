"""What a person sees of a run: the metrics file, TensorBoard events, the reward curve, the live view, the summary."""

from __future__ import annotations

import itertools
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from hwrl.errors import RunDirectoryError, attempt_all
from hwrl.run.events import AppendedFile, EventFile

METRICS = "metrics.jsonl"
PROMPTS = "trained_prompts.jsonl"
CURVE = "reward.png"

Figures = dict[str, float]


class RunReport:
    """Writes the run directory's files, a line a step; with ``resume_step`` it first drops what came after that step.

    ``metrics.jsonl`` has one JSON object a training step, with ``step``, ``time_s`` (seconds since everything was
    up, resumes added up) and the step's figures; ``trained_prompts.jsonl`` the sequence numbers that the
    step trained on. These two are the account of the run: what cannot be written to them is a RunDirectoryError.
    A file that lacks steps up to ``resume_step``, or has damaged lines, is reported through ``say``.

    TensorBoard's events and the reward curve are conveniences: the first error of each is reported through ``say``, and
    no more of it is written.

    Timeline: ``add`` after each step; ``sync`` before a checkpoint that relies on the account; ``close`` at the end.
    """

    def __init__(self, directory: Path, *, say: Callable[[str], None], resume_step: int = 0) -> None:
        from hwrl.checkpoint import DurableFS  # imports torch; the views and read_metrics do without it

        self._directory, self._say = directory, say
        self._fs = DurableFS()
        self.history: list[Figures] = self._cut_back(METRICS, last_step=resume_step)
        self._cut_back(PROMPTS, last_step=resume_step)
        self._step = resume_step
        self._earlier_s = self.history[-1]["time_s"] if self.history else 0.0
        self._started_s = time.perf_counter()
        self._metrics, self._prompts = (self._open(name) for name in (METRICS, PROMPTS))
        self._events: EventFile | None = None
        with self._convenience("TensorBoard's events"):
            self._events = EventFile(directory / "tensorboard", purge_step=resume_step + 1)

    def start_clock(self) -> None:
        """Count ``time_s`` from now: everything is up, and what came before was not training."""
        self._started_s = time.perf_counter()

    def add(self, step: int, figures: Mapping[str, float], *, prompts: list[int]) -> Figures:
        """Record a training step; return the line that was written."""
        self._step = step
        elapsed_s = self._earlier_s + time.perf_counter() - self._started_s
        line: Figures = {"step": step, "time_s": round(elapsed_s, 3), **{k: _round(v) for k, v in figures.items()}}
        self.history.append(line)
        attempt_all(
            partial(self._append, PROMPTS, self._prompts, {"step": step, "sequence_numbers": prompts}),
            partial(self._append, METRICS, self._metrics, line),
        )
        self._add_events(figures, step=step)
        return line

    def amend(self, figures: Mapping[str, float]) -> Figures:
        """Add ``figures`` to the newest step's line: those that came after the step, like an evaluation.

        There is no such line if a resume found the account short; then it is made.
        """
        if not self.history or self.history[-1]["step"] != self._step:
            self.history.append({"step": self._step, "time_s": self._earlier_s})
        line = self.history[-1]
        line.update({name: _round(value) for name, value in figures.items()})
        with _writing(self._directory / METRICS):
            self._metrics.sync()  # raises if the file is not there: it must not be made anew
        self._replace(METRICS, self.history)
        self._metrics.close()
        self._metrics = self._open(METRICS)
        self._add_events(figures, step=int(line["step"]))
        return line

    def sync(self) -> None:
        """Make all lines durable."""
        for name, file in ((PROMPTS, self._prompts), (METRICS, self._metrics)):
            with _writing(self._directory / name):
                file.sync()
                self._fs.sync_directory(self._directory)

    def close(self) -> None:
        """Write the reward curve and close the files."""
        self._metrics.close()
        self._prompts.close()
        if self._events is not None:
            with self._convenience("TensorBoard's events"):
                self._events.close()
        if self.history:
            with self._convenience(f"the reward curve {self._directory / CURVE}"):
                draw_curve(self.history, self._directory / CURVE)

    def _add_events(self, figures: Mapping[str, float], *, step: int) -> None:
        if self._events is None:
            return
        events, self._events = self._events, None
        with self._convenience("TensorBoard's events"), ExitStack() as after_an_error:
            after_an_error.callback(events.close)
            events.add(figures, step=step)
            after_an_error.pop_all()
            self._events = events

    @contextmanager
    def _convenience(self, what: str) -> Iterator[None]:
        """Report an error instead of raising it: the run does without ``what``."""
        try:
            yield
        except Exception as exc:  # noqa: BLE001 - a plotting library may raise anything; it is reported
            self._say(f"{what} cannot be written any longer ({_reason(exc)}); the run goes on without")

    def _open(self, name: str) -> AppendedFile:
        with _writing(self._directory / name):
            return AppendedFile(self._directory / name)

    def _append(self, name: str, file: AppendedFile, line: Mapping[str, Any]) -> None:
        with _writing(self._directory / name):
            file.write(_encoded([line]))

    def _replace(self, name: str, lines: list[Any]) -> None:
        with _writing(self._directory / name):
            self._fs.replace_file(self._directory / name, _encoded(lines))

    def _cut_back(self, name: str, *, last_step: int) -> list[Any]:
        """Drop the lines after ``last_step``; return the others, and report those of them that are missing."""
        path = self._directory / name
        kept, damaged = _read_lines(path, last_step=last_step)
        missing = sorted(set(range(1, last_step + 1)) - {line["step"] for line in kept})
        if missing or damaged:
            damage = [f"it lacks {_ranges('step', missing)} of {last_step}"] if missing else []
            damage += [f"garbled or out of order: {_ranges('line', damaged)}"] if damaged else []
            self._say(
                f"{path} is not whole: {'; '.join(damage)}. "
                "The run goes on: weights and prompts come from the checkpoint"
            )
        if path.exists():
            self._replace(name, kept)
        return kept


def read_metrics(directory: Path) -> list[Figures]:
    """Return the lines of ``metrics.jsonl`` by step; a line that was cut off or garbled is left out."""
    return _read_lines(directory / METRICS)[0]


def draw_curve(history: list[Figures], path: Path) -> None:
    """Draw the mean reward, the evaluations and the staleness over the steps, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), dpi=110)
    steps = [line["step"] for line in history]
    axes.plot(
        steps, [line.get("reward/mean", math.nan) for line in history], color="tab:blue", label="mean reward (training)"
    )
    evaluated = [line for line in history if "eval/reward" in line]
    if evaluated:
        places = [line["step"] for line in evaluated]
        axes.plot(places, [line["eval/reward"] for line in evaluated], "o-", color="tab:green", label="eval reward")
    if any("eval/exact" in line for line in evaluated):
        exact = [line.get("eval/exact") for line in evaluated]
        axes.plot(places, exact, "s--", color="tab:orange", label="eval exact match")
    axes.set(xlabel="training step", ylabel="reward", ylim=_limits(history))
    other = axes.twinx()
    other.plot(steps, [line.get("staleness/mean", math.nan) for line in history], color="0.75", linewidth=1)
    other.set_ylabel("mean staleness [weight versions]", color="0.5")
    axes.legend(loc="lower right")
    axes.grid(alpha=0.3)
    figure.tight_layout()
    draft = path.with_name(f".tmp_{path.name}")
    figure.savefig(draft, format="png")
    draft.replace(path)  # an error leaves the old curve
    pyplot.close(figure)


def _limits(history: list[Figures]) -> tuple[float, float] | None:
    """Return the reward axis from 0 to 1 if all that is drawn fits, so that runs can be compared; else None."""
    names = ("reward/mean", "eval/reward", "eval/exact")
    drawn = [line[name] for line in history for name in names if name in line]
    return (0, 1.02) if all(0 <= value <= 1 for value in drawn) else None


class PlainView:
    """Progress as lines of text, at most one in ``interval_s`` seconds: for logs, pipes and CI."""

    def __init__(self, total_steps: int, *, stream: TextIO, interval_s: float = 2.0) -> None:
        self._total, self._stream, self._interval_s = total_steps, stream, interval_s
        self._last_s = -interval_s

    def show(self, line: Figures) -> None:
        """Print ``line`` if it is time, or if it holds an evaluation or is the last."""
        now_s = time.perf_counter()
        if now_s - self._last_s < self._interval_s and "eval/reward" not in line and line["step"] != self._total:
            return
        self._last_s = now_s
        self.say(" | ".join(f"{name} {value}" for name, value in _shown(line, self._total)))

    def say(self, text: str) -> None:
        """Print one line, or nothing if nobody reads any more: that is no reason to end a run."""
        try:
            print(text, file=self._stream, flush=True)
        except OSError:
            _discard(self._stream)

    def close(self) -> None:
        """Nothing is open."""


class LiveView:
    """Progress as a table that is redrawn in place, under a bar."""

    def __init__(self, total_steps: int) -> None:
        from rich.console import Console
        from rich.live import Live

        self._total = total_steps
        self._console = Console()
        self._live = Live(console=self._console, refresh_per_second=4)
        self._live.start()

    def show(self, line: Figures) -> None:
        """Redraw with ``line``."""
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        table = Table(box=None, show_header=False)
        for name, value in _shown(line, self._total):
            table.add_row(f"[bold]{name}", value)
        self._live.update(Group(table, ProgressBar(total=self._total, completed=line["step"], width=60)))

    def say(self, text: str) -> None:
        """Print one line above the table."""
        with suppress(OSError):  # the terminal is gone
            self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def close(self) -> None:
        """Leave the last table on the screen."""
        with suppress(OSError):
            self._live.stop()


def _discard(stream: TextIO) -> None:
    """Let what is written to ``stream`` from now on, and what it still holds, go nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


View = PlainView | LiveView


def make_view(total_steps: int) -> View:
    """Return a live view on a terminal, and plain lines elsewhere."""
    return LiveView(total_steps) if sys.stdout.isatty() else PlainView(total_steps, stream=sys.stdout)


def _shown(line: Figures, total: int) -> list[tuple[str, str]]:
    rows = [
        ("step", f"{line['step']:.0f}/{total}"),
        ("time", f"{line['time_s']:.0f} s"),
        ("reward", f"{line.get('reward/mean', math.nan):.3f}"),
        ("staleness", f"{line.get('staleness/mean', math.nan):.2f} (max {line.get('staleness/max', math.nan):.0f})"),
        (
            "weights",
            f"v{line.get('weights/version', math.nan):.0f}, sync {line.get('timing_s/sync', 0.0) * 1000:.0f} ms"
            + (", with the base" if line.get("sync/base_sent") else ""),
        ),
        (
            "train",
            f"{line.get('trainer/tokens_per_s', 0.0):,.0f} tok/s, idle {line.get('trainer/idle_ratio', 0.0):.0%}",
        ),
        (
            "rollout",
            f"{line.get('rollout/tokens_per_s', 0.0):,.0f} tok/s, idle {line.get('rollout/idle_ratio', 0.0):.0%}",
        ),
    ]
    if "eval/reward" in line:
        exact = f", exact {line['eval/exact']:.3f}" if "eval/exact" in line else ""
        rows.append(("eval", f"{line['eval/reward']:.3f}{exact}"))
    return rows


def _round(value: float) -> float:
    return value if float(value).is_integer() else float(f"{value:.6g}")  # bytes are counted exactly


def _encoded(lines: list[Any]) -> bytes:
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


def _read_lines(path: Path, *, last_step: float = math.inf) -> tuple[list[Any], list[int]]:
    """Return the records of ``path`` up to ``last_step``, by step, and the numbers of the lines before the last of them
    that are out of order or no record. (What is garbled after it, a killed run or a power loss has left.)
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return [], []
    except OSError as exc:
        raise _unusable(path, "read", exc) from exc
    found: dict[int, Any] = {}
    damaged, waiting = [], []
    for number, text in enumerate(content.split(b"\n")[:-1], start=1):
        line = _record(text)
        if line is None or line["step"] in found:
            waiting.append(number)
            continue
        if line["step"] > last_step:
            continue
        damaged += waiting + ([number] if found and line["step"] < max(found) else [])
        waiting.clear()
        found[line["step"]] = line
    return [found[step] for step in sorted(found)], damaged


def _record(text: bytes) -> Any:
    """Return the line of a step that ``text`` is; None if it is none."""
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(line, dict) or type(line.get("step")) is not int:
        return None
    if isinstance(line.get("sequence_numbers"), list):
        return line
    return line if "time_s" in line and all(isinstance(value, int | float) for value in line.values()) else None


def _ranges(noun: str, numbers: list[int]) -> str:
    """Return the numbers in words.

    >>> _ranges("step", [3]), _ranges("step", [1, 2, 3, 7])
    ('step 3', 'steps 1-3, 7')
    """
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    shown = [str(first) if first == last else f"{first}-{last}" for first, last in itertools.islice(runs, 20)]
    return f"{noun}{'' if len(numbers) == 1 else 's'} {', '.join(shown)}{', ...' if len(runs) > 20 else ''}"


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        raise _unusable(path, "written", exc) from exc


def _unusable(path: Path, use: str, exc: OSError) -> RunDirectoryError:
    return RunDirectoryError(
        f"{path} cannot be {use}",
        why=_reason(exc),
        fix="give the run directory what the reason names (disk space, permission, a higher ulimit -f, its place "
        "under that name); resume=true then continues the run from its last checkpoint",
    )


def _reason(exc: Exception) -> str:
    if isinstance(exc, OSError) and exc.strerror:
        return f"{exc.strerror}: {exc.filename}" if exc.filename else exc.strerror
    return str(exc) or repr(exc)
