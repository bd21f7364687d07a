"""Weights from a trainer to rollout replicas: planned layouts, transports, two-phase commit of versions."""

from hwrl.weights.control import DecisionKind, Limits, Proposal
from hwrl.weights.destination import (
    RING_NBYTES,
    Destination,
    TensorLoader,
    TensorStream,
    ring_nbytes_of,
    ring_slots,
)
from hwrl.weights.engine_receiver import EngineReceiver, Taken
from hwrl.weights.intake import WeightIntake
from hwrl.weights.layout import NamedTensor, WeightLayout
from hwrl.weights.members import LinkMembers
from hwrl.weights.policy import POLICY, POLICY_BASE, PolicySender, SyncPlan, SyncReport
from hwrl.weights.receiver import Received, WeightReceiver
from hwrl.weights.report import TransferReport
from hwrl.weights.scatter import CopyRule, Scattered, whole_rules
from hwrl.weights.sender import WeightSender
from hwrl.weights.slabs import SlabRing
from hwrl.weights.source import SharedReads, SharedWeights, WeightShard, WeightSource, gather_weights
from hwrl.weights.transport import ReceiverTiming, Transport
from hwrl.weights.transports import TRANSPORTS, TransportName

__all__ = [
    "POLICY",
    "POLICY_BASE",
    "RING_NBYTES",
    "TRANSPORTS",
    "CopyRule",
    "DecisionKind",
    "Destination",
    "EngineReceiver",
    "Limits",
    "LinkMembers",
    "NamedTensor",
    "PolicySender",
    "Proposal",
    "Received",
    "ReceiverTiming",
    "Scattered",
    "SharedReads",
    "SharedWeights",
    "SlabRing",
    "SyncPlan",
    "SyncReport",
    "Taken",
    "TensorLoader",
    "TensorStream",
    "TransferReport",
    "Transport",
    "TransportName",
    "WeightIntake",
    "WeightLayout",
    "WeightReceiver",
    "WeightSender",
    "WeightShard",
    "WeightSource",
    "gather_weights",
    "ring_nbytes_of",
    "ring_slots",
    "whole_rules",
]
