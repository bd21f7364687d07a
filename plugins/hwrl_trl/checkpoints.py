"""Save trainers of transformers and TRL in hwrl's checkpoints: :class:`CheckpointCallback`."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.data_loader import SeedableRandomSampler, get_sampler
from accelerate.utils import broadcast_object_list
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from transformers import TrainerCallback, TrainerState
from transformers.trainer_callback import ExportableState

from hwrl import get_backend
from hwrl.checkpoint import (
    CheckpointInfo,
    CheckpointManager,
    Resumed,
    SavedTensors,
    parameter_names,
    rng_state,
    set_rng_state,
    verify_files,
)
from hwrl.comm import Comm
from hwrl.errors import CheckpointCorruptError, CheckpointError, ConfigError
from hwrl.memory import Offloader
from hwrl_trl.offload import OffloadCallback

_HF = "hf"
"""The directory in a checkpoint with the files that transformers reads."""
_TRAINED = StateDictOptions(ignore_frozen_params=True, strict=False)  # frozen parameters come with the model
_FIX = "give trainer.train(resume_from_checkpoint=checkpoints.resume_path())"


class CheckpointCallback(TrainerCallback):  # type: ignore[misc] # transformers is not followed by the type checker
    """Saves a ``trainer`` of transformers or TRL in ``directory``, and resumes it bit for bit.

    It saves instead of transformers, at the same steps (``save_strategy`` "steps" or "epoch"). ``options`` are those of
    :class:`~hwrl.checkpoint.CheckpointManager`: ``max_ckpt_to_keep``, ``async_save`` and so on. Make one on all ranks,
    after the trainer, and train in its ``with`` block::

        with CheckpointCallback(trainer, "checkpoints", max_ckpt_to_keep=2) as checkpoints:
            trainer.train(resume_from_checkpoint=checkpoints.resume_path())

    A checkpoint holds the trained parameters, the optimizer, the learning-rate schedule, the loss scaler, and the
    states of each rank's random generators and of its sampler's. transformers itself reads the weights and the data
    position from files. So the checkpoint's directory ``hf`` has the weights once more, as ``save_pretrained`` writes
    them, and ``trainer_state.json``.

    TRL may take several steps on the same responses (``steps_per_generation``, ``num_iterations``). Then a save waits
    until the last of these steps. With :class:`OffloadCallback` a save reads the optimizer's state in host memory.

    Raises :class:`~hwrl.errors.ConfigError` for FSDP and DeepSpeed through accelerate, because transformers reads their
    weights from formats of its own, and the errors of the manager.
    """

    def __init__(self, trainer: Any, directory: str | Path, **options: Any) -> None:
        _check(trainer)
        self._trainer, self._backend = trainer, get_backend()
        self._group = Comm(self._backend).default_group() if dist.is_initialized() else None
        self._manager = CheckpointManager(directory, group=self._group, backend=self._backend, **options)
        self._due, self._saved_step = False, -1  # whether a save waits for its turn; the last saved or resumed step
        self._resumed: Resumed | None = None  # until the random generators are restored
        self._sampler_state: list[int] | None = None  # at the beginning of this epoch
        trainer.add_callback(self)

    def __enter__(self) -> CheckpointCallback:
        return self

    def __exit__(self, *exc: Any) -> None:
        self._manager.__exit__(*exc)

    # -- resuming -----------------------------------------------------------------------------------------------

    def resume_path(self) -> str | None:
        """Return the directory ``hf`` of the newest good checkpoint, for ``trainer.train``; None if there is none.

        Rank 0 reads all files of the checkpoint and compares their hashes. Call it on all ranks; they wait for rank 0.
        """
        leads = self._trainer.args.process_index == 0
        good = (str(info.path / _HF) for info in reversed(self._manager.checkpoints()) if leads and _is_good(info))
        newest = [next(good, None)]
        if self._group is not None:
            broadcast_object_list(newest)
        return newest[0]

    def on_train_begin(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Load the parts of the checkpoint that transformers has not read from ``hf``.

        Raises CheckpointError unless transformers begins after the step of the newest good checkpoint.
        """
        self._saved_step = state.global_step
        own = self._state()
        self._resumed = self._manager.resume(own)
        if (0 if self._resumed is None else self._resumed.step) != state.global_step:
            raise CheckpointError(
                f"training cannot begin after step {state.global_step} in {self._manager.directory}",
                why="its newest good checkpoint is of another step",
                fix=f"{_FIX}, or another directory",
            )
        if self._resumed is None:
            return
        set_model_state_dict(self._trainer.model, own["model"], options=_TRAINED)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Restore the sampler's generator. Between two epochs restore the random generators, too.

        The data loader draws its first number of an epoch after this call.
        """
        sampler = _generator_of(parts["train_dataloader"])
        if self._resumed is not None:
            saved = self._rank_extra(self._resumed)["sampler"]
            if sampler is not None and saved is not None:
                sampler.set_state(torch.tensor(saved, dtype=torch.uint8))
            if float(state.epoch).is_integer():
                self._restore_random_numbers()
        self._sampler_state = _state_of(sampler)

    def on_step_begin(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Within an epoch restore the random generators here: the data loader has drawn its first number before."""
        self._restore_random_numbers()

    def _restore_random_numbers(self) -> None:
        if self._resumed is not None:
            set_rng_state(self._rank_extra(self._resumed)["rng"], self._backend)
            self._resumed = None

    def _rank_extra(self, resumed: Resumed) -> dict[str, Any]:
        extra: dict[str, Any] = resumed.rank_extras[self._trainer.args.process_index % len(resumed.rank_extras)]
        return extra

    # -- saving -------------------------------------------------------------------------------------------------

    def on_step_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Save instead of transformers: after the step's log and evaluation, and when its responses are used up."""
        if control.should_save:
            self._take_over(control)
        logged = bool(state.log_history) and state.log_history[-1]["step"] == state.global_step
        waits = control.should_evaluate or (control.should_log and not logged)
        if self._due and not waits and (control.should_training_stop or _has_used_up_responses(args, state)):
            self._due = False
            if state.global_step > self._saved_step:
                self._save(state, control, _generator_of(parts["train_dataloader"]))

    on_log = on_evaluate = on_epoch_end = on_step_end

    def _take_over(self, control: Any) -> None:
        """Tell transformers not to save, and note that a save is due here."""
        self._due, control.should_save = True, False
        offloader = self._offloader()
        if offloader is not None:  # OffloadCallback has left the state on the device for transformers
            offloader.offload(params=False)

    def _save(self, state: Any, control: Any, sampler: torch.Generator | None) -> None:
        self._saved_step = state.global_step
        sampler_state = _state_of(sampler) if float(state.epoch).is_integer() else self._sampler_state
        offloader = self._offloader()
        with contextlib.nullcontext() if offloader is None else offloader.saving():
            self._manager.save(
                state.global_step,
                self._state(),
                weight_version=state.global_step,
                rank_extra={"rng": rng_state(self._backend), "sampler": sampler_state},
                export=self._export(state, control),
                offloader=offloader,
            )

    def _export(self, state: Any, control: Any) -> Callable[[Path, SavedTensors], None]:
        """Return the function that writes ``hf``. It reads the saved tensors, so training may continue meanwhile."""
        stateful = [one for one in [*self._callbacks, control] if isinstance(one, ExportableState)]
        position = copy.deepcopy(state)
        position.stateful_callbacks = TrainerState(stateful_callbacks=stateful).stateful_callbacks
        model, tokenizer = self._trainer.model, self._trainer.processing_class

        def export(directory: Path, saved: SavedTensors) -> None:
            trained = {
                name.removeprefix("model."): tensor for name, tensor in saved.items() if name.startswith("model.")
            }
            model.save_pretrained(directory, state_dict={**model.state_dict(), **trained})
            if tokenizer is not None:
                tokenizer.save_pretrained(directory)
            position.save_to_json(directory / "trainer_state.json")

        return export

    # -- the trainer's parts ------------------------------------------------------------------------------------

    @property
    def _callbacks(self) -> list[Any]:
        return list(self._trainer.callback_handler.callbacks)

    @property
    def _optimizer(self) -> Any:
        wrapped = self._trainer.optimizer
        return getattr(wrapped, "optimizer", wrapped)  # accelerate's wrapper

    def _offloader(self) -> Offloader | None:
        return next((one.offloader for one in self._callbacks if isinstance(one, OffloadCallback)), None)

    def _state(self) -> dict[str, Any]:
        trained = get_model_state_dict(self._trainer.model, options=_TRAINED)
        named = {name: parameter for parameter, name in parameter_names(self._trainer.model).items()}
        parts = {
            "model": {name: named.get(name, tensor) for name, tensor in trained.items()},
            "optimizer": self._optimizer,
            "lr_scheduler": self._trainer.lr_scheduler,
            "scaler": self._trainer.accelerator.scaler,
        }
        return {name: part for name, part in parts.items() if part is not None}


