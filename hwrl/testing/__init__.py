"""Test tools for packages outside hwrl, too: the conformance kit for backends, and real processes for tests.

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
        WeightsContract,
        run_kit,
    )
    from hwrl.testing.processes import Processes, RankOutcome, preload, run_processes

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
    "Processes",
    "RankOutcome",
    "RegisteredMemoryContract",
    "WeightsContract",
    "preload",
    "run_kit",
    "run_processes",
]

_IN_PROCESSES = {"RankOutcome", "Processes", "preload", "run_processes"}
_MODULE_OF = {name: "processes" if name in _IN_PROCESSES else "conformance" for name in __all__}

__getattr__, __dir__ = lazy_names(__name__, _MODULE_OF)
