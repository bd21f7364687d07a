"""Weights that a worker process takes out of the rollout process's memory; needs no vLLM."""

from __future__ import annotations

import pickle

import torch

from hwrl.comm import connect_store, serve_store, store_address
from hwrl.discovery import get_backend
from hwrl.testing.processes import run_processes
from hwrl_vllm.worker import Lent

WEIGHTS = {
    "matrix": torch.arange(35, dtype=torch.bfloat16).view(5, 7),
    "scale": torch.tensor(0.5),
    "flags": torch.tensor([True, False, True]),
}


def lend_or_open(rank: int, address: str) -> bool:
    backend, store = get_backend(), connect_store(address)
    if rank == 0:
        mine = {name: tensor.to(backend.device()) for name, tensor in WEIGHTS.items()}
        lent = pickle.dumps({name: Lent.of(tensor, backend) for name, tensor in mine.items()})
        store.set("lent", lent)  # type: ignore[arg-type]  # torch's stub knows str only
        backend.synchronize()
        store.wait(["read"])
        return True
    theirs: dict[str, Lent] = pickle.loads(store.get("lent"))
    opened = {name: one.open(backend).cpu() for name, one in theirs.items()}
    store.set("read", "yes")
    same = [
        torch.equal(opened[name], tensor) and opened[name].dtype == tensor.dtype for name, tensor in WEIGHTS.items()
    ]
    return all(same) and opened.keys() == WEIGHTS.keys()


def test_another_process_opens_what_is_lent_with_dtype_and_shape() -> None:
    store = serve_store()
    assert run_processes(lend_or_open, 2, store_address(store), timeout_s=120.0) == [True, True]
