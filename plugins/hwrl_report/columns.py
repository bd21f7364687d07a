"""Read the metrics of a run column by column, and reduce them to few enough points for a page."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hwrl.run import read_lines

Reals = npt.NDArray[np.float64]

BINS = 400
"""The maximum number of points in a curve. With more steps, a point stands for a bin of steps: mean, min and max."""


@dataclass
class MetricColumns:
    """The values of each metric by name (float64), and the steps that have it (int64), in ascending order."""

    steps: dict[str, npt.NDArray[np.int64]] = field(default_factory=dict)
    values: dict[str, Reals] = field(default_factory=dict)

    def last(self, name: str) -> float | None:
        """Return the newest value of the metric; None if no step has it."""
        return float(self.values[name][-1]) if name in self.values else None

    def added(self, name: str) -> float:
        """Return the total growth of a running count over the run. It may start again at 0 when the run resumes."""
        values = self.values.get(name, np.zeros(0))
        grown = np.diff(values, prepend=0.0)
        return float(np.where(grown < 0, values, grown).sum())

    def total(self, name: str) -> float:
        """Return the sum of the metric over all steps; 0.0 if no step has it."""
        return float(self.values[name].sum()) if name in self.values else 0.0

    def rows(self, names: list[str]) -> Iterator[dict[str, float]]:
        """Yield, for each step, those of the metrics ``names`` that it has."""
        rows: dict[int, dict[str, float]] = {}
        for name in names:
            for step, value in zip(self.steps.get(name, ()), self.values.get(name, ()), strict=True):
                rows.setdefault(int(step), {})[name] = float(value)
        yield from (rows[step] for step in sorted(rows))


def _are_numbers(line: dict[str, Any]) -> bool:
    """Return whether all values of ``line`` are numbers that a float can hold, and its time is finite."""
    numbers = all(type(value) is float or (type(value) is int and abs(value) < 1 << 1000) for value in line.values())
    return numbers and math.isfinite(line.get("time_s", 0.0))


def read_columns(path: Path) -> MetricColumns:
    """Read ``metrics.jsonl`` line by line. Skips damaged lines, and lines whose step is not above the previous one."""
    places: dict[str, array[int]] = {}
    values: dict[str, array[float]] = {}
    last = -1
    for _, line in read_lines(path):
        if line is None or line["step"] <= last or not _are_numbers(line):
            continue
        last = line["step"]
        for name, value in line.items():
            if name not in values:
                places[name], values[name] = array("q"), array("d")
            places[name].append(last)
            values[name].append(value)
    return MetricColumns(
        {name: np.array(each, dtype=np.int64) for name, each in places.items()},
        {name: np.array(each, dtype=np.float64) for name, each in values.items()},
    )


@dataclass(frozen=True)
class Curve:
    """Points to draw: steps and values, and for bins also the minimum and maximum. None marks a gap: not finite."""

    steps: list[int]
    values: list[float | None]
    minimum: list[float | None] | None = None
    maximum: list[float | None] | None = None


def thin_out(steps: npt.NDArray[np.int64], values: Reals) -> Curve:
    """Return all points if there are few; otherwise one per bin of steps, with its minimum and maximum."""
    if len(steps) <= BINS:
        return Curve(steps.tolist(), _rounded(values))
    starts = np.linspace(0, len(steps), BINS, endpoint=False).astype(np.int64)
    finite = np.isfinite(values)
    counts = np.add.reduceat(finite, starts, dtype=np.int64)
    sums = np.add.reduceat(np.where(finite, values, 0.0), starts)
    minimum = np.minimum.reduceat(np.where(finite, values, np.inf), starts)
    maximum = np.maximum.reduceat(np.where(finite, values, -np.inf), starts)
    with np.errstate(invalid="ignore", divide="ignore"):
        means = sums / counts
    ends = np.append(starts[1:], len(steps)) - 1
    return Curve(steps[(starts + ends) // 2].tolist(), _rounded(means), _rounded(minimum), _rounded(maximum))


def bin_means(values: Reals, starts: npt.NDArray[np.int64]) -> list[float | None]:
    """Return the mean of ``values`` in each bin. ``starts`` has the index of the first value of each bin."""
    sizes = np.diff(np.append(starts, len(values)))
    return _rounded(np.add.reduceat(np.nan_to_num(values), starts) / sizes)


def _rounded(values: Reals) -> list[float | None]:
    rounded = [float(f"{value:.5g}") for value in values.tolist()]  # the largest floats become infinite
    return [value if math.isfinite(value) else None for value in rounded]
