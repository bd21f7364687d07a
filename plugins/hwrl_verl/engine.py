"""verl's FSDP2 engine with hwrl's Offloader and CheckpointManager. Selected by ``VERL_ENGINE_VENDOR=hwrl``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from verl.utils.device import get_device_name
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead, FSDPEngineWithValueHead

from hwrl import get_backend
from hwrl.checkpoint import (
    TRACKER_NAME,
    CheckpointInfo,
    CheckpointManager,
    DurableFS,
    SavedTensors,
    rng_state,
    set_rng_state,
)
from hwrl.comm import Comm
from hwrl.errors import CheckpointNotFoundError
from hwrl.memory import Offloader
from hwrl.model_files import write_model

_DEVICES = sorted({"cuda", "npu", get_device_name()})


@EngineRegistry.register(model_type="language_model", backend="fsdp2", device=_DEVICES, vendor="hwrl")
class HwrlEngineWithLMHead(FSDPEngineWithLMHead):  # type: ignore[misc] # verl's types are not followed
    """verl's FSDP2 engine; it moves its state by an Offloader, and saves by a CheckpointManager.

    verl saves a step at ``FOLDER/global_step_N/actor``; its checkpoint here is ``FOLDER/hwrl/actor/global_step_N``.
    With ``checkpoint.async_save`` verl's tracker in FOLDER is written when the checkpoint is complete. The save of the
    last training step is awaited, because verl ends its workers after it.
    """

    _offloader: Offloader | None = None
    _manager: CheckpointManager | None = None
    _is_offload_param: bool
    _is_offload_optimizer: bool
    _keep: int | None = None

    def initialize(self) -> None:
        super().initialize()
        self._offloads = {"model": self._is_offload_param, "optimizer": self._is_offload_optimizer}
        self._is_offload_param = self._is_offload_optimizer = False  # from here on verl's own code moves nothing
        self._offloader, self._on_host = Offloader(self.module, self.optimizer), False
        self.to("cpu", **self._offloads, grad=self._offloads["model"])

    @property
    def is_param_offload_enabled(self) -> bool:
        return self._is_offload_param if self._offloader is None else self._offloads["model"]

    @property
    def is_optimizer_offload_enabled(self) -> bool:
        return self._is_offload_optimizer if self._offloader is None else self._offloads["optimizer"]

    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        if self._offloader is None or self._uses_fsdp2_cpu_offload_policy or not (model or optimizer):
            return
        to_host = device != get_device_name()
        if get_device_name() == "cpu":  # verl gives both directions the same name there: each call is the other one
            to_host = not self._on_host
        move = self._offloader.offload if to_host else self._offloader.load
        move(params=model, optimizer=optimizer)
        self._on_host = to_host

    def get_per_tensor_param(self, *args: Any, **kwargs: Any) -> tuple[Iterator[Any], dict[str, Any] | None]:
        if self._offloader is None or not self._offloads["model"]:
            return super().get_per_tensor_param(*args, **kwargs)  # type: ignore[no-any-return] # verl's types
        with self._offloader.lending():
            weights, adapter = super().get_per_tensor_param(*args, **kwargs)
        return self._loaded_while_read(weights), adapter

    def _loaded_while_read(self, weights: Iterator[Any]) -> Iterator[Any]:
        with self._moves().loaded(optimizer=False):
            yield from weights

    def save_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
        **_: Any,
    ) -> None:
        if local_path is None:
            return
        contents = self.checkpoint_config.save_contents
        folder = Path(local_path).parent.parent

        def follow(info: CheckpointInfo) -> None:
            DurableFS().replace_file(folder / TRACKER_NAME, str(info.step).encode())

        manager = self._open_manager(Path(local_path), keep=max_ckpt_to_keep)
        offloader = self._moves()
        with offloader.lending() if self._has_optimizer_state() else offloader.loaded():
            manager.save(
                global_step,
                self._state(contents),
                extra={"lr_scheduler": self.lr_scheduler.state_dict()} if "extra" in contents else None,
                rank_extra={"rng": rng_state()} if "extra" in contents else None,
                export=self._export if "hf_model" in contents else None,
                after_commit=follow if self.checkpoint_config.async_save else None,
                offloader=offloader,
            )
        if 0 < self.optimizer_config.total_training_steps <= global_step:
            manager.wait()

    def load_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, del_local_after_load: bool = True, **_: Any
    ) -> None:
        if local_path is None:
            return
        contents = self.checkpoint_config.load_contents
        manager = self._open_manager(Path(local_path))
        with self._moves().loaded():
            state = self._state(contents)
            resumed = manager.resume(state, step=int(Path(local_path).parent.name.rpartition("_")[2]))
            if resumed is None:
                raise CheckpointNotFoundError(
                    f"{local_path} cannot be loaded",
                    why=f"{manager.directory} has no checkpoint",
                    fix="resume from a step that was saved with VERL_ENGINE_VENDOR=hwrl",
                )
            set_state_dict(
                self.module,
                self.optimizer if "optimizer" in state else [],
                model_state_dict=state["model"],
                optim_state_dict=state.get("optimizer", {}),
            )
        if "extra" in contents:
            self.lr_scheduler.load_state_dict(resumed.extra["lr_scheduler"])
            set_rng_state(resumed.rank_extras[self.rank]["rng"])

    def _open_manager(self, local_path: Path, keep: int | None = None) -> CheckpointManager:
        directory = local_path.parent.parent / "hwrl" / local_path.name
        if self._manager is not None and (self._manager.directory, self._keep) != (directory.absolute(), keep):
            self._manager.close()
            self._manager = None
        if self._manager is None:
            self._keep = keep
            self._manager = CheckpointManager(
                directory,
                max_ckpt_to_keep=keep,
                async_save=self.checkpoint_config.async_save,
                group=Comm(get_backend()).default_group(),
            )
        return self._manager

    def _moves(self) -> Offloader:
        assert self._offloader is not None, "verl calls initialize first"
        return self._offloader

    def _has_optimizer_state(self) -> bool:
        return self.optimizer is None or bool(self.optimizer.state)

    def _state(self, contents: list[str]) -> dict[str, Any]:
        before_first_step = not self._has_optimizer_state()
        model, optimizer = get_state_dict(self.module, self.optimizer if "optimizer" in contents else [])
        if before_first_step:  # torch took an empty step to make a state
            for state in self.optimizer.state.values():
                state["step"].zero_()
        return {"model": model, **({"optimizer": optimizer} if "optimizer" in contents else {})}

    def _export(self, directory: Path, saved: SavedTensors) -> None:
        names = [name for name in saved if name.startswith("model.")]
        described = ((name.removeprefix("model."), saved.on_meta(name)) for name in names)
        tensors = ((name.removeprefix("model."), saved[name]) for name in names)
        write_model(directory, self.module, described, tensors, dtype=saved.on_meta(names[0]).dtype)


@EngineRegistry.register(model_type="value_model", backend="fsdp2", device=_DEVICES, vendor="hwrl")
class HwrlEngineWithValueHead(HwrlEngineWithLMHead, FSDPEngineWithValueHead):  # type: ignore[misc] # likewise
    """The same for the engine of a critic."""
