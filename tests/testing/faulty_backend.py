"""A backend with one fault, named by HWRL_FAULT: the conformance kit must catch each of them."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import hwrl
import hwrl_cpu
from hwrl.errors import UnsupportedError
from hwrl.interfaces import (
    Backend,
    BackendInfo,
    Capability,
    DeviceMap,
    InlineEvent,
    InlineStream,
    Kernels,
    MemoryInfo,
    ProbeContext,
    ProbeResult,
    Support,
)

INFO = BackendInfo(name="faulty", device_type="cpu", description="the reference backend with one fault", api=(1, 0))

if os.environ.get("HWRL_FAULT") == "module imports torch":
    import torch


def fault(name: str) -> bool:
    return os.environ.get("HWRL_FAULT") == name


@hwrl.hookimpl
def hwrl_backend_info() -> BackendInfo:
    return replace(INFO, device_type="meta") if fault("info is another") else INFO


@hwrl.hookimpl
def hwrl_probe(context: ProbeContext) -> ProbeResult:
    if fault("probe imports torch"):
        import torch  # noqa: F401 - the fault
    if fault("probe is slow"):
        time.sleep(0.1 * float(os.environ.get("HWRL_TIMEOUT_SCALE", "1")))  # the kit multiplies its limit by it, too
    if fault("probe changes the environment"):
        os.environ["FAULTY_WAS_HERE"] = "1"
    if fault("probe raises"):
        context.env["FAULTY_HOME"]
    if fault("probe says Yes"):
        return ProbeResult("Yes", "it always runs")  # type: ignore[arg-type] # the fault
    if fault("probe gives no reason"):
        return ProbeResult("yes", "")
    if not context.has_module("torch") and not fault("probe says yes to nothing"):
        return ProbeResult("no", "torch is not installed")
    return ProbeResult("yes", "it always runs")


@hwrl.hookimpl
def hwrl_create_backend() -> Backend:
    return FaultyBackend(INFO)


@hwrl.hookimpl
def hwrl_kernels() -> Kernels:
    from torch.nn import functional

    def rms_norm(x: Any, weight: Any, eps: float) -> Any:
        eps = 0.0 if fault("rms_norm ignores eps") else eps
        weight = weight.detach() if fault("rms_norm has no gradient of its weight") else weight
        return functional.rms_norm(x, (x.shape[-1],), weight, eps)

    def swiglu(gate: Any, up: Any) -> Any:
        return functional.silu(up) * gate if fault("swiglu confuses its inputs") else functional.silu(gate) * up

    return Kernels(rms_norm=rms_norm, swiglu=swiglu)


class FaultyDeviceMap(DeviceMap):
    def render(self, physical: Sequence[int]) -> dict[str, str]:
        return super().render(physical[:1] if fault("devices are dropped") else physical)

    def ray_options(self, count: float) -> dict[str, Any]:
        return {} if fault("nothing is reserved") else super().ray_options(count)


class LateEvent(InlineEvent):
    def elapsed_time(self, end: InlineEvent) -> float:
        return -1.0


class OtherUnit(InlineEvent):
    def elapsed_time(self, end: InlineEvent) -> float:
        return super().elapsed_time(end) * (1e-3 if fault("events measure seconds") else 1e3)


class ForgetfulStream(InlineStream):
    def query(self) -> bool:
        return False


class SideStream(InlineStream):
    """Claims, as a device with streams does, that its work is done only after ``synchronize``."""

    done = True

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self.done = True

    def __exit__(self, *exc: object) -> None:
        self.done = False


class FaultyBackend(hwrl_cpu.CpuBackend):
    devices = FaultyDeviceMap(visible_variable="FAULTY_VISIBLE_DEVICES", ray_resource="FAULTY")

    def __init__(self, info: BackendInfo) -> None:
        super().__init__(info)
        self._shared: Any = None
        self._most_nbytes = 0

    def supports(self, capability: Capability) -> Support:
        if fault("no reason for a capability"):
            return replace(super().supports(capability), reason="")
        if capability is Capability.COLLECTIVES and fault("it has no collectives"):
            return Support("unsupported", "nobody wrote the library")
        if capability is Capability.REDUCE_AVERAGE and fault("it says that it cannot average"):
            return Support("unsupported", "the library only sums")
        if capability is Capability.COMM_ABORT and fault("an unsupported abort does nothing"):
            return Support("unsupported", "the library cannot")
        compiling = capability is Capability.COMPILED_TRAINING and (
            fault("compiling raises") or fault("compiled code is wrong")
        )
        if compiling or fault(f"it claims {capability.value}") or fault(f"it has {capability.value}"):
            return Support("supported", "so it says")
        return super().supports(capability)

    def require(self, capability: Capability, *, needed_for: str) -> None:
        if not fault("require never raises"):
            super().require(capability, needed_for=needed_for)

    def device_count(self) -> int:
        return 0 if fault("no device") else 1

    def event(self, *, timing: bool = False) -> InlineEvent:
        if fault("events measure seconds") or fault("events measure microseconds"):
            return OtherUnit(self.synchronize)
        return LateEvent(self.synchronize) if fault("time runs backwards") else super().event(timing=timing)

    def stream(self) -> InlineStream:
        return SideStream(self.synchronize) if fault("it has streams") else super().stream()

    def current_stream(self) -> InlineStream:
        return ForgetfulStream(self.synchronize) if fault("a stream never ends") else super().current_stream()

    def varlen_attention(self, query: Any, key: Any, value: Any, **where: Any) -> Any:
        if fault("varlen attention sees its neighbours"):
            where |= {"cu_seqlens": where["cu_seqlens"][[0, -1]], "max_length": len(query)}
        if fault("varlen attention sees the future"):
            query, key, value = query.flip(0), key.flip(0), value.flip(0)
            where["cu_seqlens"] = len(query) - where["cu_seqlens"].flip(0)
            return super().varlen_attention(query, key, value, **where).flip(0)
        if fault("it has varlen_attention"):
            return fused_attention()(query, key, value, where["cu_seqlens"], where["max_length"])
        if fault("varlen attention has a wrong gradient"):
            key = key.detach()
        return super().varlen_attention(query, key, value, **where)

    def peak_flops(self, dtype: Any) -> float | None:
        return 989.0 if fault("the peak is in TFLOP/s") else super().peak_flops(dtype)

    def rng_state(self) -> Any:
        state = super().rng_state()
        return state.float() if fault("random state is not bytes") else state

    def set_rng_state(self, state: Any) -> None:
        if not fault("random state is not restored"):
            super().set_rng_state(state)

    def seed(self, value: int) -> None:
        super().seed(0 if fault("every seed is the same") else value)

    def pinned_empty(self, nbytes: int) -> Any:
        import torch

        if fault("pinned memory is not host memory"):
            return torch.empty(nbytes, dtype=torch.uint8, device="meta")
        if fault("pinned memory is device memory"):
            return torch.empty(nbytes, dtype=torch.uint8)
        if fault("pinned memory is too small"):
            return super().pinned_empty(max(0, nbytes - 1))
        if fault("pinned memory is not aligned"):
            return super().pinned_empty(nbytes + 1)[1:]
        if fault("pinned memory is handed out twice"):
            return self._same_again(nbytes)
        return super().pinned_empty(nbytes)

    def register_host_memory(self, memory: Any) -> None:
        super().register_host_memory(memory)
        if fault("registered memory loses its bytes"):
            memory.zero_()

    def _same_again(self, nbytes: int) -> Any:
        if self._shared is None or len(self._shared) < nbytes:
            self._shared = super().pinned_empty(nbytes)
        return self._shared[:nbytes]

    def memory_info(self) -> MemoryInfo:
        info = super().memory_info()
        self._most_nbytes = max(self._most_nbytes, info.reserved_nbytes)
        if fault("freed memory is not freed"):
            return replace(info, allocated_nbytes=self._most_nbytes, reserved_nbytes=self._most_nbytes)
        if fault("cached memory is not given back"):
            return replace(info, reserved_nbytes=self._most_nbytes)
        if fault("more is free than there is"):
            return replace(info, free_nbytes=info.total_nbytes + 1)
        return info

    def export_memory(self, memory: Any) -> Any:
        return {} if fault("anything is exported") else super().export_memory(memory)

    def _export_memory(self, memory: Any) -> Any:
        handle = super()._export_memory(memory)
        return {**handle, "offset": 0} if fault("an exported part is the whole") else handle

    def open_memory(self, handle: Any) -> Any:
        try:
            opened = super().open_memory(handle)
        except hwrl.HwrlError as error:
            own = isinstance(error, UnsupportedError)
            if fault("the exporter opens its own memory" if own else "a damaged handle is opened"):
                return super().pinned_empty(8)
            raise
        return opened.clone() if fault("opened memory is a copy") else opened

    def group_library(self) -> str:
        import torch.distributed as dist

        if fault("it cannot average") or fault("it says that it cannot average"):
            dist.Backend.register_backend("summer", summer, extended_api=True, devices=["cpu"])
            return "summer"
        if not fault("the library only reduces"):
            return super().group_library()
        if "reducer" not in dist.Backend.backend_list:
            dist.Backend.register_backend("reducer", reducer, devices=["cpu"])
        return "reducer"

    def create_process_group(self, store: Any, **place: Any) -> Any:
        group = super().create_process_group(store, **place)
        if fault("a dead peer goes unnoticed"):
            return DeafGroup(group)
        return MuteGroup(group) if fault("a broadcast does nothing") else group

    def abort_process_group(self, group: Any) -> None:
        if fault("abort does nothing") or fault("an unsupported abort does nothing"):
            return
        super().abort_process_group(getattr(group, "whole", group))


@functools.cache
def fused_attention() -> Any:
    """Return an operation that computes a pack as a device's kernel does: in one piece, as torch sees it."""
    import torch

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ends: torch.Tensor, longest: int) -> torch.Tensor:
        return hwrl_cpu.CpuBackend(INFO).varlen_attention(q, k, v, cu_seqlens=ends, max_length=longest)

    schema = "(Tensor q, Tensor k, Tensor v, Tensor ends, int longest) -> Tensor"
    return torch.library.custom_op("faulty::attend", attend, mutates_args=(), schema=schema)


