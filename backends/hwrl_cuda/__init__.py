"""hwrl on NVIDIA GPUs: torch's own device module and NCCL, with a probe that needs neither."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import hwrl
from hwrl.backend import Backend, BackendInfo, Capability, DeviceMap, Finding, ProbeContext, ProbeResult, Support
from hwrl.errors import UnsupportedError

if TYPE_CHECKING:
    import torch

INFO = BackendInfo(name="cuda", device_type="cuda", description="NVIDIA GPUs, NCCL collectives")
VISIBLE = "CUDA_VISIBLE_DEVICES"
_REGISTER_PORTABLE = 1  # cudaHostRegisterPortable: page-locked for every device of the process
_PROVEN = (Capability.STREAMS, Capability.PINNED_MEMORY, Capability.MEMORY_STATS)


@hwrl.hookimpl
def hwrl_backend_info() -> BackendInfo:
    return INFO


@hwrl.hookimpl
def hwrl_probe(context: ProbeContext) -> ProbeResult:
    files = context.device_files("dev/nvidia[0-9]*")
    subsystem = context.device_files("dev/dxg")  # the only device file under WSL, whoever made the GPU
    if not files and not subsystem:
        return ProbeResult("no", "there is no /dev/nvidia[0-9]*: this machine or container shows no NVIDIA GPU")
    reason = _why_torch_cannot(context)
    if reason:
        return ProbeResult("no", reason, files)
    if not files:
        return ProbeResult("unknown", "/dev/dxg may be an NVIDIA GPU; set HWRL_BACKEND to decide", subsystem)
    return ProbeResult("yes", f"{len(files)} GPU device files and a torch built for CUDA", files, rank=100)


def _why_torch_cannot(context: ProbeContext) -> str:
    """Return why the installed torch cannot use CUDA, read from its version file without importing it, or ''."""
    if not context.has_module("torch"):
        return "torch is not installed"
    text = context.module_text("torch", "version.py") or ""
    version = re.search(r"__version__\s*=\s*'([^']*)'", text)
    if re.search(r"^cuda\b[^=\n]*=\s*'[^']+'", text, re.MULTILINE):
        return ""
    return f"the installed torch {version.group(1) if version else '(unknown version)'} is not built for CUDA"


@hwrl.hookimpl
def hwrl_create_backend() -> Backend:
    return CudaBackend(INFO)


@hwrl.hookimpl
def hwrl_doctor(context: ProbeContext) -> Iterable[Finding]:
    for name in (VISIBLE, "NCCL_SOCKET_IFNAME", "NCCL_CUMEM_ENABLE", "PYTORCH_CUDA_ALLOC_CONF"):
        if name in context.env:
            yield Finding("info", f"{name}={context.env[name]}")
    if context.env.get(VISIBLE) in ("", "-1"):
        yield Finding("warning", f"{VISIBLE} hides every GPU: this process sees no device", fix=f"unset {VISIBLE}")


class CudaDeviceMap(DeviceMap):
    """GPU numbers, with the driver's convention that the list ends before the first negative number."""

    def visible(self, env: Mapping[str, str]) -> tuple[int, ...] | None:
        if env.get(VISIBLE, "").strip() == "-1":
            return ()
        return super().visible(env)

    def ray_options(self, count: int) -> dict[str, Any]:
        return {"num_gpus": count}


class CudaBackend(Backend):
    """torch's CUDA device; only the numbering of devices and the page-locking of existing memory are its own."""

    devices = CudaDeviceMap(visible_variable=VISIBLE, ray_resource="GPU")

    def supports(self, capability: Capability) -> Support:
        if capability in _PROVEN:
            return Support("supported", "the conformance kit passed on two H200 (torch 2.11, driver 580)")
        if capability is Capability.REGISTERED_MEMORY:
            return Support("unverified", "the runtime's own registration, not proven on this device")
        return super().supports(capability)

    def register_host_memory(self, memory: torch.Tensor) -> None:
        import torch

        error = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, _REGISTER_PORTABLE))
        if error:
            with contextlib.suppress(RuntimeError):
                torch.ones(1, device=self.device())  # the next launch would report the error once more
            raise UnsupportedError(
                f"cannot page-lock {memory.nbytes:,} bytes of host memory",
                why=f"cudaHostRegister failed with error {error}",
                fix="let the process lock that much memory (ulimit -l, the container's limits), outside a disk's files",
            )

    def unregister_host_memory(self, memory: torch.Tensor) -> None:
        import torch

        torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
