"""Ranks of torch's default group, each a process of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hwrl.comm import Comm, connect_store, serve_store, store_address
from hwrl.testing.processes import run_processes
from hwrl_cpu import INFO, CpuBackend

BACKEND = CpuBackend(INFO)


def on_ranks(target: Callable[..., Any], size: int, *args: Any) -> list[Any]:
    """Run ``target(group, *args)`` on each rank, and return the results."""
    store = serve_store()
    return run_processes(_on_rank, size, store_address(store), target, size, *args, timeout_s=1500)


def _on_rank(rank: int, address: str, target: Callable[..., Any], size: int, *args: Any) -> Any:
    with Comm(BACKEND).init_default(store=connect_store(address), rank=rank, size=size) as group:
        return target(group, *args)
