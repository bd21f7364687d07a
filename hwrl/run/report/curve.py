"""Draw the reward curve of a run: reward, evaluations and staleness over the training steps."""

from __future__ import annotations

import math
from pathlib import Path

from hwrl.files import replacing
from hwrl.run.report.records import Metrics


def draw_curve(history: list[Metrics], path: Path) -> None:
    """Draw the mean reward, the evaluations and the staleness over the steps, and write a PNG to ``path``."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), dpi=110)
    steps = [line["step"] for line in history]
    axes.plot(
        steps, [line.get("reward/mean", math.nan) for line in history], color="tab:blue", label="mean reward (training)"
    )
    for name in _evaluations(history):
        evaluated = [line for line in history if name in line]
        style = "o-" if name.endswith("/reward") else "s--"
        label = f"{name.replace('/', ' ')}{' match' if name.endswith('/exact') else ''}"
        axes.plot([line["step"] for line in evaluated], [line[name] for line in evaluated], style, label=label)
    axes.set(xlabel="training step", ylabel="reward", ylim=_limits(history))
    right = axes.twinx()
    right.plot(steps, [line.get("staleness/mean", math.nan) for line in history], color="0.75", linewidth=1)
    right.set_ylabel("mean staleness [weight versions]", color="0.5")
    axes.legend(loc="lower right")
    axes.grid(alpha=0.3)
    figure.tight_layout()
    with replacing(path) as file:
        figure.savefig(file, format="png")
    pyplot.close(figure)


def _limits(history: list[Metrics]) -> tuple[float, float] | None:
    """Return the limits 0 to 1 if all values are in this range, so that runs can be compared; None otherwise."""
    names = ("reward/mean", *_evaluations(history))
    drawn = [line[name] for line in history for name in names if name in line]
    return (0, 1.02) if all(0 <= value <= 1 for value in drawn) else None


def _evaluations(history: list[Metrics]) -> list[str]:
    """Return the metric names of evaluations' rewards and exact matches, in the order of their first lines."""
    names = (name for line in history for name in line if name.startswith("eval/"))
    return list(dict.fromkeys(name for name in names if name.endswith(("/reward", "/exact"))))
