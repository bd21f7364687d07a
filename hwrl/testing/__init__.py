"""Test tools for packages outside hwrl, too: the conformance kit, and real processes for tests.

Names load on first use, because the contracts need pytest and torch, and child processes of tests need neither.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hwrl.lazy import lazy_names, names_of_face

if TYPE_CHECKING:
    from hwrl.testing.conformance import CapabilityContract as CapabilityContract
    from hwrl.testing.conformance import CommContract as CommContract
    from hwrl.testing.conformance import ComputeContract as ComputeContract
    from hwrl.testing.conformance import DeviceContract as DeviceContract
    from hwrl.testing.conformance import DeviceIpcContract as DeviceIpcContract
    from hwrl.testing.conformance import DeviceMapContract as DeviceMapContract
    from hwrl.testing.conformance import DeviceMemoryContract as DeviceMemoryContract
    from hwrl.testing.conformance import KernelsContract as KernelsContract
    from hwrl.testing.conformance import OffloadContract as OffloadContract
    from hwrl.testing.conformance import PinnedMemoryContract as PinnedMemoryContract
    from hwrl.testing.conformance import PluginContract as PluginContract
    from hwrl.testing.conformance import RegisteredMemoryContract as RegisteredMemoryContract
    from hwrl.testing.conformance import RolloutContract as RolloutContract
    from hwrl.testing.conformance import RolloutNumbersContract as RolloutNumbersContract
    from hwrl.testing.conformance import RolloutReceiversContract as RolloutReceiversContract
    from hwrl.testing.conformance import RolloutSleepContract as RolloutSleepContract
    from hwrl.testing.conformance import RunContract as RunContract
    from hwrl.testing.conformance import TrainNumbersContract as TrainNumbersContract
    from hwrl.testing.conformance import TrainOffloadContract as TrainOffloadContract
    from hwrl.testing.conformance import TrainRanksContract as TrainRanksContract
    from hwrl.testing.conformance import TrainStateContract as TrainStateContract
    from hwrl.testing.conformance import TransferContract as TransferContract
    from hwrl.testing.conformance import TransportContract as TransportContract
    from hwrl.testing.conformance import WeightsContract as WeightsContract
    from hwrl.testing.conformance import run_kit as run_kit
    from hwrl.testing.levels import Kind as Kind
    from hwrl.testing.levels import Level as Level
    from hwrl.testing.processes import Processes as Processes
    from hwrl.testing.processes import RankOutcome as RankOutcome
    from hwrl.testing.processes import preload as preload
    from hwrl.testing.processes import run_processes as run_processes
    from hwrl.testing.report import CheckResult as CheckResult
    from hwrl.testing.report import KitReport as KitReport
    from hwrl.testing.subject import Subject as Subject
    from hwrl.testing.subject import find_subject as find_subject
    from hwrl.testing.subject import installed_names as installed_names

_MODULE_OF = names_of_face(__name__)
__all__ = [*_MODULE_OF]  # noqa: PLE0604 - they are strings

__getattr__, __dir__ = lazy_names(__name__, _MODULE_OF)
