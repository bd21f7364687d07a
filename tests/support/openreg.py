"""hwrl on torch_openreg, PyTorch's reference device: two devices, which compute on the host.

This is a whole backend. Each method below is there for a gap of torch_openreg 2.10. Its attention returns uninitialised
memory, so torch's general one replaces it; with OPENREG_STUB it stays, and hwrl must find that out.
"""

import os
from dataclasses import replace
from typing import Any

import hwrl
from hwrl.discovery import host_backend
from hwrl.interfaces import Backend, BackendInfo, MemoryInfo, ProbeContext, ProbeResult

INFO = BackendInfo("openreg", "openreg", "PyTorch's reference device, on the host", api=(1, 0))


@hwrl.hookimpl
def hwrl_backend_info() -> BackendInfo:
    return INFO


@hwrl.hookimpl
def hwrl_probe(context: ProbeContext) -> ProbeResult:
    if context.has_module("torch_openreg"):
        return ProbeResult("yes", "torch_openreg is installed", rank=50)
    return ProbeResult("no", "torch_openreg is not installed")


@hwrl.hookimpl
def hwrl_create_backend() -> Backend:
    import torch
    import torch_openreg  # type: ignore[import-not-found]  # noqa: F401 - it registers the device

    if "OPENREG_STUB" not in os.environ:
        for key in ("PrivateUse1", "AutogradPrivateUse1"):
            torch.library.impl("aten::scaled_dot_product_attention", key, _attend)
    return OpenregBackend(INFO)


class OpenregBackend(Backend):
    """torch's generic device, with the host's numbers where torch_openreg has none."""

    def memory_info(self) -> MemoryInfo:
        import torch

        used = torch.accelerator.memory_stats()["allocated_bytes.all.current"]
        peak = torch.accelerator.memory_stats()["allocated_bytes.all.peak"]
        return replace(host_backend().memory_info(), allocated_nbytes=used, reserved_nbytes=used, peak_nbytes=peak)

    def rng_state(self) -> Any:
        return host_backend().rng_state()  # torch.rand on openreg is computed by the host

    def seed(self, value: int) -> None:
        host_backend().seed(value)

    def set_rng_state(self, state: Any) -> None:
        host_backend().set_rng_state(state)


def _attend(query: Any, key: Any, value: Any, attn_mask: Any = None, *more: Any, **options: Any) -> Any:
    import torch

    if attn_mask is not None and attn_mask.dtype is torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, float("-inf"))
    return torch.ops.aten._scaled_dot_product_attention_math(query, key, value, attn_mask, *more, **options)[0]
