"""Trainers of transformers run in real processes; TRL may not be installed."""

import importlib.util

from hwrl.testing import preload

preload("transformers.trainer", "hwrl_trl.checkpoints")
if importlib.util.find_spec("trl"):
    preload("trl.trainer.grpo_trainer", "datasets")
