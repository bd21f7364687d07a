"""The types of the commands' arguments. Each raises argparse's error for a wrong word."""

from __future__ import annotations

import argparse
from pathlib import Path

from hwrl import files


def local_path(text: str) -> Path:
    """Return the path in ``text``; ``~`` at its beginning is the home directory, also after ``--out=``.

    >>> local_path("a/b").name
    'b'
    """
    if not text or "\0" in text:
        raise argparse.ArgumentTypeError(f"{text!r} is not a path")
    try:
        return files.local_path(text)
    except ValueError as exc:
        raise argparse.ArgumentTypeError(str(exc)) from exc


def count(text: str, *, most: int = 1 << 20) -> int:
    """Return the number in ``text``, from 1 to ``most``."""
    if not (text.isascii() and text.isdigit() and len(text) < 8 and 0 < int(text) <= most):
        raise argparse.ArgumentTypeError(f"{text!r:.50} is not a positive whole number up to {most}")
    return int(text)
