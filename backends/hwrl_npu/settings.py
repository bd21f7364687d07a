"""Environment variables of NPUs: checks for ``hwrl doctor``, and the variables of a worker."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from hwrl.errors import ConfigError
from hwrl.interfaces import DeviceMap, Finding, ProbeContext

VISIBLE = "ASCEND_RT_VISIBLE_DEVICES"
ALLOCATOR = ("PYTORCH_NPU_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""The variables with the allocator's settings: torch_npu's own, and torch's, read by newer torch_npu."""
_SHOWN = (VISIBLE, "ASCEND_HOME_PATH", *ALLOCATOR, "HCCL_CONNECT_TIMEOUT", "HCCL_EXEC_TIMEOUT", "TASK_QUEUE_ENABLE")
_PORTS = {"HCCL_HOST_SOCKET_PORT_RANGE": "HCCL_IF_BASE_PORT", "HCCL_NPU_SOCKET_PORT_RANGE": ""}
"""HCCL's port ranges, each with an older variable for the same setting."""
_DEFAULT_BUFFER_MB = 200
_DRIVER_FILE = "usr/local/Ascend/driver/version.info"
_DRIVER_FOR_IPC = (25, 3)


class NpuDeviceMap(DeviceMap):
    """NPU numbers, in strictly ascending order: for 1,0 the runtime shows no device at all."""

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


DEVICES = NpuDeviceMap(visible_variable=VISIBLE, ray_resource="NPU")


def worker(role: str, env: Mapping[str, str], *, exports_memory: bool, shares_device: bool) -> dict[str, str]:
    """Return the variables of a worker; see :func:`hwrl.discovery.hookspecs.hwrl_process_env`.

    Never set the allocator's settings under a second name: torch_npu refuses to start with both, even if one is empty.
    """
    wanted = {}
    if role == "trainer" and not exports_memory and not any(name in env for name in ALLOCATOR):
        wanted[ALLOCATOR[0]] = "expandable_segments:True"
    if shares_device:  # otherwise all processes of a device use the same ports
        wanted |= {ports: "auto" for ports, older in _PORTS.items() if older not in env}
    return wanted


def uses_expandable_segments(env: Mapping[str, str]) -> bool:
    """Return whether the allocator uses expandable segments. Other processes cannot open these."""
    return "expandable_segments:True" in "".join(env.get(name, "") for name in ALLOCATOR).replace(" ", "")


def findings(context: ProbeContext, *, devices: int) -> Iterator[Finding]:
    """Yield lines for ``hwrl doctor`` on a machine with this number of ``devices``."""
    env = context.env
    yield from (Finding("info", f"{name}={env[name]}") for name in _SHOWN if name in env)
    if not devices:
        return
    yield _communicator_cost(env)
    if "ASCEND_HOME_PATH" not in env:
        yield Finding("warning", "ASCEND_HOME_PATH is not set: CANN is not sourced", fix="source CANN's set_env.sh")
    if env.get("ASCEND_LAUNCH_BLOCKING") == "1":
        yield Finding("warning", "ASCEND_LAUNCH_BLOCKING=1: nothing overlaps", fix="unset ASCEND_LAUNCH_BLOCKING")
    if "RANK_TABLE_FILE" in env:
        yield Finding("error", "RANK_TABLE_FILE fixes every group's ranks, so weights cannot travel", "unset it")
    yield from _device_list(env, devices=devices)
    yield from _allocator(env)
    yield from _ports(env)
    yield from _versions(context)
    yield from _driver(context)


def _communicator_cost(env: Mapping[str, str]) -> Finding:
    size = env.get("HCCL_BUFFSIZE", str(_DEFAULT_BUFFER_MB))
    cost = f"{2 * int(size)} MB" if size.isdecimal() else f"twice {size}"
    return Finding("info", f"each HCCL communicator takes {cost} of device memory (2 x HCCL_BUFFSIZE={size})")


def _device_list(env: Mapping[str, str], *, devices: int) -> Iterator[Finding]:
    try:
        ids = DEVICES.visible(env) or ()
    except ConfigError as error:
        yield Finding("error", f"{error.what}: {error.why}", fix=error.fix)
        return
    absent = [index for index in ids if index >= devices]
    if absent:
        yield Finding(
            "error",
            f"{VISIBLE}={env[VISIBLE]} names {', '.join(map(str, absent))}, which the runtime drops without a word",
            fix=f"this machine shows {devices} devices: use numbers below {devices}",
        )


def _allocator(env: Mapping[str, str]) -> Iterator[Finding]:
    if all(name in env for name in ALLOCATOR):
        both = " and ".join(ALLOCATOR)
        yield Finding(
            "error", f"{both} are both set: torch_npu refuses that, even if one is empty", f"unset {ALLOCATOR[1]}"
        )
    against = [key for key in ("max_split_size_mb", "garbage_collection_threshold") if _mentions(env, key)]
    if against and uses_expandable_segments(env):
        yield Finding("error", f"expandable_segments goes with no {' and no '.join(against)}", "take one of them out")


def _mentions(env: Mapping[str, str], key: str) -> bool:
    return any(key in env.get(name, "") for name in ALLOCATOR)


def _ports(env: Mapping[str, str]) -> Iterator[Finding]:
    for ports, older in _PORTS.items():
        fixed = next((name for name in (ports, older) if env.get(name) not in (None, "", "auto")), None)
        if fixed:
            yield Finding(
                "warning",
                f"{fixed}={env[fixed]}: all processes of a shared device take their ports from it, and some may fail",
                fix=f"unset {fixed}: hwrl sets {ports}=auto where processes share a device",
            )


def _driver(context: ProbeContext) -> Iterator[Finding]:
    """Tell the driver's version, by its file. Containers see it if it is mounted there."""
    file = context.root / _DRIVER_FILE
    found = re.search(r"^Version=(\d+)\.(\S+)", file.read_text(errors="replace"), re.M) if file.is_file() else None
    if found is None:
        return
    major, minor = int(found[1]), int(re.match(r"\d*", found[2])[0] or 0)  # type: ignore[index]  # it always matches
    version = f"{found[1]}.{found[2]}"
    yield Finding("info", f"driver {version}")
    if (major, minor) < _DRIVER_FOR_IPC:
        wanted = ".".join(map(str, _DRIVER_FOR_IPC))
        yield Finding(
            "warning",
            f"the driver {version} is older than {wanted}: no process can open the device memory of another one",
            fix=f"install HDK {wanted} or newer; until then set weights.bypass_cpu=false",
        )


def _versions(context: ProbeContext) -> Iterator[Finding]:
    torch, torch_npu = (version_of(context, name) for name in ("torch", "torch_npu"))
    if torch and torch_npu and torch != torch_npu:
        yield Finding("error", f"torch_npu {torch_npu} is not made for torch {torch}", f"install torch_npu {torch}.*")


def version_of(context: ProbeContext, module: str) -> str:
    """Return the first two numbers of an installed module's version, '' if not found. Imports nothing."""
    texts = (context.module_text(module, file) or "" for file in ("_version.py", "version.py"))
    found = re.search(r"version(?:__)?\s*=\s*['\"](\d+\.\d+)", "\n".join(texts))
    return found.group(1) if found else ""