def _check(trainer: Any) -> None:
    """Raise ConfigError if transformers could not resume ``trainer`` from a checkpoint of hwrl."""
    args = trainer.args
    wrong = {
        "FSDP through accelerate": trainer.is_fsdp_enabled,
        "DeepSpeed": trainer.is_deepspeed_enabled,
        "load_best_model_at_end": args.load_best_model_at_end,
        'save_strategy="best"': args.save_strategy == "best",
    }
    for name in (name for name, is_set in wrong.items() if is_set):
        raise ConfigError(
            f"checkpoints of hwrl are not possible with {name}",
            why="transformers reads them from its own files",
            fix='train without it, with save_strategy="steps" or "epoch"; or leave the saves to transformers',
        )


def _has_used_up_responses(args: Any, state: Any) -> bool:
    """Return whether the next step begins with new responses. It always does for trainers without these arguments."""
    batches: int = getattr(args, "steps_per_generation", 1) * getattr(args, "num_iterations", 1)
    return bool(state.global_step * args.gradient_accumulation_steps % batches == 0)


def _is_good(info: CheckpointInfo) -> bool:
    try:
        verify_files(info, info.manifest.files)
    except CheckpointCorruptError:
        return False
    return True


def _generator_of(loader: Any) -> torch.Generator | None:
    """Return the sampler's own generator if its state lasts beyond an epoch, as of TRL's sampler; otherwise None.

    accelerate's sampler seeds its generator in each epoch, so there is nothing to save.
    """
    sampler = get_sampler(loader)
    generator = None if isinstance(sampler, SeedableRandomSampler) else getattr(sampler, "generator", None)
    return generator if isinstance(generator, torch.Generator) else None


def _state_of(generator: torch.Generator | None) -> list[int] | None:
    return None if generator is None else generator.get_state().tolist()
