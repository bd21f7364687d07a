"""Wraps the prose of the pages at 120 characters. Tables, code, headings and links stay whole.

`.venv/bin/python ci/docs/wrap.py` writes the pages that have a longer line. A test finds such lines.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

REPO = Path(__file__).parents[2]
PAGES = sorted(
    path for pattern in ("*.md", "docs/**/*.md", "plugins/README.md", "ci/*/README.md") for path in REPO.glob(pattern)
)
WIDTH = 120

_FENCE = re.compile(r" *```")
_WHOLE = re.compile(r" *([|#<>]|!!!|---|\[[^\]]+\]:|$)")
_ITEM = re.compile(r" *([-*+]|\d+\.) +")
_WORD = re.compile(r"(?:!?\[[^\]]*\]\([^)]*\)|``.+?``|`[^`]*`|\S)+")
_MARKUP = re.compile(r"[|<>#]|(?:[-+*=]+|\d+[.)])$")
"""A line that begins so would be no prose."""


def blocks(page: str) -> Iterator[tuple[bool, list[str]]]:
    """Yield the lines of the page in blocks, and of each whether it is prose: a paragraph, or one item of a list."""
    code, prose = False, list[str]()
    for line in page.splitlines():
        fence = bool(_FENCE.match(line))
        whole = code or fence or bool(_WHOLE.match(line))
        if prose and (whole or _ITEM.match(line)):
            yield True, prose
            prose = []
        if whole:
            yield False, [line]
        else:
            prose.append(line)
        code ^= fence
    if prose:
        yield True, prose


def long_lines(page: str) -> list[str]:
    """Return the lines of prose that are too long and could be wrapped."""
    lines = (line for is_prose, block in blocks(page) if is_prose for line in block)
    return [line for line in lines if len(line) > WIDTH and len(wrapped([line])) > 1]


def wrapped(block: list[str]) -> list[str]:
    """Return the paragraph or item in lines of at most 120 characters, where no word is longer."""
    item = _ITEM.match(block[0])
    start = item.group() if item else " " * (len(block[0]) - len(block[0].lstrip()))
    words = _WORD.findall(" ".join(line.strip() for line in [block[0][len(start) :], *block[1:]]))
    lines = [start + words[0]]
    for word in words[1:]:
        if len(lines[-1]) + 1 + len(word) <= WIDTH or _MARKUP.match(word):
            lines[-1] += f" {word}"
        else:
            lines.append(" " * len(start) + word)
    return lines


def wrap(page: str) -> str:
    """Return the page with each block of prose wrapped that has too long a line; the others keep their lines."""
    lines = [
        line
        for is_prose, block in blocks(page)
        for line in (wrapped(block) if is_prose and max(map(len, block)) > WIDTH else block)
    ]
    return "\n".join(lines) + "\n"


def _main() -> None:
    for path in PAGES:
        page = path.read_text(encoding="utf-8")
        if wrap(page) != page:
            path.write_text(wrap(page), encoding="utf-8")
            print(f"wrapped {path.relative_to(REPO)}")


if __name__ == "__main__":
    _main()
