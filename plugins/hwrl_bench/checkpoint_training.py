"""The training of ``hwrl bench checkpoint``: a state of a given size, and a step to change all of it."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from hwrl import get_backend
from hwrl.memory import HostCopy, Offloader, PinnedPool
from hwrl_bench.checkpoint_ways import SaveWorkload
from hwrl_bench.offload import NBYTES_OF_A_PARAMETER, language_model

State = dict[str, dict[str, torch.Tensor]]


class BenchTraining:
    """Parameters in the shapes of a language model, AdamW's state for them, and a step to change both."""

    def __init__(self, workload: SaveWorkload) -> None:
        self.backend = get_backend()
        self.backend.set_device(0)
        self._tokens = workload.tokens
        self._model = language_model(workload.nbytes // NBYTES_OF_A_PARAMETER, device=self.backend.device())
        self._optimizer = torch.optim.AdamW(self._model)
        self.offloader = Offloader(self._model, self._optimizer, backend=self.backend)
        for _ in range(2):  # the first allocates
            self.step()
        tensors = [tensor for part in self.state().values() for tensor in part.values()]
        self.nbytes = sum(tensor.nbytes for tensor in tensors)
        self.offloader.offload(params=workload.offload == "all", optimizer=workload.offload != "none")
        self.staged_nbytes = sum(tensor.nbytes for tensor in tensors if tensor.untyped_storage().nbytes())
        self._flat = torch.ones(self.staged_nbytes, dtype=torch.uint8, device=self.backend.device())
        self._pool = PinnedPool(self.backend)
        self._pinned = self._pool.slab("raw", nbytes=self.staged_nbytes)[: self.staged_nbytes]
        self.copy_raw()

    def step(self, before_change: Callable[[], object] = lambda: None) -> float:
        """Compute gradients, call ``before_change``, run the optimizer; return the seconds of all of it."""
        begin = time.perf_counter()
        with self.offloader.loaded():
            for weight in self._model:
                inputs = torch.ones(self._tokens, weight.shape[-1], device=weight.device)
                with torch.no_grad():
                    outputs = inputs @ weight.T if weight.dim() == 2 else inputs * weight
                    weight.grad = (outputs.T @ inputs).tanh() if weight.dim() == 2 else outputs.sum(0).tanh()
            before_change()
            self._optimizer.step()
            self._optimizer.zero_grad()
        self.backend.synchronize()
        return time.perf_counter() - begin

    def copy_raw(self) -> float:
        """Copy as many bytes as a save stages from the device to pinned memory at once; return the seconds."""
        self.backend.synchronize()
        begin = time.perf_counter()
        self._pinned.copy_(self._flat, non_blocking=True)
        self.backend.synchronize()
        return time.perf_counter() - begin

    def state(self) -> State:
        """Return the tensors to save. Offloaded tensors have no memory."""
        model = {str(number): weight.detach() for number, weight in enumerate(self._model)}
        moments = {
            f"{number}.{name}": value
            for number, weight in enumerate(self._model)
            for name, value in self._optimizer.state[weight].items()
        }
        return {"model": model, "optimizer": moments}

    def host_state(self) -> tuple[State, list[HostCopy]]:
        """Return the tensors to save, with the host copies in place of offloaded tensors, and these copies' loans."""
        state, loans = self.state(), []
        for part in state.values():
            for name, tensor in part.items():
                if (copy := self.offloader.lend(tensor)) is not None:
                    part[name] = copy.tensor
                    loans.append(copy)
        return state, loans
