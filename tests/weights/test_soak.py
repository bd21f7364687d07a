"""A few versions of the soak: ``make soak`` sends thousands."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.soak import Soak, Usage, soak


@pytest.mark.extended  # each promise of a transfer has a test of its own
@pytest.mark.long(30)
def test_receivers_that_are_killed_in_turns_miss_no_version() -> None:
    result = soak(20, restart_every=10)
    assert (result.versions, result.restarts, len(result.keys)) == (20, 2, 2)


@pytest.mark.parametrize(
    ("nbytes", "files", "leaks"),
    [
        (lambda index: 1000, 9, []),
        (lambda index: 1000 + index, 9, []),
        (lambda index: 1000 + 3 * index, 9, ["sender memory"]),
        (lambda index: 1000 + 20 * (index > 5), 9, ["sender memory"]),
        (lambda index: 1000, 10, ["sender files"]),
    ],
)
def test_what_grows_is_a_leak(nbytes: Callable[[int], int], files: int, leaks: list[str]) -> None:
    flat = Usage(1000, 9, 4)
    sender = [Usage(nbytes(index), files if index > 7 else 9, 4) for index in range(10)]
    result = Soak(sender=sender, receiver=[flat] * 10, keys=list(range(10)))
    assert list(result.leaks()) == leaks
