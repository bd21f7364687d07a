"""Importing hwrl is free, and the parts that choose a backend run before torch can be imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import hwrl

HEAVY = "{'torch', 'numpy', 'ray', 'transformers', 'pydantic'}"
CORE = Path(hwrl.__file__).parent
LIGHT_MODULES = [
    *(f"hwrl.{name}" for name in ("errors", "cli", "interfaces", "discovery")),
    *(
        f"hwrl.{package}.{path.stem}"
        for package in ("interfaces", "discovery")
        for path in sorted((CORE / package).glob("[a-z]*.py"))
    ),
]
MAX_IMPORT_MS = 100


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, check=True).stdout


def test_importing_hwrl_loads_nothing() -> None:
    loaded = run("import sys; import hwrl; print(sorted(n for n in sys.modules if n.startswith(('hwrl', 'plug'))))")
    assert loaded.strip() == "['hwrl', 'hwrl.lazy']"
    assert run(f"import sys; import hwrl; print({HEAVY} & set(sys.modules))").strip() == "set()"


def test_importing_hwrl_is_fast() -> None:
    code = "import time; t = time.process_time(); import hwrl; print((time.process_time() - t) * 1000)"
    assert min(float(run(code)) for _ in range(3)) < MAX_IMPORT_MS


@pytest.mark.parametrize(
    "name",
    [
        *LIGHT_MODULES,
        "hwrl_cpu",
        "hwrl_cuda",
        "hwrl_npu",
        "hwrl_rocm",
        "hwrl_xpu",
        "hwrl_checkpoints",
        "hwrl_megatron",
        "hwrl_new",
        "hwrl_plan",
        "hwrl_report",
        "hwrl_simulate",
        "hwrl_trackers.mlflow",
        "hwrl_trackers.tensorboard",
        "hwrl_trackers.trackio",
        "hwrl_trackers.wandb",
        "hwrl_verifiers",
        "hwrl_vllm",
    ],
)
def test_what_runs_before_torch_does_not_import_it(name: str) -> None:
    assert run(f"import sys; import {name}; print({HEAVY} & set(sys.modules))").strip() == "set()"


def test_the_commands_help_needs_no_torch() -> None:
    code = "import hwrl.cli, sys\ntry: hwrl.cli.main(['--help'])\nexcept SystemExit: pass\n"
    assert run(f"{code}print({HEAVY} & set(sys.modules))").strip().endswith("set()")


@pytest.mark.parametrize("name", hwrl.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(hwrl, name) is not None
    assert name in dir(hwrl)
