"""These tests need the environment that ci/npu makes: the real torch_npu over a simulated CANN, or NPUs."""

from __future__ import annotations

import importlib.util

import pytest

collect_ignore_glob = [] if importlib.util.find_spec("torch_npu") else ["test_*.py"]


@pytest.fixture(autouse=True)
def _mild_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a process use its device after an abort, as the kit demands: nobody knows here whether real HCCL does."""
    monkeypatch.setenv("NPUSIM_HCCL_MILD", "1")
