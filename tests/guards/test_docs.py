"""Undocumented is a failing build."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from types import FunctionType

import pytest

import hwrl_cpu
import hwrl_cuda
import hwrl_npu
from hwrl import errors
from hwrl.discovery import MANDATORY_HOOKS, hookspecs
from hwrl.errors import HwrlError
from hwrl.interfaces import Capability

DOCS = Path(__file__).parents[2] / "docs"
HOOKS = [function for name, function in vars(hookspecs).items() if name.startswith("hwrl_")]
ERRORS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, HwrlError)]


def sections(page: str) -> dict[str, str]:
    """Return the body under each second-level heading of a page."""
    parts = re.split(r"^## (.*)$", (DOCS / page).read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook.__name__)
def test_every_hook_is_documented_with_its_signature(hook: FunctionType) -> None:
    body = sections("hooks.md")[hook.__name__]
    assert f"{hook.__name__}{inspect.signature(hook)}".replace("'", "") in body
    assert ("Mandatory." in body) == (hook.__name__ in MANDATORY_HOOKS)


def test_no_hook_is_documented_that_does_not_exist() -> None:
    assert set(sections("hooks.md")) == {hook.__name__ for hook in HOOKS}


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)
def test_every_error_is_documented_with_cause_and_remedy(kind: type[HwrlError]) -> None:
    body = sections("errors.md")[kind.code]
    assert f"`{kind.__name__}`" in body
    for word in ("Cause", "Remedy"):
        assert re.search(rf"^\*\*{word}\.\*\* \S.{{20,}}", body, re.MULTILINE), f"say the {word.lower()}"


def test_no_error_is_documented_that_does_not_exist() -> None:
    assert set(sections("errors.md")) == {kind.code for kind in ERRORS}


@pytest.mark.parametrize("capability", Capability)
def test_the_table_of_backends_tells_each_capability_as_the_code_does(
    capability: Capability, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hwrl_cuda, "_why_not_compiled", str)  # torch for the CPU comes without triton
    shipped = [hwrl_cpu.CpuBackend(hwrl_cpu.INFO), hwrl_cuda.CudaBackend(hwrl_cuda.INFO)]
    states = [backend.supports(capability).state for backend in (*shipped, hwrl_npu.NpuBackend(hwrl_npu.INFO))]
    assert f"| `{capability.value}` | {' | '.join(states)} |" in (DOCS / "backends.md").read_text()