def compiled_with(right: Callable[..., Any]) -> Callable[..., Any]:
    """Return torch.compile, ``right``, with the faults of a device's compiler."""

    def compile(function: Any, **settings: Any) -> Any:
        if fault("compiling raises"):
            raise RuntimeError("no compiler for this device")
        if fault("it claims compiled_training"):  # it compiles nothing, and costs something
            return lambda x: function(function(x) * 0 + x)
        if fault("compiled code is wrong"):
            return lambda x: x * 2
        return right(function, **settings)

    return compile


def attention_over(right: Callable[..., Any]) -> Callable[..., Any]:
    """Return torch's attention ``right`` with the faults of a device's kernel: the CPU's own has none."""

    def attention(*inputs: Any, **settings: Any) -> Any:
        if fault("attention sees the future"):
            return right(*inputs, **settings | {"is_causal": False})
        out = right(*inputs, **settings)
        return out * 0 + 1e-3 if fault("attention returns what was in memory") else out

    return attention


def reducer(store: Any, rank: int, size: int, timeout: Any) -> Any:
    """Return a process group that has all_reduce and nothing else."""
    import torch.distributed as dist

    whole: Any = dist.ProcessGroupGloo(store, rank, size, timeout)
    base: Any = dist.ProcessGroup

    class Reducer(base):  # type: ignore[misc] # torch's stubs lack its shorter initializer
        def getBackendName(self) -> str:
            return "reducer"

        def allreduce(self, tensors: Any, options: Any) -> Any:
            return whole.allreduce(tensors, options)

    return Reducer(rank, size)


