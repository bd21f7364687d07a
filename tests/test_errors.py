from __future__ import annotations

import pickle
from collections.abc import Callable

import pytest

from hwrl import errors
from hwrl.errors import (
    BackendNotFoundError,
    ConfigError,
    DataError,
    HwrlError,
    attempt_all,
    first_line,
    in_one_line,
    with_notes,
)

ALL = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, HwrlError)]


def test_an_error_says_what_why_fix_and_where_to_read_more() -> None:
    error = BackendNotFoundError("there is no backend 'x'", why="it is not installed", fix="install it")
    page = errors.manual("errors.md")
    assert str(error).splitlines() == [
        "there is no backend 'x'",
        "  why: it is not installed",
        "  fix: install it",
        f"  see: {page}#backend-not-found",
    ]
    assert "## backend-not-found\n" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_an_error_survives_the_way_from_another_process(kind: type[HwrlError]) -> None:
    error = kind("what", why="why", fix="fix")
    # A round trip within this test, of an object that it made: what Ray and multiprocessing do with exceptions.
    back = pickle.loads(pickle.dumps(error))
    assert (type(back), str(back)) == (kind, str(error))
    assert (back.what, back.why, back.fix) == ("what", "why", "fix")


def test_codes_are_unique() -> None:
    codes = [kind.code for kind in ALL]
    assert len(set(codes)) == len(codes)


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_the_tree_in_the_docstring_shows_every_error_at_its_depth(kind: type[HwrlError]) -> None:
    (line,) = [line for line in (errors.__doc__ or "").splitlines() if kind.__name__ in line.split()]
    depth = len(kind.mro()) - len(HwrlError.mro())
    assert line.index(kind.__name__) == 4 * depth


@pytest.mark.parametrize("page", ["errors.md", "configuration.md"])
def test_the_pages_that_errors_name_are_there_in_the_tree_and_in_a_wheel(page: str) -> None:
    assert errors.manual(page).is_file()


def raising(error: Exception) -> Callable[[], None]:
    def act() -> None:
        raise error

    return act


def test_of_several_errors_the_first_is_raised_and_the_later_ones_are_its_notes() -> None:
    done: list[int] = []
    acts = [raising(ConfigError("first")), raising(DataError("second", why="it is late")), lambda: done.append(3)]
    with pytest.raises(ConfigError) as caught:
        attempt_all(*acts, raising(ConfigError("first")))
    lines = with_notes(caught.value).splitlines()
    assert lines[0] == "first" and lines.count("first") == 1
    assert "then DataError: second" in lines and "  why: it is late" in lines
    assert done == [3]


def test_what_goes_wrong_after_an_error_does_not_take_its_place() -> None:
    error = ConfigError("first")
    attempt_all(raising(OSError("second")), after=error)
    assert with_notes(error).endswith("then OSError: second")


@pytest.mark.parametrize(
    ("error", "first", "line"),
    [
        (ValueError("\n  torch says no  \n  stack\n"), "torch says no", "ValueError: torch says no"),
        (ValueError(), "ValueError", "ValueError"),
        (ValueError("x" * 400), "x" * 400, f"ValueError: {'x' * 300}"),
    ],
)
def test_one_line_of_an_error_is_without_its_stack(error: Exception, first: str, line: str) -> None:
    assert (first_line(error), in_one_line(error)) == (first, line)
