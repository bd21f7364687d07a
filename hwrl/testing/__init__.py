"""Test tools for packages outside hwrl, too: the conformance kit, and real processes for tests.

Names load on first use, because the contracts need pytest and torch, and child processes of tests need neither.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hwrl.lazy import lazy_names

if TYPE_CHECKING:
    from hwrl.testing.conformance import (
        CapabilityContract,
        CommContract,
        ComputeContract,
        DeviceContract,
        DeviceIpcContract,
        DeviceMapContract,
        DeviceMemoryContract,
        KernelsContract,
        OffloadContract,
        PinnedMemoryContract,
        PluginContract,
        RegisteredMemoryContract,
        RolloutContract,
        RolloutNumbersContract,
        RolloutReceiversContract,
        RolloutSleepContract,
        RunContract,
        TrainNumbersContract,
        TrainOffloadContract,
        TrainRanksContract,
        TrainStateContract,
        TransferContract,
        TransportContract,
        WeightsContract,
        run_kit,
    )
    from hwrl.testing.levels import Kind, Level
    from hwrl.testing.processes import Processes, RankOutcome, preload, run_processes
    from hwrl.testing.report import CheckResult, KitReport
    from hwrl.testing.subject import Subject, find_subject, installed_names

__all__ = [
    "CapabilityContract",
    "CheckResult",
    "CommContract",
    "ComputeContract",
    "DeviceContract",
    "DeviceIpcContract",
    "DeviceMapContract",
    "DeviceMemoryContract",
    "KernelsContract",
    "Kind",
    "KitReport",
    "Level",
    "OffloadContract",
    "PinnedMemoryContract",
    "PluginContract",
    "Processes",
    "RankOutcome",
    "RegisteredMemoryContract",
    "RolloutContract",
    "RolloutNumbersContract",
    "RolloutReceiversContract",
    "RolloutSleepContract",
    "RunContract",
    "Subject",
    "TrainNumbersContract",
    "TrainOffloadContract",
    "TrainRanksContract",
    "TrainStateContract",
    "TransferContract",
    "TransportContract",
    "WeightsContract",
    "find_subject",
    "installed_names",
    "preload",
    "run_kit",
    "run_processes",
]

_ELSEWHERE = {
    "CheckResult": "report",
    "Kind": "levels",
    "KitReport": "report",
    "Level": "levels",
    "Processes": "processes",
    "RankOutcome": "processes",
    "Subject": "subject",
    "find_subject": "subject",
    "installed_names": "subject",
    "preload": "processes",
    "run_processes": "processes",
}
_MODULE_OF = {name: _ELSEWHERE.get(name, "conformance") for name in __all__}

__getattr__, __dir__ = lazy_names(__name__, _MODULE_OF)
