"""The operators of the simulated CANN against CPU torch. Runs in an environment that ``ci/npusim/build`` was run for.

``NPUSIM_SWEEP=all`` also runs the sweep in bfloat16.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import sweep
import torch
import torch_npu

HERE = Path(__file__).parent
UNSIMULATED = 86
DTYPES = list(sweep.DTYPES) if os.environ.get("NPUSIM_SWEEP") == "all" else ["float32"]


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python code in a process of its own, with ``torch`` imported."""
    return subprocess.run(
        [sys.executable, "-c", f"import ctypes, torch\n{code}"],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_operator_of_torch_equals_the_cpu_or_is_listed(dtype: str) -> None:
    listed = {entry for of, entry in sweep.expected_failures() if of == dtype}
    failing = sweep.sweep(dtype, sweep.entries(dtype))
    assert {entry: reason for entry, reason in failing.items() if entry not in listed} == {}
    assert listed - failing.keys() == set(), "these pass: remove their lines from not_passing.txt"


def test_qwen3_trains_and_generates_as_on_the_cpu(tmp_path: Path) -> None:
    results = []
    for device in ("cpu", "npu"):
        subprocess.run([sys.executable, HERE / "qwen3.py", device, tmp_path / device], check=True, timeout=300)
        results.append(torch.load(tmp_path / device))
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)


def test_an_operator_that_is_not_simulated_ends_the_process_and_is_named() -> None:
    result = run("torch.stft(torch.randn(64, device='npu'), 16, return_complex=True)")
    assert result.returncode == UNSIMULATED
    assert "aclStft is not simulated" in result.stderr


def test_a_wrong_handle_ends_the_process_and_names_operator_and_argument() -> None:
    result = run(
        "torch.npu.init(); opapi = ctypes.CDLL('libopapi.so'); opapi.aclCreateScalar.restype = ctypes.c_void_p\n"
        "scalar = ctypes.c_void_p(opapi.aclCreateScalar(ctypes.byref(ctypes.c_float(1)), 0))\n"
        "opapi.aclnnMulGetWorkspaceSize(None, scalar, None, ctypes.byref(ctypes.c_uint64()), ctypes.byref(ctypes.c_void_p()))",
        LD_LIBRARY_PATH=str(Path(torch_npu.__file__).parent.with_name("torch_npu.libs")),
    )
    assert result.returncode != 0
    assert "argument 2 of aclnnMul(Tensor self, Tensor other, Out out) is an aclTensor, and what came is aclScalar" in result.stderr


def test_a_dtype_that_the_hardware_refuses_is_refused() -> None:
    result = run("a = torch.ones(2, 2, dtype=torch.int32, device='npu'); a @ a")
    assert "argument 1 of aclnnM" in result.stderr, result.stderr
    assert "is float32, float16 or bfloat16, and not Int" in result.stderr


def test_an_operator_fails_at_the_call_that_was_asked_for() -> None:
    code = "a = torch.ones(2, device='npu')\nfor i in range(3): print(i, (a * 2).sum().item(), flush=True)"
    result = run(code, NPUSIM_FAULT_OP="aclnnMuls:2")
    assert re.findall(r"^\d .*", result.stdout, re.M) == ["0 4.0"]
    assert "aclnnMuls" in result.stderr


def test_every_operator_of_the_table_is_one_that_torch_npu_calls() -> None:
    package = Path(torch_npu.__file__).parent
    called = set(re.findall(rb"aclnn\w+?(?=GetWorkspaceSize)", (package / "lib/libtorch_npu.so").read_bytes()))
    symbols = subprocess.run(["nm", "-D", package.with_name("torch_npu.libs") / "libopapi.so"], capture_output=True, check=True).stdout
    assert set(re.findall(rb" i (aclnn\w+)GetWorkspaceSize", symbols)) <= called
