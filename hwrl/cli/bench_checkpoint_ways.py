"""The ways of saving that ``hwrl bench checkpoint`` compares, each in a process of its own, through its own code."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch

    from hwrl.memory import HostCopy

_NBYTES_OF_A_PARAMETER = 12  # float32, with AdamW's two moments


@dataclass(frozen=True)
class Plan:
    """What every way is measured with: bytes of the state, what is offloaded, tokens of a step, where to save.

    ``rollout_s`` is how long the trainer idles between a save and the next step, as it does for a rollout; ``staging``
    is where hwrl copies what is on the device.
    """

    nbytes: int
    offload: Literal["none", "optimizer", "all"]
    tokens: int
    rollout_s: float
    staging: Literal["host", "device"]
    directory: Path


class Training:
    """Parameters in the shapes of a language model, AdamW's state for them, and a step that changes both."""

    def __init__(self, plan: Plan) -> None:
        import torch

        from hwrl.cli.bench_offload import language_model
        from hwrl.discovery import get_backend
        from hwrl.memory import Offloader, PinnedPool

        self.backend = get_backend()
        self.backend.set_device(0)
        self._tokens = plan.tokens
        self._model = language_model(plan.nbytes // _NBYTES_OF_A_PARAMETER, device=self.backend.device())
        self._optimizer = torch.optim.AdamW(self._model)
        self.offloader = Offloader(self._model, self._optimizer, backend=self.backend)
        for _ in range(2):  # the first allocates
            self.step()
        tensors = [tensor for part in self.state().values() for tensor in part.values()]
        self.nbytes = sum(tensor.nbytes for tensor in tensors)
        self.offloader.offload(params=plan.offload == "all", optimizer=plan.offload != "none")
        self.staged_nbytes = sum(tensor.nbytes for tensor in tensors if tensor.untyped_storage().nbytes())
        self._flat = torch.ones(self.staged_nbytes, dtype=torch.uint8, device=self.backend.device())
        self._pool = PinnedPool(self.backend)
        self._pinned = self._pool.slab("raw", nbytes=self.staged_nbytes)[: self.staged_nbytes]
        self.copy_raw()

    def step(self, before_change: Callable[[], object] = lambda: None) -> float:
        """Compute gradients, call ``before_change``, let the optimizer step; return the seconds of all of it."""
        import torch

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

    def state(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return the tensors to save; what is offloaded has no memory."""
        model = {str(number): weight.detach() for number, weight in enumerate(self._model)}
        moments = {
            f"{number}.{name}": value
            for number, weight in enumerate(self._model)
            for name, value in self._optimizer.state[weight].items()
        }
        return {"model": model, "optimizer": moments}

    def host_state(self) -> tuple[dict[str, dict[str, torch.Tensor]], list[HostCopy]]:
        """Return the tensors to save, those that are offloaded as they lie on the host, and the loans of these."""
        state, loans = self.state(), []
        for part in state.values():
            for name, tensor in part.items():
                if (copy := self.offloader.lend(tensor)) is not None:
                    part[name] = copy.tensor
                    loans.append(copy)
        return state, loans


class Way(ABC):
    """One way of saving asynchronously; the constructor allocates nothing that a save could."""

    def __init__(self, training: Training, plan: Plan, directory: Path) -> None:
        self.training, self.directory = training, directory

    @classmethod
    def why_not(cls, plan: Plan) -> str | None:
        """Return why it cannot be tried, or None."""
        return None

    @abstractmethod
    def save(self, step: int) -> None:
        """Begin to save; returns when the way lets the trainer go on."""

    def before_change(self) -> None:  # noqa: B027 - most have copied all when save returns
        """Block until the state may be changed."""

    @abstractmethod
    def wait(self) -> None:
        """Block until the save is complete; raise what it failed with."""

    def close(self) -> None:  # noqa: B027 - most have nothing to close
        """Let go of what the way holds."""


class _Hwrl(Way):
    """``CheckpointManager(async_save=True)``."""

    def __init__(self, training: Training, plan: Plan, directory: Path) -> None:
        from hwrl.checkpoint import CheckpointManager

        super().__init__(training, plan, directory)
        self._manager = CheckpointManager(
            directory, async_save=True, staging=plan.staging, max_ckpt_to_keep=1, backend=training.backend
        )

    def save(self, step: int) -> None:
        self._manager.save(step, self.training.state(), offloader=self.training.offloader)

    def wait(self) -> None:
        self._manager.wait()

    def close(self) -> None:
        self._manager.close()


class _Peer(Way):
    """A way that takes the state as tensors with memory, and needs a default process group."""

    def __init__(self, training: Training, plan: Plan, directory: Path) -> None:
        import torch.distributed as dist

        from hwrl.comm import HashStore

        super().__init__(training, plan, directory)
        devices = dict.fromkeys(["cpu", training.backend.info.device_type])  # torch's own writers talk over the CPU's
        libraries = ",".join(f"{device}:{dist.get_default_backend_for_device(device)}" for device in devices)
        dist.init_process_group(libraries, store=HashStore(), rank=0, world_size=1)
        self._loans: list[HostCopy] = []
        self._saved: list[Path] = []

    def save(self, step: int) -> None:
        state, self._loans = self.training.host_state()
        self._saved.append(self.directory / str(step))
        self.begin(state, self._saved[-1])

    def before_change(self) -> None:
        for loan in self._loans:
            loan.give_back()

    def wait(self) -> None:
        self.complete()
        while len(self._saved) > 1:
            shutil.rmtree(self._saved.pop(0))

    @abstractmethod
    def begin(self, state: dict[str, dict[str, torch.Tensor]], directory: Path) -> None:
        """Begin to save ``state``."""

    @abstractmethod
    def complete(self) -> None:
        """Block until what was begun is complete."""


class _TorchThread(_Peer):
    """``torch.distributed.checkpoint.async_save`` with its thread."""

    executor = "THREAD"
    response: Any

    def begin(self, state: dict[str, dict[str, torch.Tensor]], directory: Path) -> None:
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save

        self.response = async_save(
            state,
            checkpoint_id=directory,
            async_checkpointer_type=AsyncCheckpointerType[self.executor],
            **self.options(),
        )

    def options(self) -> dict[str, Any]:
        """Return more arguments for ``async_save``."""
        return {}

    def complete(self) -> None:
        getattr(self.response, "upload_completion", self.response).result()


class _TorchProcess(_TorchThread):
    """The same with a process that torch starts."""

    executor = "PROCESS"


class _TorchSharedMemory(_TorchProcess):
    """The same with torch's stager: shared memory, and where there is an accelerator pinned and filled beside it."""

    @classmethod
    def why_not(cls, plan: Plan) -> str | None:
        import torch
        from torch.distributed.checkpoint import staging

        return None if hasattr(staging, "StagingOptions") else f"torch {torch.__version__} has no shared-memory stager"

    def __init__(self, training: Training, plan: Plan, directory: Path) -> None:
        import torch
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        super().__init__(training, plan, directory)
        beside = torch.accelerator.is_available()
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=beside,
                use_shared_memory=True,
                use_async_staging=beside,
                use_non_blocking_copy=beside,
            )
        )

    def options(self) -> dict[str, Any]:
        return {"async_stager": self._stager}

    def before_change(self) -> None:
        if hasattr(self.response, "staging_completion"):
            self.response.staging_completion.result()
        super().before_change()

    def close(self) -> None:
        self._stager.close()


