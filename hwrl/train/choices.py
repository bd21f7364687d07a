"""The names of advantages and losses in a configuration; :mod:`hwrl.train.losses` explains them."""

from __future__ import annotations

from typing import Literal

AdvantageName = Literal["grpo", "dr_grpo", "rloo", "gae"]
LossName = Literal["ppo_clip", "tis", "decoupled"]
