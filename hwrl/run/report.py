"""What a person sees of a run: the metrics file, TensorBoard events, the reward curve, the live view, the summary."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

METRICS = "metrics.jsonl"
PROMPTS = "trained_prompts.jsonl"
CURVE = "reward.png"

Figures = dict[str, float]


class RunReport:
    """Writes the run directory's files, a line a step; with ``resume_step`` it first drops what came after that step.

    ``metrics.jsonl`` has one JSON object a training step, with ``step``, ``time_s`` (seconds since everything was
    up, resumes added up) and the step's figures; ``trained_prompts.jsonl`` the sequence numbers that the
    step trained on.
    """

    def __init__(self, directory: Path, *, resume_step: int = 0) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._directory = directory
        for name in (METRICS, PROMPTS):
            _truncate(directory / name, last_step=resume_step)
        self.history = read_metrics(directory)
        self._earlier_s = self.history[-1]["time_s"] if self.history else 0.0
        self._started_s = time.perf_counter()
        self._events = SummaryWriter(str(directory / "tensorboard"), purge_step=resume_step + 1)
        self._metrics = (directory / METRICS).open("a", encoding="utf-8")
        self._prompts = (directory / PROMPTS).open("a", encoding="utf-8")

    def start_clock(self) -> None:
        """Count ``time_s`` from now: everything is up, and what came before was not training."""
        self._started_s = time.perf_counter()

    def add(self, step: int, figures: Mapping[str, float], *, prompts: list[int]) -> Figures:
        """Record a training step; return the line that was written."""
        elapsed_s = self._earlier_s + time.perf_counter() - self._started_s
        line: Figures = {"step": step, "time_s": round(elapsed_s, 3), **{k: _round(v) for k, v in figures.items()}}
        self.history.append(line)
        _write_line(self._metrics, line)
        _write_line(self._prompts, {"step": step, "sequence_numbers": prompts})
        for name, value in figures.items():
            self._events.add_scalar(name, value, step)
        return line

    def amend(self, figures: Mapping[str, float]) -> Figures:
        """Add ``figures`` to the newest line: those that came after the step, like an evaluation."""
        line = self.history[-1]
        line.update({name: _round(value) for name, value in figures.items()})
        for name, value in figures.items():
            self._events.add_scalar(name, value, int(line["step"]))
        self._metrics.close()
        _rewrite(self._directory / METRICS, self.history)
        self._metrics = (self._directory / METRICS).open("a", encoding="utf-8")
        return line

    def close(self) -> None:
        """Write the reward curve and close the files."""
        self._metrics.close()
        self._prompts.close()
        self._events.close()
        if self.history:
            draw_curve(self.history, self._directory / CURVE)


def read_metrics(directory: Path) -> list[Figures]:
    """Return the lines of ``metrics.jsonl``; a last line that was cut off in the middle is left out."""
    path = directory / METRICS
    return _complete_lines(path) if path.exists() else []


def draw_curve(history: list[Figures], path: Path) -> None:
    """Draw the mean reward, the evaluations and the staleness over the steps, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), dpi=110)
    steps = [line["step"] for line in history]
    axes.plot(steps, [line["reward/mean"] for line in history], color="tab:blue", label="mean reward (training)")
    evaluated = [line for line in history if "eval/reward" in line]
    if evaluated:
        places = [line["step"] for line in evaluated]
        axes.plot(places, [line["eval/reward"] for line in evaluated], "o-", color="tab:green", label="eval reward")
    if any("eval/exact" in line for line in evaluated):
        exact = [line.get("eval/exact") for line in evaluated]
        axes.plot(places, exact, "s--", color="tab:orange", label="eval exact match")
    axes.set(xlabel="training step", ylabel="reward", ylim=_limits(history))
    other = axes.twinx()
    other.plot(steps, [line["staleness/mean"] for line in history], color="0.75", linewidth=1)
    other.set_ylabel("mean staleness [weight versions]", color="0.5")
    axes.legend(loc="lower right")
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path)
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
        ("reward", f"{line['reward/mean']:.3f}"),
        ("staleness", f"{line['staleness/mean']:.2f} (max {line['staleness/max']:.0f})"),
        (
            "weights",
            f"v{line['weights/version']:.0f}, sync {line.get('timing_s/sync', 0.0) * 1000:.0f} ms"
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


def _write_line(file: TextIO, value: Mapping[str, Any]) -> None:
    file.write(json.dumps(value) + "\n")
    file.flush()


def _complete_lines(path: Path) -> list[Any]:
    text = path.read_text(encoding="utf-8")
    whole = text[: text.rfind("\n") + 1]  # a killed run can leave half a line
    return [json.loads(line) for line in whole.splitlines()]


def _truncate(path: Path, *, last_step: int) -> None:
    if path.exists():
        _rewrite(path, [line for line in _complete_lines(path) if line["step"] <= last_step])


def _rewrite(path: Path, lines: list[Any]) -> None:
    """Replace the file at once, so that a kill leaves the old or the new lines."""
    draft = path.with_suffix(".tmp")
    draft.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    draft.replace(path)
