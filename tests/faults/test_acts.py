"""Faults that are undone leave nothing."""

from __future__ import annotations

import os
import subprocess

import pytest

from tests.faults.acts import MEMORY_GROUPS, starve


@pytest.mark.skipif(not os.access(MEMORY_GROUPS, os.W_OK), reason="memory control groups (version 1) are not permitted")
def test_a_process_that_survives_its_hunger_is_released_and_its_group_removed() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        name = f"hwrl-test-{process.pid}"
        try:
            starve(name, [process.pid], nbytes=1 << 20)()
            assert not (MEMORY_GROUPS / name).exists() and process.poll() is None
        finally:
            process.kill()
