"""hwrl on Ascend NPUs, through torch_npu and HCCL. Not verified on a device yet."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import hwrl
from hwrl.backend import Backend, BackendInfo, DeviceMap, Finding, ProbeContext, ProbeResult
from hwrl.errors import BackendUnavailableError, ConfigError

INFO = BackendInfo(name="npu", device_type="npu", description="Ascend NPUs, HCCL collectives (unverified)")
VISIBLE = "ASCEND_RT_VISIBLE_DEVICES"


@hwrl.hookimpl
def hwrl_backend_info() -> BackendInfo:
    return INFO


@hwrl.hookimpl
def hwrl_probe(context: ProbeContext) -> ProbeResult:
    files = context.device_files("dev/davinci[0-9]*")
    if not files:
        return ProbeResult("no", "there is no /dev/davinci[0-9]*: this machine or container shows no Ascend NPU")
    missing = [name for name in ("torch", "torch_npu") if not context.has_module(name)]
    if missing:
        return ProbeResult("no", f"{' and '.join(missing)} not installed", files)
    if re.search(r"^cuda\b[^=\n]*=\s*'", context.module_text("torch", "version.py") or "", re.MULTILINE):
        return ProbeResult("no", "torch is built for CUDA, and torch_npu refuses that; install the CPU build", files)
    return ProbeResult("yes", f"{len(files)} NPU device files, and torch_npu is installed", files, rank=100)


@hwrl.hookimpl
def hwrl_create_backend() -> Backend:
    try:
        import torch_npu  # noqa: F401 - registers the device with torch
    except Exception as exc:  # torch_npu raises ImportError, OSError or RuntimeError, by what is missing of CANN
        raise BackendUnavailableError(
            "backend 'npu' cannot be created",
            why=f"import torch_npu raised {type(exc).__name__}: {exc}",
            fix="source CANN's set_env.sh in this shell, and install the torch_npu that matches torch's version",
        ) from exc
    return NpuBackend(INFO)


@hwrl.hookimpl
def hwrl_engine_args(framework: str) -> dict[str, Any] | None:
    # A live update cannot write weights that are in the device's private format.
    return {"additional_config": {"weight_nz_mode": 0}} if framework == "vllm" else None


@hwrl.hookimpl
def hwrl_doctor(context: ProbeContext) -> Iterable[Finding]:
    for name in (VISIBLE, "ASCEND_HOME_PATH", "HCCL_CONNECT_TIMEOUT", "PYTORCH_NPU_ALLOC_CONF", "TASK_QUEUE_ENABLE"):
        if name in context.env:
            yield Finding("info", f"{name}={context.env[name]}")
    if not context.device_files("dev/davinci[0-9]*"):
        return
    if "ASCEND_HOME_PATH" not in context.env:
        yield Finding("warning", "ASCEND_HOME_PATH is not set: CANN is not sourced", fix="source CANN's set_env.sh")
    try:
        NpuBackend.devices.visible(context.env)
    except ConfigError as error:
        yield Finding("error", f"{error.what}: {error.why}", fix=error.fix)


class NpuDeviceMap(DeviceMap):
    """NPU numbers, which the runtime wants in strictly ascending order: given 1,0 it shows no device at all."""

    def visible(self, env: Mapping[str, str]) -> tuple[int, ...] | None:
        ids = super().visible(env)
        if ids is not None and list(ids) != sorted(ids):
            raise ConfigError(
                f"{VISIBLE}={env[VISIBLE]!r} shows no device",
                why="the runtime wants strictly ascending numbers",
                fix=f"set {VISIBLE}={','.join(map(str, sorted(ids)))}",
            )
        return ids

    def render(self, physical: Sequence[int]) -> dict[str, str]:
        return super().render(sorted(physical))


class NpuBackend(Backend):
    """torch_npu's device on torch's generic paths; nothing here is proven on a device yet."""

    devices = NpuDeviceMap(visible_variable=VISIBLE, ray_resource="NPU")
