"""Test tools for packages outside hwrl, too: the conformance kit, and real processes for tests.

The contracts are in :mod:`hwrl.testing.conformance`. Names load on first use, because the kit needs pytest and torch,
and child processes of tests need neither.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hwrl.lazy import lazy_face

if TYPE_CHECKING:
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

__getattr__, __dir__, __all__ = lazy_face(__name__)
