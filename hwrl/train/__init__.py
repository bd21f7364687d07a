"""From scored groups to new weights: advantages, losses, train engines and the asynchronous trainer.

Each name is imported on first use: the names of losses need no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hwrl.lazy import lazy_face

if TYPE_CHECKING:
    from hwrl.train.activations import ActivationCheckpointing as ActivationCheckpointing
    from hwrl.train.activations import reserve_nbytes as reserve_nbytes
    from hwrl.train.algorithm import Algorithm as Algorithm
    from hwrl.train.batches import Overlong as Overlong
    from hwrl.train.choices import CLIPPED_LOSSES as CLIPPED_LOSSES
    from hwrl.train.choices import WEIGHTED_LOSSES as WEIGHTED_LOSSES
    from hwrl.train.choices import AdvantageName as AdvantageName
    from hwrl.train.choices import AggregationMode as AggregationMode
    from hwrl.train.choices import ImportanceLevel as ImportanceLevel
    from hwrl.train.choices import KlEstimator as KlEstimator
    from hwrl.train.choices import LossName as LossName
    from hwrl.train.choices import RejectionMode as RejectionMode
    from hwrl.train.compiling import wants_compilation as wants_compilation
    from hwrl.train.critic import CriticEngine as CriticEngine
    from hwrl.train.critic import ValueLoss as ValueLoss
    from hwrl.train.engines import Engines as Engines
    from hwrl.train.flops import ModelFlops as ModelFlops
    from hwrl.train.flops import read_model_flops as read_model_flops
    from hwrl.train.fsdp import FsdpEngine as FsdpEngine
    from hwrl.train.loading import open_model as open_model
    from hwrl.train.loading import read_on_all_ranks as read_on_all_ranks
    from hwrl.train.loading import read_weights as read_weights
    from hwrl.train.losses import PolicyLoss as PolicyLoss
    from hwrl.train.losses import mismatch_kl as mismatch_kl
    from hwrl.train.memory import add_in_turns as add_in_turns
    from hwrl.train.memory import certain_fsdp_memory as certain_fsdp_memory
    from hwrl.train.memory import fsdp_memory as fsdp_memory
    from hwrl.train.memory import reference_memory as reference_memory
    from hwrl.train.objective import Objective as Objective
    from hwrl.train.objective import Rejection as Rejection
    from hwrl.train.objective import UserLoss as UserLoss
    from hwrl.train.packing import MicroBatch as MicroBatch
    from hwrl.train.policy import PolicyEngine as PolicyEngine
    from hwrl.train.reference import ReferenceModel as ReferenceModel
    from hwrl.train.scoring import OutputScorer as OutputScorer
    from hwrl.train.scoring import VocabularyShard as VocabularyShard
    from hwrl.train.sharding import ShardedModel as ShardedModel
    from hwrl.train.sharding import layers_of as layers_of
    from hwrl.train.state_memory import StateMemory as StateMemory
    from hwrl.train.trainer import AsyncTrainer as AsyncTrainer
    from hwrl.train.trainer import TrainedStep as TrainedStep
    from hwrl.train.trainer import move_metrics as move_metrics

__getattr__, __dir__, __all__ = lazy_face(__name__)
