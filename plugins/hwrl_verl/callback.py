"""A callback for verl's V1 trainers: ``trainer.checkpoint_callback_class=hwrl_verl.callback.FinishLastSave``."""

from __future__ import annotations

from typing import Any

from verl.trainer.ppo.checkpoint_callback import CheckpointCallback


class FinishLastSave(CheckpointCallback):  # type: ignore[misc] # verl's types are not followed
    """Waits after the save of the last step until verl's tracker names it. verl's other trainers wait by themselves."""

    def on_save(self, trainer: Any, global_step: int, *_: Any, **__: Any) -> None:
        if global_step >= trainer.total_training_steps:
            trainer.actor_rollout_wg.async_calls_finalize_fn_exec(blocking=True)
