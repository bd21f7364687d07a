"""The operators of the simulated CANN against CPU torch. Runs in an environment that ``ci/npusim/build`` was run for.

``NPUSIM_SWEEP=all`` also runs the sweep in bfloat16.
"""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import qwen3
import sweep
import torch
import torch_npu

WHEEL = Path(torch_npu.__file__).parent
LIBRARIES = WHEEL.with_name("torch_npu.libs")
UNSIMULATED = 86
DTYPES = list(sweep.DTYPES) if os.environ.get("NPUSIM_SWEEP") == "all" else ["float32"]


def run(function: Callable[[], object]) -> tuple[int | None, str]:
    """Run the function in a forked process: its exit status and what it wrote to stderr."""
    with tempfile.TemporaryFile("w+") as words:
        child = sweep.fork.Process(target=_run, args=(function, words.fileno()))
        child.start()
        child.join(120)
        child.kill()
        words.seek(0)
        return child.exitcode, words.read()


def _run(function: Callable[[], object], stderr: int) -> None:
    os.dup2(stderr, 2)
    function()


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_operator_of_torch_equals_the_cpu_or_is_listed(dtype: str) -> None:
    listed = {entry for of, entry in sweep.expected_failures() if of == dtype}
    failing = sweep.sweep(dtype, sweep.entries(dtype))
    assert {entry: reason for entry, reason in failing.items() if entry not in listed} == {}
    assert listed - failing.keys() == set(), "these pass: remove their lines from not_passing.txt"


@pytest.mark.parametrize("index", [2, []], ids=["scalar", "empty"])
def test_an_index_may_be_a_scalar_or_empty(index: int | list[int]) -> None:
    def values(device: str) -> torch.Tensor:
        rows = torch.arange(24.0, device=device).view(6, 4)
        return torch.ops.aten.index(rows, [None, torch.tensor(index, dtype=torch.long, device=device)]).cpu()

    assert run(lambda: torch.testing.assert_close(values("npu"), values("cpu")))[0] == 0


def test_qwen3_trains_and_generates_as_on_the_cpu(tmp_path: Path) -> None:
    for device in ("cpu", "npu"):
        status, stderr = run(lambda device=device: qwen3.train_and_generate(device, tmp_path / device))
        assert status == 0, stderr
    cpu, npu = torch.load(tmp_path / "cpu"), torch.load(tmp_path / "npu")
    torch.testing.assert_close(npu, cpu, rtol=1e-4, atol=1e-5)


def test_an_operator_that_is_not_simulated_ends_the_process_and_is_named() -> None:
    status, stderr = run(lambda: torch.stft(torch.randn(64, device="npu"), 16, return_complex=True))
    assert status == UNSIMULATED
    assert "aclStft is not simulated" in stderr


def test_a_wrong_handle_ends_the_process_and_names_operator_and_argument() -> None:
    def scalar_for_a_tensor() -> None:
        opapi = ctypes.CDLL(str(LIBRARIES / "libopapi.so"))
        opapi.aclCreateScalar.restype = ctypes.c_void_p
        scalar = ctypes.c_void_p(opapi.aclCreateScalar(ctypes.byref(ctypes.c_float(1)), 0))
        opapi.aclnnMulGetWorkspaceSize(None, scalar, None, None, None)

    status, stderr = run(scalar_for_a_tensor)
    assert status != 0
    signature = "argument 2 of aclnnMul(Tensor self, Tensor other, Out out)"
    assert f"{signature} is an aclTensor, and what came is aclScalar" in stderr


def test_a_dtype_that_the_hardware_refuses_is_refused() -> None:
    def multiply_integers() -> None:
        with pytest.raises(RuntimeError, match=r"argument 1 of aclnnMm.* is float32, float16 or bfloat16, and not Int"):
            torch.mm(*torch.ones(2, 2, 2, dtype=torch.int32, device="npu"))

    assert run(multiply_integers)[0] == 0


def test_every_operator_of_the_table_is_one_that_torch_npu_calls() -> None:
    called = set(re.findall(rb"aclnn\w+?(?=GetWorkspaceSize)", (WHEEL / "lib/libtorch_npu.so").read_bytes()))
    symbols = subprocess.run(["nm", "-D", LIBRARIES / "libopapi.so"], capture_output=True, check=True).stdout
    of_vllm = {b"aclnnAddRmsNormBias"}  # vllm-ascend's extension calls it
    assert set(re.findall(rb" i (aclnn\w+)GetWorkspaceSize", symbols)) <= called | of_vllm
