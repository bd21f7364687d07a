"""A few versions of the soak: ``make soak`` sends thousands."""

from __future__ import annotations

import pytest

from tests.soak import Soak, Usage, soak


@pytest.mark.extended  # each promise of a transfer has a test of its own
@pytest.mark.long(30)
def test_receivers_that_are_killed_in_turns_miss_no_version() -> None:
    result = soak(20, restart_every=10)
    assert (result.versions, result.restarts, len(result.keys)) == (20, 2, 2)


@pytest.mark.parametrize(
    ("nbytes", "files", "leaks"), [(100, 9, []), (102, 9, ["sender memory"]), (100, 10, ["sender files"])]
)
def test_what_grows_is_a_leak(nbytes: int, files: int, leaks: list[str]) -> None:
    flat = Usage(100, 9, 4)
    result = Soak(sender=[flat] * 8 + [Usage(nbytes, files, 4)] * 2, receiver=[flat] * 10, keys=list(range(10)))
    assert list(result.leaks()) == leaks
