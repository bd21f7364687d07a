"""Read and write files of JSON lines with one record per training step, even if a file is damaged."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

Metrics = dict[str, float]
"""The metrics of one training step, by name: one line of ``metrics.jsonl``."""


def encode_records(records: list[Any]) -> bytes:
    """Return ``records`` as lines of JSON."""
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def read_records(path: Path, *, last_step: float = math.inf) -> tuple[list[Any], list[int]]:
    """Return the records of ``path`` up to ``last_step``, sorted by step, and the numbers of damaged lines.

    A line is damaged if it is not a record, or if its step repeats or comes after a later step. Damage after the last
    record is ignored, because a killed run or a power loss leaves it. A missing file counts as an empty one.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return [], []
    records: dict[int, Any] = {}
    damaged, undecided = [], []
    for number, text in enumerate(content.split(b"\n")[:-1], start=1):
        record = _parse(text)
        if record is None or record["step"] in records:
            undecided.append(number)  # it counts as damaged only if a record follows
            continue
        if record["step"] > last_step:
            continue
        damaged += undecided + ([number] if records and record["step"] < max(records) else [])
        undecided.clear()
        records[record["step"]] = record
    return [records[step] for step in sorted(records)], damaged


def join_ranges(noun: str, numbers: list[int]) -> str:
    """Return the numbers as text, with ranges for consecutive ones.

    >>> join_ranges("step", [3]), join_ranges("step", [1, 2, 3, 7])
    ('step 3', 'steps 1-3, 7')
    """
    ranges: list[tuple[int, int]] = []
    for number in numbers:
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1] = (ranges[-1][0], number)
        else:
            ranges.append((number, number))
    shown = [str(first) if first == last else f"{first}-{last}" for first, last in itertools.islice(ranges, 20)]
    return f"{noun}{'' if len(numbers) == 1 else 's'} {', '.join(shown)}{', ...' if len(ranges) > 20 else ''}"


def _parse(text: bytes) -> Any:
    """Return the record in a line; None if the line is not a valid record."""
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or type(record.get("step")) is not int:
        return None
    if isinstance(record.get("sequence_numbers"), list):
        return record
    return record if "time_s" in record and all(isinstance(value, int | float) for value in record.values()) else None
