"""verl's FSDP2 engine with hwrl's Offloader and CheckpointManager. Selected by ``VERL_ENGINE_VENDOR=hwrl``."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from verl.single_controller.base.decorator import Dispatch, register
from verl.utils.device import get_device_name
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead, FSDPEngineWithValueHead
from verl.workers.engine_workers import ActorRolloutRefWorker

from hwrl import checkpoint
from hwrl.comm import Comm
from hwrl.memory import Offloader
from hwrl.model_files import write_model
from hwrl_verl import tracker

_DEVICES = sorted({"cuda", "npu", get_device_name()})


@EngineRegistry.register(model_type="language_model", backend="fsdp2", device=_DEVICES, vendor="hwrl")
class HwrlEngineWithLMHead(FSDPEngineWithLMHead):  # type: ignore[misc] # verl's types are not followed
    """verl's FSDP2 engine. An Offloader moves its state, and a CheckpointManager saves it.

    Where verl asks for ``FOLDER/global_step_N/actor``, the checkpoint is in ``FOLDER/hwrl/actor/global_step_N``. With
    ``checkpoint.async_save`` verl's tracker in FOLDER names a step when all its parts are complete: the actor, the
    critic if there is one, and verl's data.pt. Older checkpoints are removed after that.

    verl ends its workers soon after the last step. So the save of that step returns when its checkpoint is complete,
    and then verl's trainers call ``finish_saves``, which waits for the tracker.
    """

    _offloader: Any = None
    _is_tidy = False  # whether this process has put unannounced steps aside
    _manager: checkpoint.CheckpointManager | None = None
    is_param_offload_enabled = property(lambda self: self._offloads["model"])
    is_optimizer_offload_enabled = property(lambda self: self._offloads["optimizer"])

    def initialize(self) -> None:
        super().initialize()
        config = self.engine_config
        self._offloads = {"model": config.param_offload, "optimizer": config.optimizer_offload}
        self._is_offload_param = self._is_offload_optimizer = False  # from here on verl's own code moves nothing
        self._offloader, self._on_host = Offloader(self.module, self.optimizer), False
        self.to("cpu", **self._offloads)

    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        if self._offloader is None or self._uses_fsdp2_cpu_offload_policy or not (model or optimizer):
            return
        # On the CPU verl names both directions "cpu". It calls them in turn, so each call there is the other direction.
        self._on_host = not self._on_host if get_device_name() == "cpu" else device != get_device_name()
        move = self._offloader.offload if self._on_host else self._offloader.load
        move(params=model, optimizer=optimizer)

    def get_per_tensor_param(self, *args: Any, **kwargs: Any) -> tuple[Iterator[Any], dict[str, Any] | None]:
        with contextlib.ExitStack() as loaded:
            loaded.enter_context(self._offloader.loaded(optimizer=False))
            weights, adapter = super().get_per_tensor_param(*args, **kwargs)
            return _read_within(loaded.pop_all(), weights), adapter

    def save_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, global_step: int = 0, max_ckpt_to_keep: int | None = None
    ) -> None:
        contents, (folder, part) = self.checkpoint_config.save_contents, _place_of(local_path)
        self._manager = self._manager or self._open_manager(local_path, contents, keep=max_ckpt_to_keep)
        if self.rank == 0:
            tracker.begin_part(folder, part, global_step)
        committed = threading.Event()

        def follow(info: checkpoint.CheckpointInfo) -> None:
            committed.set()
            tracker.announce(folder, part, info.step)

        with self._offloader.saving():
            self._manager.save(
                global_step,
                extra={"lr_scheduler": self.lr_scheduler.state_dict()},
                rank_extra={"rng": checkpoint.rng_state()},
                export=self._export if "hf_model" in contents else None,
                after_commit=follow if self.checkpoint_config.async_save else None,
                offloader=self._offloader,
            )
        if self.rank == 0 and 0 < self.optimizer_config.total_training_steps <= global_step:
            # Wait for the commit only. The save ends after verl has written data.pt, and that comes after this call.
            while self._manager.is_saving and not committed.wait(tracker.LOOK_S):
                pass
            if not self._manager.is_saving:
                self._manager.wait()  # raises the save's error if it failed

    def finish_saves(self) -> None:
        """Wait until the last save has ended, and raise its error. An asynchronous one is then in verl's tracker."""
        if self._manager is not None:
            self._manager.wait()

    def load_checkpoint(self, local_path: str, hdfs_path: str | None = None, del_local_after_load: bool = True) -> None:
        contents = self.checkpoint_config.load_contents
        step = _step_of(local_path)
        with self._open_manager(local_path, contents, resumed=step) as manager, self._offloader.loaded():
            resumed = manager.resume(step=step)
            assert resumed is not None, "a step that is not there is an error"
        if "extra" in contents:
            self.lr_scheduler.load_state_dict(resumed.extra["lr_scheduler"])
            of_ranks = resumed.rank_extras  # there may be fewer saved ranks than ranks now
            checkpoint.set_rng_state(of_ranks[self.rank % len(of_ranks)]["rng"])

    def _open_manager(
        self, local_path: str, contents: list[str], *, keep: int | None = None, resumed: int = -1
    ) -> checkpoint.CheckpointManager:
        """Open the directory of all steps of this part, for ``contents`` of it.

        Closes the manager before, because a directory has one owner.
        ``resumed`` is the step that is about to be loaded, -1 if none is. The first call puts later steps aside.
        """
        if self._manager is not None:
            self._manager.close()
            self._manager = None
        folder, part = _place_of(local_path)
        if self.rank == 0 and not self._is_tidy:  # before the others open the directory: they wait for rank 0 there
            tracker.put_unannounced_aside(folder, part, after=resumed)
        self._is_tidy = True
        directory = tracker.part_directory(folder, part)
        saved_async = self.checkpoint_config.async_save
        parts = {"optimizer": self.optimizer} if "optimizer" in contents else {}
        return checkpoint.CheckpointManager(
            directory,
            max_ckpt_to_keep=keep,
            async_save=saved_async,
            group=Comm().default_group(),
            model=self.module,
            **parts,
        )

    def _export(self, directory: Path, saved: checkpoint.SavedTensors) -> None:
        names = {name.removeprefix("model."): name for name in saved if name.startswith("model.")}
        described = [(name, saved.on_meta(source)) for name, source in names.items()]
        tensors = ((name, saved[source]) for name, source in names.items())
        write_model(directory, self.module, described, tensors, dtype=described[0][1].dtype)


