"""The conformance kit: what every backend must keep, as pytest classes.

Run them with ``hwrl conformance NAME``; or subclass them in your own tests, where a fixture ``backend`` returns the
backend. A class skips what the backend says it does not support, with that reason.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hwrl.backend import Backend

pytest.register_assert_rewrite("hwrl.testing.contracts")

from hwrl.testing.contracts.comm import CommContract  # noqa: E402 - after the line above
from hwrl.testing.contracts.device import (  # noqa: E402 - after the line above
    CapabilityContract,
    DeviceContract,
    DeviceMapContract,
)
from hwrl.testing.contracts.memory import (  # noqa: E402 - after the line above
    DeviceMemoryContract,
    OffloadContract,
    PinnedMemoryContract,
    RegisteredMemoryContract,
)
from hwrl.testing.contracts.plugin import PluginContract  # noqa: E402 - after the line above
from hwrl.testing.contracts.weights import WeightsContract  # noqa: E402 - after the line above

__all__ = [
    "CapabilityContract",
    "CommContract",
    "DeviceContract",
    "DeviceMapContract",
    "DeviceMemoryContract",
    "OffloadContract",
    "PinnedMemoryContract",
    "PluginContract",
    "RegisteredMemoryContract",
    "WeightsContract",
    "run_kit",
]


def run_kit(backend: Backend, *, keyword: str = "") -> tuple[int, list[str]]:
    """Run every contract on ``backend`` and print each result; return pytest's exit status and the failed checks.

    ``keyword`` is a pytest expression that selects checks. Child processes find the backend by its name.
    """
    chosen = _Chosen(backend)
    suite = Path(__file__).with_name("suite.py")
    # Neither the configuration nor the conftest files of the folder that the user happens to be in.
    isolated = ["-c", os.devnull, f"--rootdir={suite.parent}", "--noconftest", "-p", "no:cacheprovider"]
    status = pytest.main([*isolated, "--import-mode=importlib", "-v", "-rs", "-k", keyword, str(suite)], [chosen])
    return int(status), chosen.failed


class _Chosen:
    """A pytest plugin that gives the kit its backend and remembers what failed."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.failed: list[str] = []

    @pytest.fixture
    def backend(self) -> Backend:
        return self._backend

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid.partition("::")[2])
