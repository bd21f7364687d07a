"""The names of advantages and losses that a configuration can choose; see :mod:`hwrl.train.losses`."""

from __future__ import annotations

from typing import Literal

AdvantageName = Literal["grpo", "dr_grpo", "rloo"]
LossName = Literal["ppo_clip", "tis", "decoupled"]
