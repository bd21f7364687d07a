"""From scored groups to new weights: advantages, losses, train engines and the asynchronous trainer.

Each name is imported on first use: the names of losses need no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hwrl.train.choices import AdvantageName as AdvantageName
    from hwrl.train.choices import LossName as LossName
    from hwrl.train.fsdp import FsdpEngine as FsdpEngine
    from hwrl.train.losses import PolicyLoss as PolicyLoss
    from hwrl.train.losses import group_advantages as group_advantages
    from hwrl.train.losses import mismatch_kl as mismatch_kl
    from hwrl.train.padding import collate as collate
    from hwrl.train.policy import PolicyEngine as PolicyEngine
    from hwrl.train.policy import recompute as recompute
    from hwrl.train.rng import rng_state as rng_state
    from hwrl.train.rng import set_rng_state as set_rng_state
    from hwrl.train.trainer import Algorithm as Algorithm
    from hwrl.train.trainer import AsyncTrainer as AsyncTrainer
    from hwrl.train.trainer import TrainedStep as TrainedStep
    from hwrl.train.trainer import move_metrics as move_metrics

_HOME = {
    "AdvantageName": "hwrl.train.choices",
    "Algorithm": "hwrl.train.trainer",
    "AsyncTrainer": "hwrl.train.trainer",
    "FsdpEngine": "hwrl.train.fsdp",
    "LossName": "hwrl.train.choices",
    "PolicyEngine": "hwrl.train.policy",
    "PolicyLoss": "hwrl.train.losses",
    "TrainedStep": "hwrl.train.trainer",
    "collate": "hwrl.train.padding",
    "group_advantages": "hwrl.train.losses",
    "mismatch_kl": "hwrl.train.losses",
    "move_metrics": "hwrl.train.trainer",
    "recompute": "hwrl.train.policy",
    "rng_state": "hwrl.train.rng",
    "set_rng_state": "hwrl.train.rng",
}

__all__ = [
    "AdvantageName",
    "Algorithm",
    "AsyncTrainer",
    "FsdpEngine",
    "LossName",
    "PolicyEngine",
    "PolicyLoss",
    "TrainedStep",
    "collate",
    "group_advantages",
    "mismatch_kl",
    "move_metrics",
    "recompute",
    "rng_state",
    "set_rng_state",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
