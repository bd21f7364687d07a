"""Weights that a worker process takes out of the rollout process's memory; needs no vLLM."""

from __future__ import annotations

import pickle

import torch

from hwrl.comm import connect_store, serve_store, store_address
from hwrl.discovery import get_backend
from hwrl.testing.processes import run_processes
from hwrl_vllm.worker import LentWeights

TOGETHER = torch.arange(64, dtype=torch.bfloat16)
WEIGHTS = {
    "matrix": torch.arange(35, dtype=torch.bfloat16).view(5, 7),
    "scale": torch.tensor(0.5),
    "flags": torch.tensor([True, False, True]),
    "front": TOGETHER[:24].view(2, 12),  # two tensors of one storage, as a receiver gives them
    "back": TOGETHER[24:].view(4, 10),
}


def lend_or_open(rank: int, address: str) -> bool:
    backend, store = get_backend(), connect_store(address)
    if rank == 0:
        together = TOGETHER.to(backend.device())
        mine = {name: tensor.to(backend.device()) for name, tensor in WEIGHTS.items()}
        mine |= {"front": together[:24].view(2, 12), "back": together[24:].view(4, 10)}
        lent = LentWeights.of(mine, backend)
        assert len(lent.handles) == 4
        store.set("lent", pickle.dumps(lent))  # type: ignore[arg-type]  # torch's stub knows str only
        backend.synchronize()
        store.wait(["read"])
        return True
    theirs: LentWeights = pickle.loads(store.get("lent"))
    opened = {name: tensor.cpu() for name, tensor in theirs.open(backend).items()}
    store.set("read", "yes")
    same = [
        torch.equal(opened[name], tensor) and opened[name].dtype == tensor.dtype for name, tensor in WEIGHTS.items()
    ]
    return all(same) and opened.keys() == WEIGHTS.keys()


def test_another_process_opens_what_is_lent_with_dtype_and_shape() -> None:
    store = serve_store()
    assert run_processes(lend_or_open, 2, store_address(store), timeout_s=1200.0) == [True, True]
