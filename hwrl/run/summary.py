"""The beginning and the end of a run directory: whether it may be used, and how the run in it ended."""

from __future__ import annotations

import difflib
import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from hwrl.checkpoint import DirectoryLock, DurableFS
from hwrl.errors import ConfigError
from hwrl.run.config import RUN_CONFIG, RUN_HEADER, Config, dump_run_config
from hwrl.run.report import CURVE, METRICS, PROMPTS

MODEL = "model"
"""The trained model's directory in the run directory."""

_WRITTEN = (RUN_CONFIG, METRICS, PROMPTS, CURVE, MODEL)

FIXED_KEYS = (
    "seed",
    "model.lora_rank",
    "model.lora_alpha",
    "model.target_modules",
    "rollout.n",
    "train.batch_groups",
    "async_training.trigger_parameter_sync_step",
)
"""What a resumed run may not change: the accounts of prompts and versions rest on it. Nor may it change the model and
the training data, but those are known by what they hold, which the checkpoint tells, and may lie elsewhere."""


@contextmanager
def claimed_directory(config: Config) -> Iterator[None]:
    """Have the run directory to itself while the block runs, with the resolved configuration in it.

    Raises ConfigError if it holds another run or cannot be used, and CheckpointError, with the owner named, if a run
    is going on in it; nothing in it is changed then.
    """
    with ExitStack() as stack:
        _claim(config, stack)
        yield


def _claim(config: Config, stack: ExitStack) -> None:
    try:
        config.dir.mkdir(parents=True, exist_ok=True)
        stack.callback(DirectoryLock(config.dir).close)
        _write_config(config)
    except OSError as exc:
        raise ConfigError(
            f"the run directory {config.dir} cannot be used",
            why=str(exc),
            fix="choose a directory that you can write to, with dir=…",
        ) from exc


def _write_config(config: Config) -> None:
    path = config.dir / RUN_CONFIG
    before = path.read_bytes() if path.exists() else None
    has_checkpoints = any(config.dir.glob("checkpoints/global_step_*"))
    if before is None or not before.startswith(RUN_HEADER):
        _refuse_to_overwrite(config, [RUN_CONFIG] if has_checkpoints else _WRITTEN)
    if has_checkpoints or _has_lines(config.dir / METRICS):
        _check_same_run(config, before)
    DurableFS().replace_file(path, dump_run_config(config))  # half a file would not be known as hwrl's


def _has_lines(path: Path) -> bool:
    return path.exists() and b"\n" in path.read_bytes()


def _refuse_to_overwrite(config: Config, names: Sequence[str]) -> None:
    """Raise ConfigError if the directory, in which no run has left its configuration, has one of the files."""
    found = [name for name in names if (config.dir / name).exists()]
    if found:
        raise ConfigError(
            f"the run would overwrite {', '.join(found)} in {config.dir}",
            why=f"hwrl did not write that: no {RUN_CONFIG} there begins with {RUN_HEADER.decode().strip()!r}",
            fix="choose another dir=…, or rename what is there; if it is a run's, put that line back",
        )


def _check_same_run(config: Config, written: bytes | None) -> None:
    """Raise ConfigError if the run may not go on; without the configuration ``written`` nothing is compared."""
    if not config.resume:
        raise ConfigError(
            f"{config.dir} already holds a run",
            why="its metrics and checkpoints would be mixed with the new run's",
            fix="add resume=true to continue it, choose another dir=…, or delete the directory",
        )
    if written is None:
        return
    now, before = config.model_dump(mode="json"), _parsed(config, written)
    changed = [key for key in FIXED_KEYS if _at(now, key) != _at(before, key)]
    if changed:
        raise ConfigError(
            f"cannot resume {config.dir} with another {', '.join(changed)}",
            why="; ".join(f"{key} was {_at(before, key)!r} and is {_at(now, key)!r}" for key in changed),
            fix="resume with the old values, or begin a new run in another dir=…",
        )


def _parsed(config: Config, written: bytes) -> Any:
    try:
        return yaml.safe_load(written)
    except (yaml.YAMLError, UnicodeDecodeError) as exc:
        raise ConfigError(
            f"{config.dir / RUN_CONFIG} is damaged, so that nothing says how the run in it was configured",
            why=str(exc),
            fix="put the file back, or, if there are checkpoints, delete it: they then take what you configure",
        ) from exc


