"""The conformance kit: what every backend must keep, as pytest classes.

Run them with ``hwrl conformance NAME``; or subclass them in your own tests, where a fixture ``backend`` returns the
backend. A class skips what the backend says it does not support, with that reason.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from hwrl.errors import ConfigError
from hwrl.interfaces import Backend, Capability
from hwrl.testing.processes import preload

pytest.register_assert_rewrite("hwrl.testing.contracts")

from hwrl.testing.contracts.comm import CommContract  # noqa: E402 - after the line above
from hwrl.testing.contracts.compute import ComputeContract  # noqa: E402 - after the line above
from hwrl.testing.contracts.device import (  # noqa: E402 - after the line above
    CapabilityContract,
    DeviceContract,
    DeviceMapContract,
)
from hwrl.testing.contracts.ipc import DeviceIpcContract  # noqa: E402 - after the line above
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
    "ComputeContract",
    "DeviceContract",
    "DeviceIpcContract",
    "DeviceMapContract",
    "DeviceMemoryContract",
    "OffloadContract",
    "PinnedMemoryContract",
    "PluginContract",
    "RegisteredMemoryContract",
    "WeightsContract",
    "run_kit",
]

_OUTCOMES = ("passed", "skipped", "failed")


def run_kit(backend: Backend, *, keyword: str = "") -> tuple[int, list[str]]:
    """Run every contract on ``backend``, print each result and a summary; return pytest's exit status and what failed.

    ``keyword`` is a pytest expression that selects checks; ConfigError if it selects none. Child processes find the
    backend by its name.
    """
    preload("pytest", "hwrl.testing.suite")
    chosen = _Chosen(backend)
    suite = Path(__file__).with_name("suite.py")
    # Neither the configuration nor the conftest files of the folder that the user happens to be in.
    isolated = ["-c", os.devnull, f"--rootdir={suite.parent}", "--noconftest", "-p", "no:cacheprovider"]
    status = pytest.main([*isolated, "--import-mode=importlib", "-v", "-rs", "-k", keyword, str(suite)], [chosen])
    if status == pytest.ExitCode.NO_TESTS_COLLECTED:
        raise ConfigError(
            "nothing was checked",
            why=f"no check's name matches {keyword!r}",
            fix="leave -k out, or give it a word of a contract's or a check's name, like TestDeviceMap",
        )
    print("\n".join(chosen.summary()))
    return int(status), chosen.failed


class _Chosen:
    """A pytest plugin that gives the kit its backend and remembers what became of each check."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._ended: dict[str, Counter[str]] = defaultdict(Counter)
        self.failed: list[str] = []

    @pytest.fixture
    def backend(self) -> Backend:
        return self._backend

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.nodeid.partition("::")[2]
        if report.failed:
            self.failed.append(name)
        if report.when == "call" or not report.passed:
            self._ended[name.partition("::")[0]][report.outcome] += 1

    def summary(self) -> Iterator[str]:
        """Yield a table of what was promised and kept, then what the backend says about itself, then what failed."""
        backend = self._backend
        yield f"\nbackend {backend.info.name}, {backend.device_count()} device(s)"
        yield f"  {'contract':<24}" + "".join(f"{outcome:>9}" for outcome in _OUTCOMES)
        for contract, ended in self._ended.items():
            yield f"  {contract:<24}" + "".join(f"{ended[outcome] or '-':>9}" for outcome in _OUTCOMES)
        for capability in Capability:
            support = backend.supports(capability)
            yield f"  {capability.value:<24}{support.state:<13} {support.reason}"
        yield from (f"  FAILED {name}" for name in self.failed)
