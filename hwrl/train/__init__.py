"""From scored groups to new weights: advantages, losses, train engines and the asynchronous trainer.

Each name is imported on first use: the names of losses need no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hwrl.lazy import lazy_names

if TYPE_CHECKING:
    from hwrl.train.activations import ActivationCheckpointing as ActivationCheckpointing
    from hwrl.train.choices import AdvantageName as AdvantageName
    from hwrl.train.choices import LossName as LossName
    from hwrl.train.flops import ModelFlops as ModelFlops
    from hwrl.train.flops import read_model_flops as read_model_flops
    from hwrl.train.fsdp import FsdpEngine as FsdpEngine
    from hwrl.train.kernels import apply_kernels as apply_kernels
    from hwrl.train.losses import PolicyLoss as PolicyLoss
    from hwrl.train.losses import group_advantages as group_advantages
    from hwrl.train.losses import mismatch_kl as mismatch_kl
    from hwrl.train.memory import certain_fsdp_memory as certain_fsdp_memory
    from hwrl.train.memory import fsdp_memory as fsdp_memory
    from hwrl.train.packing import MicroBatch as MicroBatch
    from hwrl.train.padding import collate as collate
    from hwrl.train.policy import PolicyEngine as PolicyEngine
    from hwrl.train.rng import rng_state as rng_state
    from hwrl.train.rng import set_rng_state as set_rng_state
    from hwrl.train.scoring import OutputScorer as OutputScorer
    from hwrl.train.scoring import VocabularyShard as VocabularyShard
    from hwrl.train.trainer import Algorithm as Algorithm
    from hwrl.train.trainer import AsyncTrainer as AsyncTrainer
    from hwrl.train.trainer import TrainedStep as TrainedStep
    from hwrl.train.trainer import move_metrics as move_metrics

_MODULE_OF = {
    "ActivationCheckpointing": "activations",
    "AdvantageName": "choices",
    "Algorithm": "trainer",
    "AsyncTrainer": "trainer",
    "FsdpEngine": "fsdp",
    "LossName": "choices",
    "MicroBatch": "packing",
    "ModelFlops": "flops",
    "OutputScorer": "scoring",
    "PolicyEngine": "policy",
    "PolicyLoss": "losses",
    "TrainedStep": "trainer",
    "VocabularyShard": "scoring",
    "apply_kernels": "kernels",
    "certain_fsdp_memory": "memory",
    "collate": "padding",
    "fsdp_memory": "memory",
    "group_advantages": "losses",
    "mismatch_kl": "losses",
    "move_metrics": "trainer",
    "read_model_flops": "flops",
    "rng_state": "rng",
    "set_rng_state": "rng",
}

__all__ = [
    "ActivationCheckpointing",
    "AdvantageName",
    "Algorithm",
    "AsyncTrainer",
    "FsdpEngine",
    "LossName",
    "MicroBatch",
    "ModelFlops",
    "OutputScorer",
    "PolicyEngine",
    "PolicyLoss",
    "TrainedStep",
    "VocabularyShard",
    "apply_kernels",
    "certain_fsdp_memory",
    "collate",
    "fsdp_memory",
    "group_advantages",
    "mismatch_kl",
    "move_metrics",
    "read_model_flops",
    "rng_state",
    "set_rng_state",
]

__getattr__, __dir__ = lazy_names(__name__, _MODULE_OF)
