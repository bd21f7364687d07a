"""Trainers of transformers that are killed and resumed, and what their checkpoints hold."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from hwrl.checkpoint import CheckpointInfo, find_checkpoints, read_extra, read_tensors
from hwrl.testing import Processes

_TIMES = {"step_time", "train_runtime", "train_samples_per_second", "train_steps_per_second"}

MakeTrainer = Callable[..., Any]


def train(
    rank: int, make: MakeTrainer, directory: Path, kill_at: int | None, group: dict[str, str], options: dict[str, Any]
) -> int:
    """Train or resume with the trainer of ``make``; die by SIGKILL before the step after ``kill_at``.

    Returns the step that it began after.
    """
    if group:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), **group}
    from transformers import TrainerCallback

    from hwrl_trl import CheckpointCallback

    began: list[int] = []

    class Watch(TrainerCallback):  # type: ignore[misc] # transformers is not followed by the type checker
        def on_train_begin(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
            began.append(state.global_step)

        def on_step_begin(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
            if state.global_step == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

    trainer = make(directory)
    trainer.add_callback(Watch())
    with CheckpointCallback(trainer, directory / "checkpoints", **options) as checkpoints:
        trainer.train(resume_from_checkpoint=checkpoints.resume_path())
    return began[0]


def trained(
    make: MakeTrainer, directory: Path, *, kill_at: tuple[int, ...] = (), ranks: int = 1, **options: Any
) -> Any:
    """Train on ``ranks`` processes, killed after each step of ``kill_at`` and resumed.

    Returns the step that the last life began after, and the content of the last checkpoint.
    """
    began = []
    for killed_at in (*kill_at, None):
        group = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "localhost", "MASTER_PORT": str(_free_port())}
        arguments = make, directory, killed_at, group if ranks > 1 else {}, options
        with Processes(train, ranks, *arguments) as processes:
            ended = processes.outcomes(stop_on_error=killed_at is None)
        for outcome in ended:
            if killed_at is None and outcome.error is not None:
                raise outcome.error
            assert killed_at is None or "exit code -9" in str(outcome.error), outcome
        began.append(ended[0].value)
    return began[-1], content(find_checkpoints(directory / "checkpoints")[0][-1])


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        port: int = listener.getsockname()[1]
        return port


def content(info: CheckpointInfo) -> dict[str, Any]:
    """Return everything in a checkpoint but the times."""
    history = json.loads((info.path / "hf" / "trainer_state.json").read_text())["log_history"]
    return {
        "step": info.step,
        "tensors": read_tensors(info, prefix=""),
        "random numbers": read_extra(info)[1],
        "hf": load_file(next((info.path / "hf").glob("*model.safetensors"))),
        "log": [{name: value for name, value in entry.items() if name not in _TIMES} for entry in history],
    }


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Compare two results of :func:`content`, bit for bit."""
    assert found["log"] == expected["log"]
    for name in ("tensors", "hf"):
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=0)
    assert found["random numbers"] == expected["random numbers"]
    assert found["step"] == expected["step"]
