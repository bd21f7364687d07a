"""Large imports leave the garbage collector as they found it."""

from __future__ import annotations

import gc

import pytest

from hwrl.lazy import large_imports


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_rests_during_large_imports_and_is_as_before_after_them(enabled: bool) -> None:
    (gc.enable if enabled else gc.disable)()
    try:
        with large_imports():
            assert not gc.isenabled()
            made: list[list[int]] = [[] for _ in range(1000)]
        assert gc.isenabled() is enabled
        assert gc.get_freeze_count() >= len(made)
        with pytest.raises(ImportError), large_imports():
            raise ImportError
        assert gc.isenabled() is enabled
    finally:
        gc.enable()
