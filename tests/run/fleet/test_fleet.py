"""The driver's watch over the processes of a run, with stand-ins for them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from hwrl.run.fleet.fleet import Fleet


def test_the_driver_sleeps_while_all_replicas_pause_before_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    slept_s: list[float] = []
    clock = SimpleNamespace(sleep=slept_s.append, monotonic=lambda: 0.0)
    monkeypatch.setattr("hwrl.run.fleet.fleet.time", clock)
    fleet = SimpleNamespace(
        replicas=SimpleNamespace(answers=[]), _check_processes=None, _raise_postponed=int, _postponing=lambda act: None
    )
    assert Fleet.watch(cast(Any, fleet), []) == [] and slept_s == [1.0]
