"""Weights from a trainer to rollout replicas: planned layouts, three transports, versions that commit or abort."""

from hwrl.weights.buffer import BroadcastBuffer
from hwrl.weights.gather import SharedWeights, WeightShard, gather_weights
from hwrl.weights.layout import WeightLayout
from hwrl.weights.policy import POLICY, POLICY_BASE, PolicySender, SyncPlan, SyncReport
from hwrl.weights.receiver import Received, WeightReceiver
from hwrl.weights.report import TransferReport
from hwrl.weights.sender import TransportName, WeightSender
from hwrl.weights.source import NamedTensor, WeightSource

__all__ = [
    "POLICY",
    "POLICY_BASE",
    "BroadcastBuffer",
    "NamedTensor",
    "PolicySender",
    "Received",
    "SharedWeights",
    "SyncPlan",
    "SyncReport",
    "TransferReport",
    "TransportName",
    "WeightLayout",
    "WeightReceiver",
    "WeightSender",
    "WeightShard",
    "WeightSource",
    "gather_weights",
]
