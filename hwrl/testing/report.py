"""The report of a run of the kit: text for people, JSON for programs, a badge for a README."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import Any, Literal

from hwrl import __version__
from hwrl.errors import ConfigError
from hwrl.interfaces import Backend, Capability
from hwrl.testing.levels import Level
from hwrl.testing.subject import Subject

CheckOutcome = Literal["passed", "skipped", "slow", "failed"]
_OUTCOMES: tuple[CheckOutcome, ...] = ("passed", "skipped", "slow", "failed")
_COLORS = {"green": "#3a7d44", "red": "#b3261e"}
_CHARACTER_WIDTH = 6.6
_PADDING = 12


@dataclass(frozen=True)
class CheckResult:
    """The result of one check. ``name`` is ``contract::check``; ``reason`` says why it did not pass.

    ``slow``: its time ran out, because the machine is too slow or something is stuck. That proves nothing.
    """

    name: str
    level: Level
    outcome: CheckOutcome
    reason: str
    seconds: float

    @property
    def contract(self) -> str:
        """The name of the check's class."""
        return self.name.partition("::")[0]


@dataclass(frozen=True)
class KitReport:
    """The results of the kit on ``subject``, for the levels up to ``level``. ``partial``: some checks were left out."""

    subject: Subject
    backend: Backend
    level: Level
    checks: tuple[CheckResult, ...]
    partial: bool = False

    @property
    def ok(self) -> bool:
        """Whether no check failed, and all ended in time."""
        return not self.failed and not self.names("slow")

    @property
    def failed(self) -> list[str]:
        """The names of the checks with a wrong result."""
        return self.names("failed")

    def names(self, outcome: CheckOutcome) -> list[str]:
        """Return the names of the checks with this outcome."""
        return [check.name for check in self.checks if check.outcome == outcome]

    @property
    def reached(self) -> Level | None:
        """The highest level with a passed check, if no check of it or of a lower level failed or was slow.

        None if there is no such level, and for a partial report.
        """
        reached = None
        for level in self.level.included:
            outcomes = {check.outcome for check in self.checks if check.level is level}
            if outcomes & {"failed", "slow"}:
                break
            reached = level if "passed" in outcomes else reached
        return None if self.partial else reached

    @property
    def skipped_levels(self) -> list[Level]:
        """The levels whose checks were all skipped."""
        outcomes = {level: {check.outcome for check in self.checks if check.level is level} for level in Level}
        return [level for level, found in outcomes.items() if found == {"skipped"}]

    # -- text -------------------------------------------------------------------------------------------------------

    def lines(self) -> Iterator[str]:
        """Yield a table of outcomes by level and contract, then the capabilities, then the checks without success."""
        backend = self.backend
        yield f"\n{self.subject}, on backend {backend.info.name} with {backend.device_count()} device(s)"
        yield f"  {'level':<12}{'contract':<29}" + "".join(f"{outcome:>9}" for outcome in _OUTCOMES)
        for level, contract in dict.fromkeys((check.level, check.contract) for check in self.checks):
            ended = [check.outcome for check in self.checks if check.contract == contract]
            counts = "".join(f"{ended.count(outcome) or '-':>9}" for outcome in _OUTCOMES)
            yield f"  {level.value:<12}{contract:<29}{counts}"
        for capability in Capability:
            support = backend.supports(capability)
            yield f"  {capability.value:<24}{support.state:<13} {support.reason}"
        yield from (f"  FAILED {name}" for name in self.failed)
        yield from (f"  TOO SLOW OR STUCK {name}" for name in self.names("slow"))
        if self.names("slow"):
            yield "  (a time limit proves nothing wrong: try again on a less busy machine, or with --timeout-scale 4)"
        if not self.partial:
            yield f"  level reached: {self.verdict()}"

    def verdict(self) -> str:
        """Return the reached level in words, with the levels that were skipped."""
        if self.reached is None:
            return "none"
        skipped = [level.value for level in self.skipped_levels if level in self.reached.included]
        return self.reached.value + (f" without {', '.join(skipped)}" if skipped else "")

    # -- files ------------------------------------------------------------------------------------------------------

    def as_json(self) -> dict[str, Any]:
        """Return the report as plain data; docs/conformance.md has its fields."""
        import torch

        counts = {
            level.value: {
                outcome: sum(check.level is level and check.outcome == outcome for check in self.checks)
                for outcome in _OUTCOMES
            }
            for level in self.level.included
        }
        backend = self.backend
        return {
            "hwrl": __version__,
            "torch": str(torch.__version__),
            "python": platform.python_version(),
            "kind": self.subject.kind.value,
            "name": self.subject.name,
            "backend": backend.info.name,
            "device_type": backend.info.device_type,
            "device_count": backend.device_count(),
            "level": self.level.value,
            "reached": None if self.reached is None else self.reached.value,
            "partial": self.partial,
            "ok": self.ok,
            "levels": counts,
            "checks": [asdict(check) for check in self.checks],
            "capabilities": {each.value: asdict(backend.supports(each)) for each in Capability},
        }

    def badge(self) -> Mapping[str, str | int]:
        """Return the badge's texts and color, in the form that shields.io reads from an address."""
        good = self.ok and self.reached is not None
        found = self.verdict() if good else "failing" if self.failed else "too slow or stuck"
        return {
            "schemaVersion": 1,
            "label": f"hwrl {__version__} {self.subject.kind.value}",
            "message": f"{found} on {self.backend.info.device_type}",
            "color": "green" if good else "red",
        }

    def write_json(self, path: Path) -> None:
        """Write :meth:`as_json` to ``path``."""
        path.write_text(json.dumps(self.as_json(), indent=2) + "\n", encoding="utf-8")

    def write_badge(self, path: Path) -> None:
        """Write the badge to ``path``: a picture if it ends in ``.svg``, data for shields.io if in ``.json``."""
        check_badge_name(path)
        badge = self.badge()
        text = _svg(badge) if path.suffix == ".svg" else json.dumps(badge) + "\n"
        path.write_text(text, encoding="utf-8")


def check_badge_name(path: Path) -> None:
    """Raise ConfigError if a badge cannot be written under this name."""
    if path.suffix not in (".svg", ".json"):
        raise ConfigError(
            f"cannot write a badge to {path}",
            why=f"its name ends in {path.suffix!r}",
            fix="name it FILE.svg for a picture, or FILE.json for shields.io",
        )


def _svg(badge: Mapping[str, str | int]) -> str:
    label, message = str(badge["label"]), str(badge["message"])
    left, right = (round(len(text) * _CHARACTER_WIDTH) + _PADDING for text in (label, message))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + right}" height="20" role="img" '
        f'aria-label="{escape(label)}: {escape(message)}">'
        f'<rect width="{left}" height="20" fill="#444"/>'
        f'<rect x="{left}" width="{right}" height="20" fill="{_COLORS[str(badge["color"])]}"/>'
        f'<g fill="#fff" text-anchor="middle" font-family="Verdana,sans-serif" font-size="11">'
        f'<text x="{left / 2}" y="14">{escape(label)}</text>'
        f'<text x="{left + right / 2}" y="14">{escape(message)}</text></g></svg>\n'
    )