def _at(tree: Any, key: str) -> Any:
    for part in key.split("."):
        tree = tree.get(part, {}) if isinstance(tree, dict) else {}
    return tree


SENT = ("sync/base_sent", "sync/base_nbytes", "sync/adapter_nbytes")
"""Figures of a run with an adapter: everything that was published since the last line."""


@dataclass(frozen=True)
class Summary:
    """How a run ended. ``missed_goals`` says which goals were not reached, one sentence each."""

    finished: bool
    missed_goals: list[str]
    text: str

    @property
    def succeeded(self) -> bool:
        """Whether all steps were done and all goals reached."""
        return self.finished and not self.missed_goals


def missed_goals(goals: dict[str, float], figures: dict[str, float]) -> list[str]:
    """Return a sentence for each goal that ``figures`` does not reach.

    >>> missed_goals({"reward/mean": 0.9}, {"reward/mean": 0.95})
    []
    >>> missed_goals({"eval/exact": 0.85}, {"eval/exact": 0.5})
    ['eval/exact is 0.5, the goal is 0.85']
    >>> missed_goals({"eval/exact": 0.85}, {"eval/exact": float("nan")})
    ['eval/exact is nan, the goal is 0.85']
    """
    missed = []
    for name, goal in goals.items():
        reached = figures.get(name)
        if reached is None or not reached >= goal:  # not a number reaches nothing
            missed.append(f"{name} is {'absent' if reached is None else f'{reached:.4g}'}, the goal is {goal:.4g}")
    return missed


def unknown_goals(goals: dict[str, float], line: dict[str, float], *, evaluates: bool) -> list[str]:
    """Return a sentence for each goal that is no figure of ``line``, a first step's, nor of an evaluation to come.

    >>> unknown_goals({"eval/exat": 0.9}, {"reward/mean": 0.5, "reward/exact": 0.25}, evaluates=True)
    ["no figure is called 'eval/exat' so far, and it is a goal; did you mean eval/exact?"]
    """
    judged = [name.partition("/")[2] for name in line if name.startswith("reward/")]
    evaluated = [f"eval/{figure}" for figure in ("reward", "version", *judged)] if evaluates else []
    known = {*line, *evaluated} - {"eval/mean", "eval/std"}
    sentences = []
    for name in goals:
        if name in known:
            continue
        close = difflib.get_close_matches(name, known, n=1)
        suggestion = f"; did you mean {close[0]}?" if close else ""
        sentences.append(f"no figure is called {name!r} so far, and it is a goal{suggestion}")
    return sentences


def summarise(config: Config, history: list[dict[str, float]], *, interrupted: bool) -> Summary:
    """Return how the run with the metrics ``history`` ended."""
    last = history[-1] if history else {}
    missed = [] if interrupted else missed_goals(config.goals, last)
    step = int(last.get("step", 0))
    how = "interrupted" if interrupted else "done"
    lines = [f"{how} after step {step} of {config.train.steps}, {last.get('time_s', 0.0):.0f} s of training"]
    names = ("reward/mean", "eval/reward", "eval/exact", "weights/version", "response/tokens_total")
    lines += [f"  {name:<22} {last[name]:.6g}" for name in names if name in last]
    for name in ("staleness/mean", "trainer/idle_ratio", "rollout/idle_ratio") if history else ():
        values = [line[name] for line in history if name in line]
        lines += [f"  {name:<22} {statistics.mean(values):.3g}, mean of all steps"] if values else []
    if any("sync/base_sent" in line for line in history):
        sent, base, adapter = (sum(line.get(name, 0.0) for line in history) for name in SENT)
        lines.append(f"  published: {sent:.0f} times the base, {base:,.0f} B; adapters, {adapter:,.0f} B")
    if history:
        lines.append(f"  metrics {config.dir / METRICS}, curve {config.dir / CURVE}")
    lines += [f"goal missed: {sentence}" for sentence in missed]
    if interrupted:
        command = f"hwrl train {config.dir / RUN_CONFIG} resume=true"
        what = "continue" if history else "nothing was trained or saved; begin again"
        lines.append(f"{what} with: {command}")
    return Summary(not interrupted, missed, "\n".join(lines))