@EngineRegistry.register(model_type="value_model", backend="fsdp2", device=_DEVICES, vendor="hwrl")
class HwrlEngineWithValueHead(HwrlEngineWithLMHead, FSDPEngineWithValueHead):  # type: ignore[misc] # likewise
    """The same for verl's engine of a critic."""


@register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator] # likewise
def _finalize_saves(worker: Any, blocking: bool = False) -> None:
    engine = worker.actor.engine
    if blocking and isinstance(engine, HwrlEngineWithLMHead):
        engine.finish_saves()


# verl's trainers call this method if the workers have it: before each step, and with ``blocking`` after the last one.
ActorRolloutRefWorker.async_calls_finalize_fn_exec = _finalize_saves


def _place_of(local_path: str) -> tuple[Path, str]:
    """Return verl's folder of all steps, and the part's name, from ``FOLDER/global_step_N/PART``."""
    path = Path(local_path)
    return path.parents[1], path.name


def _step_of(local_path: str) -> int:
    return int(Path(local_path).parent.name.rpartition("_")[2])


def _read_within(loaded: contextlib.ExitStack, weights: Iterator[Any]) -> Iterator[Any]:
    """Yield ``weights``, and close ``loaded`` at their end or when the reader ends early."""
    with loaded:
        yield from weights
