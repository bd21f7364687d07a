"""Types of the benchmarks' options: numbers within a range, existing folders, the file for the JSON."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

_Number = TypeVar("_Number", int, float)


def positive_int(text: str) -> int:
    """Return a whole number above 0.

    >>> positive_int("-4")
    Traceback (most recent call last):
    argparse.ArgumentTypeError: it must be a whole number above 0, and is '-4'
    """
    return _number(text, int, lambda value: value > 0, "a whole number above 0")


def several(text: str) -> int:
    """Return a whole number above 1."""
    return _number(text, int, lambda value: value > 1, "a whole number above 1")


def whole_number(text: str) -> int:
    """Return a whole number, 0 or more."""
    return _number(text, int, lambda value: value >= 0, "a whole number, 0 or more")


def positive_float(text: str) -> float:
    """Return a finite number above 0."""
    return _number(text, float, lambda value: value > 0 and math.isfinite(value), "a number above 0")


def seconds(text: str) -> float:
    """Return a finite number, 0 or more."""
    return _number(text, float, lambda value: value >= 0 and math.isfinite(value), "a number of seconds, 0 or more")


def folder(text: str) -> Path:
    """Return the path of an existing directory."""
    path = Path(text)
    if not path.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {text!r}")
    return path


def add_json(parser: argparse.ArgumentParser) -> None:
    """Declare ``--json FILE``. The parser refuses a file that cannot be written, before anything is measured."""
    parser.add_argument("--json", type=_new_file, metavar="FILE", help="write the result there too")


def _number(text: str, kind: Callable[[str], _Number], is_good: Callable[[_Number], bool], wanted: str) -> _Number:
    try:
        value = kind(text)
    except ValueError:
        value = None
    if value is None or not is_good(value):
        raise argparse.ArgumentTypeError(f"it must be {wanted}, and is {text!r}")
    return value


def _new_file(text: str) -> Path:
    path = Path(text)
    if path.is_dir() or not os.access(path if path.exists() else folder(str(path.parent)), os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written")
    return path
