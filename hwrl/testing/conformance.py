"""The conformance kit: the contracts of backends, engines and transports, as pytest classes.

Run them with ``hwrl conformance NAME``. Or subclass them in your tests, with a fixture ``backend``, and for engines and
transports a fixture ``subject``. If a capability is missing, a class skips its tests, with the reason.
"""

from __future__ import annotations

import contextlib
import linecache
import os
from pathlib import Path
from typing import Any

import pytest

from hwrl.errors import ConfigError, HwrlError
from hwrl.interfaces import Backend
from hwrl.testing.contracts.comm import CommContract as CommContract
from hwrl.testing.contracts.compute import ComputeContract as ComputeContract
from hwrl.testing.contracts.compute import KernelsContract as KernelsContract
from hwrl.testing.contracts.device import CapabilityContract as CapabilityContract
from hwrl.testing.contracts.device import DeviceContract as DeviceContract
from hwrl.testing.contracts.device import DeviceMapContract as DeviceMapContract
from hwrl.testing.contracts.ipc import DeviceIpcContract as DeviceIpcContract
from hwrl.testing.contracts.memory import DeviceMemoryContract as DeviceMemoryContract
from hwrl.testing.contracts.memory import OffloadContract as OffloadContract
from hwrl.testing.contracts.memory import PinnedMemoryContract as PinnedMemoryContract
from hwrl.testing.contracts.memory import RegisteredMemoryContract as RegisteredMemoryContract
from hwrl.testing.contracts.plugin import PluginContract as PluginContract
from hwrl.testing.contracts.rollout_engine import RolloutContract as RolloutContract
from hwrl.testing.contracts.rollout_engine import RolloutNumbersContract as RolloutNumbersContract
from hwrl.testing.contracts.rollout_engine import RolloutReceiversContract as RolloutReceiversContract
from hwrl.testing.contracts.rollout_engine import RolloutSleepContract as RolloutSleepContract
from hwrl.testing.contracts.run import RunContract as RunContract
from hwrl.testing.contracts.train_engine import TrainNumbersContract as TrainNumbersContract
from hwrl.testing.contracts.train_engine import TrainOffloadContract as TrainOffloadContract
from hwrl.testing.contracts.train_engine import TrainRanksContract as TrainRanksContract
from hwrl.testing.contracts.train_engine import TrainStateContract as TrainStateContract
from hwrl.testing.contracts.transfers import TransferContract as TransferContract
from hwrl.testing.contracts.weights import TransportContract as TransportContract
from hwrl.testing.contracts.weights import WeightsContract as WeightsContract
from hwrl.testing.levels import Level as Level
from hwrl.testing.limits import TIMEOUT_SCALE, ran_out, scaled
from hwrl.testing.processes import preload
from hwrl.testing.report import CheckResult
from hwrl.testing.report import KitReport as KitReport
from hwrl.testing.subject import Subject

_SUITES = Path(__file__).with_name("suites")


def run_kit(
    subject: Subject,
    *,
    backend: Backend,
    level: Level = Level.FULL,
    keyword: str = "",
    timeout_scale: float | None = None,
) -> KitReport:
    """Run the checks of ``subject`` up to ``level`` on ``backend``; print results and a summary; return the report.

    A check without success is in the report and raises nothing. ``keyword`` is a pytest expression to select checks, as
    for ``-k``. ``timeout_scale`` multiplies all time limits. Raises ConfigError if nothing is selected, HwrlError if
    pytest itself fails. Child processes find the backend by its name, so its package must be installed.
    """
    suite = _SUITES / f"{subject.kind.value.replace('-', '_')}.py"
    with contextlib.suppress(HwrlError):  # the fork server runs already: the checks only take longer
        preload("pytest", f"hwrl.testing.suites.{suite.stem}")
    plugin = _KitPlugin(subject, backend, level)
    # Ignore configuration and conftest files of the user's current folder, and options in the environment.
    isolated = ["-c", os.devnull, f"--rootdir={suite.parent}", "--noconftest", "-p", "no:cacheprovider", "--color=no"]
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PYTEST_ADDOPTS", raising=False)
        if timeout_scale is not None:
            patch.setenv(TIMEOUT_SCALE, str(timeout_scale))
        scaled(1.0)  # raises here, not in each check
        status = pytest.main([*isolated, "--import-mode=importlib", "-v", "-rs", "-k", keyword, str(suite)], [plugin])
    if status == pytest.ExitCode.NO_TESTS_COLLECTED:
        raise _nothing_selected(subject, level, keyword)
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise HwrlError(
            "the kit did not run to its end", why=f"pytest ended with {status!r}", fix="look at its output above"
        )
    report = KitReport(subject, backend, level, tuple(plugin.checks), partial=bool(keyword))
    print("\n".join(report.lines()))
    return report


def _nothing_selected(subject: Subject, level: Level, keyword: str) -> ConfigError:
    if not keyword:
        return ConfigError(
            "nothing was checked",
            why=f"a {subject.kind} has no checks up to the level {level}",
            fix="choose a higher level",
        )
    return ConfigError(
        "nothing was checked",
        why=f"no check up to the level {level} has a name that matches {keyword!r}",
        fix="leave -k out, or give it a word of a contract's or a check's name, like TestDeviceMap",
    )


class _KitPlugin:
    """A pytest plugin: it selects the checks of the level, provides their fixtures, and keeps the outcomes."""

    def __init__(self, subject: Subject, backend: Backend, level: Level) -> None:
        self._subject, self._backend, self._levels = subject, backend, level.included
        self._level_of: dict[str, Level] = {}
        self._slow: set[str] = set()
        self.checks: list[CheckResult] = []

    @pytest.fixture
    def backend(self) -> Backend:
        return self._backend

    @pytest.fixture
    def subject(self) -> Subject:
        return self._subject

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[Any]) -> None:
        order = list(Level)
        self._level_of = {item.nodeid: item.cls.level for item in items}
        left_out = [item for item in items if item.cls.level not in self._levels]
        config.hook.pytest_deselected(items=left_out)
        chosen = [item for item in items if item.cls.level in self._levels]
        items[:] = sorted(chosen, key=lambda item: order.index(item.cls.level))

    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> None:
        if call.excinfo is not None and ran_out(call.excinfo.value):
            self._slow.add(item.nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.passed:
            return
        name = report.nodeid.partition("::")[2]
        level = self._level_of[report.nodeid]
        outcome = "slow" if report.failed and report.nodeid in self._slow else report.outcome
        self.checks.append(CheckResult(name, level, outcome, _reason(report), round(report.duration, 3)))


def _reason(report: pytest.TestReport) -> str:
    if report.skipped and isinstance(report.longrepr, tuple):
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is None:
        return ""
    if crash.message == "AssertionError":  # it has no text: show the line of the assertion
        return f"{linecache.getline(crash.path, crash.lineno).strip()} is not so"
    return str(crash.message)