def summer(options: Any, _: Any) -> Any:
    """Return a process group that has every operation, and no average."""
    import torch.distributed as dist

    from hwrl.comm.staged import StagedGroup

    class Summer(StagedGroup):
        def _run(self, operation: str, *args: Any, **settings: Any) -> Any:
            if any(getattr(arg, "reduceOp", None) == dist.ReduceOp.AVG for arg in args):
                raise RuntimeError("this library has no ReduceOp.AVG")
            return super()._run(operation, *args, **settings)

    host, name = hwrl_cpu.CpuBackend(INFO), str(options.group_id)
    place = {"rank": options.group_rank, "size": options.group_size, "timeout": options.timeout}
    return Summer(host.create_process_group(options.store, name=name, **place), host, "cpu", name=name)


@dataclass
class MuteGroup:
    """A process group whose broadcasts leave every tensor as it was."""

    whole: Any

    def broadcast(self, *args: Any) -> None:
        """Do nothing."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        found: Callable[..., Any] = getattr(self.whole, name)
        return found


class DeafGroup(MuteGroup):
    """A process group whose broadcasts end well whatever happens."""

    def broadcast(self, *args: Any) -> Any:
        """Broadcast, and keep what goes wrong to itself."""
        try:
            self.whole.broadcast(*args).wait()
        except RuntimeError:
            time.sleep(0.05)  # its callers go on and on, and need no whole processor for it
