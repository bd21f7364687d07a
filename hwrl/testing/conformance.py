"""The conformance kit: the contracts of every backend, as pytest classes.

Run them with ``hwrl conformance NAME``. Or subclass them in your tests, with a fixture ``backend``. For an unsupported
capability a class skips its tests, with the backend's reason.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from hwrl.errors import ConfigError, HwrlError
from hwrl.interfaces import Backend, Capability
from hwrl.testing.processes import preload

pytest.register_assert_rewrite("hwrl.testing.contracts")

from hwrl.testing.contracts.comm import CommContract  # noqa: E402 - after the line above
from hwrl.testing.contracts.compute import ComputeContract, KernelsContract  # noqa: E402 - after the line above
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
    "KernelsContract",
    "OffloadContract",
    "PinnedMemoryContract",
    "PluginContract",
    "RegisteredMemoryContract",
    "WeightsContract",
    "run_kit",
]

_OUTCOMES = ("passed", "skipped", "failed")


def run_kit(backend: Backend, *, keyword: str = "") -> tuple[int, list[str]]:
    """Run every contract on ``backend``, print results and a summary; return pytest's status and the failed checks.

    ``keyword`` is a pytest expression to select checks; ConfigError if it selects none. Child processes find the
    backend by its name.
    """
    with contextlib.suppress(HwrlError):  # too late: the checks only take longer
        preload("pytest", "hwrl.testing.suite")
    plugin = _KitPlugin(backend)
    suite = Path(__file__).with_name("suite.py")
    # Ignore configuration and conftest files of the user's current folder.
    isolated = ["-c", os.devnull, f"--rootdir={suite.parent}", "--noconftest", "-p", "no:cacheprovider"]
    status = pytest.main([*isolated, "--import-mode=importlib", "-v", "-rs", "-k", keyword, str(suite)], [plugin])
    if status == pytest.ExitCode.NO_TESTS_COLLECTED:
        raise ConfigError(
            "nothing was checked",
            why=f"no check's name matches {keyword!r}",
            fix="leave -k out, or give it a word of a contract's or a check's name, like TestDeviceMap",
        )
    print("\n".join(plugin.summary()))
    return int(status), plugin.failed


class _KitPlugin:
    """A pytest plugin: it provides the fixture ``backend`` and counts the outcomes of each contract."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._outcomes: dict[str, Counter[str]] = defaultdict(Counter)
        self.failed: list[str] = []

    @pytest.fixture
    def backend(self) -> Backend:
        return self._backend

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.nodeid.partition("::")[2]
        if report.failed:
            self.failed.append(name)
        if report.when == "call" or not report.passed:
            self._outcomes[name.partition("::")[0]][report.outcome] += 1

    def summary(self) -> Iterator[str]:
        """Yield a table of outcomes by contract, then the backend's capabilities, then the failed checks."""
        backend = self._backend
        yield f"\nbackend {backend.info.name}, {backend.device_count()} device(s)"
        yield f"  {'contract':<24}" + "".join(f"{outcome:>9}" for outcome in _OUTCOMES)
        for contract, ended in self._outcomes.items():
            yield f"  {contract:<24}" + "".join(f"{ended[outcome] or '-':>9}" for outcome in _OUTCOMES)
        for capability in Capability:
            support = backend.supports(capability)
            yield f"  {capability.value:<24}{support.state:<13} {support.reason}"
        yield from (f"  FAILED {name}" for name in self.failed)
