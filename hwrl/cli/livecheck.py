"""Try the chosen backend in a child process, because a broken driver may hang or kill the process.

The child writes its report to a file, because a vendor's library may print to stdout.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hwrl.children import run_python
from hwrl.discovery import BACKEND_VARIABLE
from hwrl.testing.limits import scaled

if TYPE_CHECKING:
    from hwrl.interfaces import Backend

_LAST_LINES = 5
_SHOWN = 3


def check(name: str, *, timeout_s: float = 120.0) -> dict[str, Any]:
    """Try backend ``name`` in a child process; return its devices and capabilities, ``ok``, and ``why`` if not.

    ``slow`` is there, and true, if it did not end within ``timeout_s``, times the variable ``HWRL_TIMEOUT_SCALE``.
    """
    timeout_s = scaled(timeout_s)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        words = ["-m", "hwrl.cli.livecheck", str(report)]
        status, last = run_python(words, limit_s=timeout_s, env={BACKEND_VARIABLE: name})
        if status is None:
            why = f"the check did not end within {timeout_s:g} s, and was killed: it is too slow or stuck"
            return {"ok": False, "slow": True, "why": why}
        if report.is_file():
            found: dict[str, Any] = json.loads(report.read_text())
            return found
        return {"ok": False, "why": f"the check ended with status {status}: {' | '.join(last[-_LAST_LINES:])}"}


def _report() -> dict[str, Any]:
    from hwrl.discovery import get_backend, kernels
    from hwrl.interfaces import Capability
    from hwrl.lazy import large_imports

    report: dict[str, Any] = {"ok": False, "why": ""}
    try:
        with large_imports():
            backend = get_backend()  # first: where a vendor's part of torch is broken, it says what to do
            import torch
        supports = {capability.value: backend.supports(capability) for capability in Capability}
        report["capabilities"] = {name: [answer.state, answer.reason] for name, answer in supports.items()}
        report["device_count"] = backend.device_count()
        report["why"] = _why_unusable(backend)
        if not report["why"]:
            report["kernels"] = [name for name, kernel in vars(kernels()).items() if kernel is not None]
            report["peak_flops"] = backend.peak_flops(torch.bfloat16)
        report["ok"] = not report["why"]
    except Exception as exc:  # noqa: BLE001 - the exception of a driver is the answer
        report["why"] = f"{type(exc).__name__}: {exc}"
    return report


def _why_unusable(backend: Backend) -> str:
    """Check memory, copies and a small model's numbers; return the first fault, "" if there is none."""
    import torch

    from hwrl.memory.pool import host_empty
    from hwrl.testing.compute import ATTENTIONS, why_refused, wrong_attention, wrong_training
    from hwrl.testing.varlen import PACKED, wrong_varlen

    absent = backend.why_no_device()
    if absent:
        return absent
    mark = backend.event(timing=True)  # on a device without streams, an inline one
    mark.record()
    mark.synchronize()
    ones = torch.ones(1024, dtype=torch.float32, device=backend.device())
    host = host_empty(backend, ones.nbytes).view(torch.float32)
    host.copy_(ones + ones)
    backend.current_stream().synchronize()
    backend.synchronize()
    if not torch.equal(host, torch.full((1024,), 2.0)):
        return "1 + 1 on the device did not arrive as 2 in host memory"
    back = host.to(backend.device())
    backend.synchronize()
    if not bool((back == 2).all()):
        return "a copy from host memory did not arrive on the device"
    wrong: list[str] = []
    try:
        for dtype in (torch.float32, torch.bfloat16):  # a small part of the conformance kit, within a second
            if dtype is torch.float32 or not why_refused(backend, dtype):
                wrong += wrong_attention(backend, ATTENTIONS["causal"], dtype)
                wrong += wrong_varlen(backend, PACKED["grouped"], dtype)
                wrong += wrong_training(backend, dtype, step=False)
    except RuntimeError as exc:
        return f"a small model fails on the device: {type(exc).__name__}: {str(exc).splitlines()[0]}"
    return f"a small model computes wrong numbers: {'; '.join(wrong[:_SHOWN])}" if wrong else ""


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(_report()))
