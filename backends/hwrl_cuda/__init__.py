"""hwrl on NVIDIA GPUs, with torch's own device module and NCCL. The probe needs neither."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import hwrl
from hwrl import environ
from hwrl.errors import UnsupportedError
from hwrl.interfaces import (
    Backend,
    BackendInfo,
    Capability,
    DeviceMap,
    Finding,
    Handle,
    Kernels,
    ProbeContext,
    ProbeResult,
    Support,
    without_device_files,
)

if TYPE_CHECKING:
    from datetime import timedelta

    import torch
    from torch.distributed import ProcessGroup

    from hwrl.comm import Store

__all__ = ["CudaBackend", "CudaDeviceMap"]

_log = logging.getLogger("hwrl.cuda")

INFO = BackendInfo(name="cuda", device_type="cuda", description="NVIDIA GPUs, NCCL collectives", api=(1, 0))
VISIBLE = "CUDA_VISIBLE_DEVICES"
_UUIDS = ("GPU-", "MIG-")  # beginnings of UUIDs, which may stand for numbers; a part of a divided GPU has no number
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # the current name, and the name deprecated in torch 2.9
_DEVICE_FILES = "dev/nvidia[0-9]*"
_PCI_VENDOR, _PCI_DISPLAY = 0x10DE, 0x03  # NVIDIA; display controllers, including 3D controllers without a screen
_REGISTER_PORTABLE = 1  # cudaHostRegisterPortable: page-locked for every device of the process
_PROVEN = Support("supported", "the conformance kit passed on two H200 (torch 2.11, driver 580)")
_SUPPORT = {
    Capability.STREAMS: _PROVEN,
    Capability.PINNED_MEMORY: _PROVEN,
    Capability.MEMORY_STATS: _PROVEN,
    Capability.COLLECTIVES: _PROVEN,
    Capability.REDUCE_AVERAGE: _PROVEN,
    Capability.COMM_ABORT: _PROVEN,
    Capability.DEVICE_IPC: _PROVEN,
    Capability.REGISTERED_MEMORY: _PROVEN,
}
_VARLEN = Support("supported", "the conformance kit passed on one H200 (torch 2.11); float32 is padded")
_COMPILED = Support("supported", "the layers of a model trained 1.4 to 1.6 times as fast on one H200 (torch 2.11)")


@hwrl.hookimpl
def hwrl_backend_info() -> BackendInfo:
    return INFO


@hwrl.hookimpl
def hwrl_probe(context: ProbeContext) -> ProbeResult:
    files = context.device_files(_DEVICE_FILES)
    subsystem = context.device_files("dev/dxg")  # the only device file under WSL, for any vendor's GPU
    if not files and not subsystem:
        return without_device_files(
            context,
            pattern=_DEVICE_FILES,
            vendor=_PCI_VENDOR,
            base_class=_PCI_DISPLAY,
            device="NVIDIA GPU",
            fix="load the driver (modprobe nvidia, nvidia-smi), or start the container with its GPUs (--gpus all)",
        )
    reason = _why_torch_cannot(context)
    if reason:
        return ProbeResult("no", reason, files)
    if not files:
        return ProbeResult("unknown", "/dev/dxg may be an NVIDIA GPU; set HWRL_BACKEND to decide", subsystem)
    return ProbeResult("yes", f"{len(files)} GPU device files and a torch built for CUDA", files, rank=100)


def _why_torch_cannot(context: ProbeContext) -> str:
    """Return the reason why the installed torch cannot use CUDA, from its version file, without an import; or ''."""
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
def hwrl_process_env(role: str, env: Mapping[str, str], exports_memory: bool) -> dict[str, str]:
    if role != "trainer" or exports_memory or any(name in env for name in ALLOCATOR):
        return {}
    return {ALLOCATOR[0]: "expandable_segments:True"}


@hwrl.hookimpl
def hwrl_kernels() -> Kernels | None:
    if importlib.util.find_spec("liger_kernel") is None:
        return None
    try:
        from hwrl_cuda import kernels
    except ImportError as exc:
        _log.warning("liger_kernel is installed, and its operations cannot be used: %s", exc)
        return None
    return Kernels(rms_norm=kernels.rms_norm, swiglu=kernels.swiglu)


@hwrl.hookimpl
def hwrl_doctor(context: ProbeContext) -> Iterable[Finding]:
    for name in (VISIBLE, "NCCL_SOCKET_IFNAME", "NCCL_CUMEM_ENABLE", *ALLOCATOR):
        if name in context.env:
            yield Finding("info", f"{name}={context.env[name]}")
    if context.env.get(VISIBLE) in ("", "-1"):
        fix = f"unset {VISIBLE}, or set HWRL_BACKEND=cpu if the CPU is meant"
        yield Finding("warning", f"{VISIBLE} hides every GPU: this process sees no device", fix=fix)
    if all(name in context.env for name in ALLOCATOR):
        both = " and ".join(ALLOCATOR)
        yield Finding("warning", f"{both} are set: torch reads some options of each", fix=f"unset {ALLOCATOR[1]}")


class CudaDeviceMap(DeviceMap):
    """GPUs by number, or by UUID in :meth:`narrow` and :meth:`name`. For the driver, the value -1 hides every GPU."""

    def visible(self, env: Mapping[str, str]) -> tuple[int, ...] | None:
        if env.get(str(self.visible_variable), "").strip() == "-1":
            return ()
        return super().visible(env)

    def narrow(self, logical: Sequence[int], env: Mapping[str, str]) -> dict[str, str]:
        if self.visible_variable is None:
            return {}
        return {self.visible_variable: ",".join(self.name(index, env) for index in logical)}

    def name(self, logical: int, env: Mapping[str, str]) -> str:
        names = [name.strip() for name in env.get(str(self.visible_variable), "").split(",")]
        if names[0].startswith(_UUIDS) and 0 <= logical < len(names):
            return names[logical]
        return super().name(logical, env)

    def ray_options(self, count: float) -> dict[str, Any]:
        return {"num_gpus": count}


def _supported_unless(reason: str, support: Support) -> Support:
    return Support("unsupported", reason) if reason else support


def _why_not_compiled() -> str:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed, and torch's compiler needs it"
    if "CC" not in os.environ and not any(map(shutil.which, ("cc", "gcc", "clang"))):
        return "triton needs a C compiler (cc, gcc, clang or the variable CC), and there is none"
    return ""


class CudaBackend(Backend):
    """torch's CUDA device, with its own device map, shared memory and process groups."""

    devices = CudaDeviceMap(visible_variable=VISIBLE, ray_resource="GPU")

    def supports(self, capability: Capability) -> Support:
        settings = "".join(os.environ.get(name, "") for name in ALLOCATOR).replace(" ", "")
        if capability is Capability.DEVICE_IPC and "expandable_segments:True" in settings:
            return Support("unsupported", "expandable_segments is on, and the driver does not share its memory")
        if capability is Capability.VARLEN_ATTENTION:
            from hwrl_cuda import attention

            return _supported_unless(attention.why_not(), _VARLEN)
        if capability is Capability.COMPILED_TRAINING:
            return _supported_unless(_why_not_compiled(), _COMPILED)
        return _SUPPORT.get(capability) or super().supports(capability)

    def varlen_attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        cu_seqlens: torch.Tensor,
        max_length: int,
        scale: float | None = None,
    ) -> torch.Tensor:
        from hwrl_cuda import attention, cudnn

        query, key, value = attention.cast(query, key, value)
        attend = attention.attend if attention.takes(query, value) else super().varlen_attention
        if cudnn.pays(query, value, rows=cu_seqlens.shape[0] - 1, max_length=max_length):
            attend = cudnn.attend
        return attend(query, key, value, cu_seqlens=cu_seqlens, max_length=max_length, scale=scale)

    def peak_flops(self, dtype: torch.dtype) -> float | None:
        import torch

        from hwrl_cuda import peaks

        return peaks.of(torch.cuda.get_device_name(), str(dtype).removeprefix("torch."))

    def device_uuid(self, index: int) -> str | None:
        name = self.devices.name(index, os.environ)
        # For a part of a GPU, torch may return the UUID of the whole GPU.
        return name if name.startswith("MIG-") else super().device_uuid(index)

    def _export_memory(self, memory: torch.Tensor) -> Handle:
        from hwrl_cuda import ipc

        return ipc.export(memory)

    def _open_memory(self, handle: Handle) -> torch.Tensor:
        from hwrl_cuda import ipc

        return ipc.open(handle)

    def register_host_memory(self, memory: torch.Tensor) -> None:
        import torch

        error = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, _REGISTER_PORTABLE))
        if error:
            with contextlib.suppress(RuntimeError):
                torch.ones(1, device=self.device())  # clear the error: the next launch would report it again
            raise UnsupportedError(
                f"cannot page-lock {memory.nbytes:,} bytes of host memory",
                why=f"cudaHostRegister failed with error {error}",
                fix="let the process lock that much memory (ulimit -l, the container's limits), outside a disk's files",
            )

    def unregister_host_memory(self, memory: torch.Tensor) -> None:
        import torch

        torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())

    def create_process_group(
        self, store: Store, *, rank: int, size: int, name: str, timeout: timedelta
    ) -> ProcessGroup:
        # After a timeout or a failure, torch's watchdog ends this process, and processes of other groups on the same
        # store. This variable turns the watchdog off; torch (2.10 to 2.13) reads it when it makes a group. Instead,
        # ``Pending.complete`` watches the operation, in the waiting thread.
        with environ.variable("TORCH_NCCL_BLOCKING_WAIT", "1"):
            group = super().create_process_group(store, rank=rank, size=size, name=name, timeout=timeout)
        # Connect now, while all ranks are present. Otherwise torch makes a communicator for each sending pair later,
        # and there the host blocks for a missing peer, even after an abort.
        group._get_backend(self.device()).eager_connect_single_device(self.device())
        return group

    def await_work(self, work: Any) -> None:
        work.synchronize()  # without a watchdog, wait() would block the host
