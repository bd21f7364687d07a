"""The ways to save of ``hwrl bench checkpoint``: hwrl's, torch's and megatron-core's, each through its own code."""

from __future__ import annotations

import importlib
import shutil
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from hwrl_bench.ways import Way

if TYPE_CHECKING:
    from hwrl.memory import HostCopy
    from hwrl_bench.checkpoint_training import BenchTraining, State


@dataclass(frozen=True)
class SaveWorkload:
    """The state to save, and where: its bytes, its offloaded part, and the tokens of a step.

    ``rollout_s`` is how long the trainer idles between a save and the next step, as during a rollout. ``staging`` is
    where hwrl copies tensors from the device.
    """

    nbytes: int
    offload: Literal["none", "optimizer", "all"]
    tokens: int
    rollout_s: float
    staging: Literal["host", "device"]
    directory: Path


class SaveWay(Way, ABC):
    """One way to save asynchronously. The constructor allocates nothing: the first save does, and is measured."""

    why_not_offloaded: ClassVar[str | None] = None
    """The reason if the way cannot save an offloaded state."""

    def __init__(self, training: BenchTraining, workload: SaveWorkload, directory: Path) -> None:
        self.training, self.directory = training, directory

    @abstractmethod
    def save(self, step: int) -> None:
        """Begin to save; return when the trainer may go on."""

    def before_change(self) -> None:
        """Block until the state may change. Most ways copied everything before ``save`` returned."""
        return

    @abstractmethod
    def wait(self) -> None:
        """Block until the save is complete; raise its error if it failed."""


class _HwrlSave(SaveWay):
    """``CheckpointManager(async_save=True)``."""

    def __init__(self, training: BenchTraining, workload: SaveWorkload, directory: Path) -> None:
        from hwrl.checkpoint import CheckpointManager

        super().__init__(training, workload, directory)
        self._manager = CheckpointManager(
            directory, async_save=True, staging=workload.staging, max_ckpt_to_keep=1, backend=training.backend
        )

    def save(self, step: int) -> None:
        self._manager.save(step, self.training.state(), offloader=self.training.offloader)

    def wait(self) -> None:
        self._manager.wait()

    def close(self) -> None:
        self._manager.close()


class _PeerSave(SaveWay):
    """A way that needs a default process group, and takes offloaded tensors as tensors on the host."""

    def __init__(self, training: BenchTraining, workload: SaveWorkload, directory: Path) -> None:
        import torch.distributed as dist

        from hwrl.comm import HashStore

        super().__init__(training, workload, directory)
        devices = dict.fromkeys(["cpu", training.backend.info.device_type])  # torch's own writers use the CPU's group
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
    def begin(self, state: State, directory: Path) -> None:
        """Begin to save ``state``."""

    @abstractmethod
    def complete(self) -> None:
        """Block until the last save is complete."""


class _TorchThread(_PeerSave):
    """``torch.distributed.checkpoint.async_save`` with its thread."""

    executor = "THREAD"
    response: Any

    def begin(self, state: State, directory: Path) -> None:
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save

        kind = AsyncCheckpointerType[self.executor]
        self.response = async_save(state, checkpoint_id=directory, async_checkpointer_type=kind, **self.options())

    def options(self) -> dict[str, Any]:
        """Return more arguments for ``async_save``."""
        return {}

    def complete(self) -> None:
        getattr(self.response, "upload_completion", self.response).result()


class _TorchProcess(_TorchThread):
    """``async_save`` with a process that torch starts."""

    executor = "PROCESS"


class _TorchSharedMemory(_TorchProcess):
    """The same with torch's stager: shared memory, pinned and filled in the background if there is an accelerator."""

    @classmethod
    def why_not(cls) -> str | None:
        import torch
        from torch.distributed.checkpoint import staging

        return None if hasattr(staging, "StagingOptions") else f"torch {torch.__version__} has no shared-memory stager"

    def __init__(self, training: BenchTraining, workload: SaveWorkload, directory: Path) -> None:
        import torch
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        super().__init__(training, workload, directory)
        pinned = torch.accelerator.is_available()
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=pinned,
                use_shared_memory=True,
                use_async_staging=pinned,
                use_non_blocking_copy=pinned,
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


class _MegatronFork(_PeerSave):
    """Megatron-core's ``dist_checkpointing.save`` with its forked writers."""

    package, module = "megatron-core", "megatron"
    why_not_offloaded = "it forks, and a fork does not copy the shared mapping that holds an offloaded state"

    def __init__(self, training: BenchTraining, workload: SaveWorkload, directory: Path) -> None:
        super().__init__(training, workload, directory)
        self._library: Any = importlib.import_module("megatron.core.dist_checkpointing")
        queues: Any = importlib.import_module("megatron.core.dist_checkpointing.strategies.async_utils")
        self._queue = queues.AsyncCallsQueue()

    def begin(self, state: State, directory: Path) -> None:
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


WAYS: dict[str, type[SaveWay]] = {
    "hwrl": _HwrlSave,
    "dcp thread": _TorchThread,
    "dcp process": _TorchProcess,
    "dcp shared memory": _TorchSharedMemory,
    "megatron fork": _MegatronFork,
}
