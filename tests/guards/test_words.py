"""hwrl is written in plain English, with one name for each thing, and the docs explain every public class."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.support.sources import (
    CORE,
    FACES,
    REPO,
    SHIPPED,
    comments,
    docstrings,
    messages,
    place,
    public_names,
    tree,
)

WORD = re.compile(r"\b[a-zA-Z][\w'-]*")
RELATIVE_WORD = re.compile(r"\b(who|whom|whose|what|which|that)\b", re.IGNORECASE)
MAX_PER_100 = 2.0
"""Relative words per 100 words of all docstrings. More of them mean long sentences, hard for most readers."""
MAX_PER_100_IN_A_FILE = 3.5
MIN_WORDS_OF_A_FILE = 150
"""A file with fewer words is not measured alone: one sentence would decide."""

PLAIN_WORDS = {
    r"\bmend(s|ed|ing)?\b": "fix",
    r"\bquieten(s|ed|ing)?\b": "filter, or silence",
    r"\btroubles?\b": "error",
    r"\bfigures?\b": "metric, number or digit",
    r"\bforwards? to whom\b|\b(of|to|by|for|from|with) whom\b": "name the thing",
    r"\bone's own\b": "its",
    r"\bnot\b[^.;,]*\bany more\b": "no longer",
    r"(^|[.;:] )who(ever)? \w+s\b": "name the subject",
}
"""Words that a reader has to stop at, as patterns, and plain words to use instead."""


# -- plain English --------------------------------------------------------------------------------------------------


def count_words(text: str) -> tuple[int, int]:
    """Return how many words ``text`` has, and how many of them are relative words."""
    return len(WORD.findall(text)), len(RELATIVE_WORD.findall(text))


def relative_words_per_100(paths: list[Path]) -> float:
    """Return the relative words per 100 words of docstring in all of ``paths``."""
    nwords, nrelative = count_words("\n".join(text for path in paths for text in docstrings(path)))
    return 100 * nrelative / max(1, nwords)


def test_the_counter_counts() -> None:
    assert count_words("The rank that waits for what comes; it's rank-local.") == (9, 2)


def test_docstrings_are_plain() -> None:
    assert relative_words_per_100(SHIPPED) <= MAX_PER_100


def test_every_file_is_plain() -> None:
    found = {
        str(path.relative_to(REPO)): round(relative_words_per_100([path]), 1)
        for path in SHIPPED
        if count_words("\n".join(docstrings(path)))[0] > MIN_WORDS_OF_A_FILE
    }
    too_dense = {path: density for path, density in found.items() if density > MAX_PER_100_IN_A_FILE}
    assert not too_dense, f"write shorter sentences: {too_dense}"


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/design.md"])
def test_the_pages_that_most_people_read_are_plain(page: str) -> None:
    nwords, nrelative = count_words((REPO / page).read_text())
    assert 100 * nrelative / nwords <= MAX_PER_100, "write shorter sentences"


@cache
def written(path: Path) -> list[tuple[int, str]]:
    """Return each docstring (on line 1), comment and message of ``path``, with its line."""
    return [*((1, text) for text in docstrings(path)), *comments(path), *messages(path)]


@pytest.mark.parametrize("pattern", PLAIN_WORDS)
def test_plain_words_are_used(pattern: str) -> None:
    search = re.compile(pattern, re.IGNORECASE)
    found = [
        f"{place(path, line)}: {match.group()!r}"
        for path in SHIPPED
        for line, text in written(path)
        for match in search.finditer(text)
    ]
    assert not found, f"write instead: {PLAIN_WORDS[pattern]}"


# -- one name, one thing --------------------------------------------------------------------------------------------


def names_of_types(source: ast.Module) -> Iterator[tuple[str, int]]:
    """Yield each class, and each type alias and type variable of the module, with its line; constants are capitals."""
    for node in ast.walk(source):
        if isinstance(node, ast.ClassDef):
            yield node.name.lstrip("_"), node.lineno
    for node in source.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for name in (target.id.lstrip("_") for target in targets if isinstance(target, ast.Name)):
            if name[:1].isupper() and (len(name) == 1 or not name.isupper()):
                yield name, node.lineno


def test_the_search_for_names_finds_them() -> None:
    source = (
        "class A: pass\n_Json = dict\nT = TypeVar('T')\nReply: TypeAlias = str\nMAX = 1\nlimit: int = 1\nx = y = 2\n"
    )
    assert list(names_of_types(ast.parse(source))) == [("A", 1), ("Json", 2), ("T", 3), ("Reply", 4)]


def test_no_name_of_a_type_is_defined_twice() -> None:
    homes: dict[str, list[str]] = defaultdict(list)
    for path in SHIPPED:
        for name, line in names_of_types(tree(path)):
            homes[name].append(place(path, line))
    twice = {name: places for name, places in homes.items() if len(places) > 1}
    assert not twice, f"give each class, type alias and type variable a name of its own: {twice}"


# -- the glossary ---------------------------------------------------------------------------------------------------

MAX_WORDS = 80
"""Rows of the glossary. A reader has to hold them; a new one is worth it only if no old word will do."""


def words_of(glossary: str) -> list[str]:
    """Return the words that the tables of ``glossary`` define; a row may define several, separated by commas."""
    cells = re.findall(r"^\| ([^|]+?) \|", glossary, re.MULTILINE)
    words = [word.strip() for cell in cells if cell not in ("word", "---") for word in cell.split(",")]
    return [re.sub(r" \(.*\)", "", word) for word in words]


def test_the_search_for_words_finds_them() -> None:
    table = "| word | meaning |\n|---|---|\n| base, adapter | two |\n| group (comm) | one |\n"
    assert words_of(table) == ["base", "adapter", "group"]


def test_each_word_of_the_glossary_is_defined_once() -> None:
    glossary = (REPO / "docs/design.md").read_text().partition("\n## Words\n")[2].partition("\n## ")[0]
    words = words_of(glossary)
    twice = sorted({word for word in words if words.count(word) > 1})
    assert not twice, f"one word, one meaning: {twice}"
    assert 50 < len(words) <= MAX_WORDS, f"the glossary has {len(words)} words: do without one"


# -- central nouns are explained ------------------------------------------------------------------------------------


def defined_classes() -> set[str]:
    """Return the names of all classes of hwrl, so that functions and constants are left out."""
    return {node.name for path in CORE for node in ast.walk(tree(path)) if isinstance(node, ast.ClassDef)}


@pytest.mark.parametrize("package", FACES)
def test_every_public_class_is_in_the_docs(package: str) -> None:
    """A central noun is a class that a face exports; a page of docs/ names it, the glossary in design.md at least."""
    pages = "\n".join(path.read_text() for path in sorted((REPO / "docs").glob("*.md")))
    public = set(public_names(package)) & defined_classes()
    missing = sorted(name for name in public if not re.search(rf"\b{name}\b", pages))
    assert not missing, f"name them on a page of docs/, or in the glossary of docs/design.md: {missing}"