class _MegatronFork(_Peer):
    """Megatron-core's ``dist_checkpointing.save`` with its forked writers."""

    @classmethod
    def why_not(cls, plan: Plan) -> str | None:
        if not any(importlib.metadata.packages_distributions().get("megatron", [])):  # looks, and imports nothing
            return "megatron-core is not installed"
        if plan.offload != "none":
            return "it forks, and what is offloaded lies in a shared mapping, of which a fork makes no copy"
        return None

    def __init__(self, training: Training, plan: Plan, directory: Path) -> None:
        super().__init__(training, plan, directory)
        self._library: Any = importlib.import_module("megatron.core.dist_checkpointing")
        queues: Any = importlib.import_module("megatron.core.dist_checkpointing.strategies.async_utils")
        self._queue = queues.AsyncCallsQueue()

    def begin(self, state: dict[str, dict[str, torch.Tensor]], directory: Path) -> None:
        directory.mkdir()
        sharded = {
            f"{part}.{name}": self._library.ShardedTensor.from_rank_offsets(f"{part}.{name}", tensor)
            for part, tensors in state.items()
            for name, tensor in tensors.items()
        }
        self._queue.schedule_async_request(self._library.save(sharded, str(directory), async_sharded_save=True))

    def complete(self) -> None:
        self._queue.maybe_finalize_async_calls(blocking=True)

    def close(self) -> None:
        self._queue.close()


WAYS: dict[str, type[Way]] = {
    "hwrl": _Hwrl,
    "dcp thread": _TorchThread,
    "dcp process": _TorchProcess,
    "dcp shared memory": _TorchSharedMemory,
    "megatron fork": _MegatronFork,
}


def serve(pipe: Connection, name: str, plan: Plan) -> None:
    """Do what ``pipe`` asks for until it says ``end``; whatever this process starts is in a session with it."""
    from hwrl.cli.bench_peers import one_line

    os.setsid()
    try:
        training = Training(plan)
        pipe.send({"payload_nbytes": training.nbytes, "staged_nbytes": training.staged_nbytes})
        rounds = _Rounds(training, name, plan)
        while (asked := pipe.recv()) != "end":
            pipe.send(getattr(rounds, asked)())
        rounds.close()
    except Exception as exc:  # noqa: BLE001 - whatever a foreign way raises is its line in the table
        pipe.send(one_line(exc))


class _Rounds:
    """What a way's process can be asked for."""

    def __init__(self, training: Training, name: str, plan: Plan) -> None:
        self._training, self._kind, self._plan = training, WAYS[name], plan
        self._directory = plan.directory / name.replace(" ", "-")
        self._way: Way | None = None
        self._saves = 0

    def step(self) -> dict[str, Any]:
        """Take a step; no save runs."""
        return {"step_s": self._training.step()}

    def save(self) -> dict[str, Any]:
        """Save, idle for a rollout, take a step, and wait until the save is complete."""
        if self._way is None:
            self._directory.mkdir()
            self._way = self._kind(self._training, self._plan, self._directory)
        self._saves += 1
        self._training.backend.synchronize()
        begin = time.perf_counter()
        with self._training.offloader.lending():
            self._way.save(self._saves)
        blocked_s = time.perf_counter() - begin
        with ThreadPoolExecutor(1) as watcher:
            complete_s = watcher.submit(self._await_completion, begin)
            time.sleep(self._plan.rollout_s)
            next_step_s = self._training.step(self._way.before_change)
            return {"blocked_s": blocked_s, "next_step_s": next_step_s, "complete_s": complete_s.result()}

    def measure(self) -> dict[str, float]:
        """Take the raw copy, a step by itself, and a save with the step that follows it."""
        return {"raw_s": self._training.copy_raw(), **self.step(), **self.save()}

    def _await_completion(self, begin: float) -> float:
        assert self._way is not None, "it saves"
        self._way.wait()
        return time.perf_counter() - begin

    def close(self) -> None:
        """Close the way."""
        if self._way is not None:
            self._way.close()
