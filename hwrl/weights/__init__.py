"""Weights from a trainer to rollout replicas: planned layouts, transports, two-phase commit of versions."""

from hwrl.weights.co_sender import CoSender
from hwrl.weights.layout import NamedTensor, WeightLayout
from hwrl.weights.memory import receiver_nbytes, sender_nbytes
from hwrl.weights.policy import POLICY, POLICY_BASE, PolicySender, SyncPlan, SyncReport
from hwrl.weights.receiver import Received, WeightReceiver
from hwrl.weights.report import TransferReport
from hwrl.weights.sender import WeightSender, slab_sizes
from hwrl.weights.shared_reads import SharedReads, SharedWeights
from hwrl.weights.slabs import SlabRing
from hwrl.weights.source import WeightShard, WeightSource, gather_weights
from hwrl.weights.transport import ReceiverTiming, Transport
from hwrl.weights.transports import TRANSPORTS, TransportName

__all__ = [
    "POLICY",
    "POLICY_BASE",
    "TRANSPORTS",
    "CoSender",
    "NamedTensor",
    "PolicySender",
    "Received",
    "ReceiverTiming",
    "SharedReads",
    "SharedWeights",
    "SlabRing",
    "SyncPlan",
    "SyncReport",
    "TransferReport",
    "Transport",
    "TransportName",
    "WeightLayout",
    "WeightReceiver",
    "WeightSender",
    "WeightShard",
    "WeightSource",
    "gather_weights",
    "receiver_nbytes",
    "sender_nbytes",
    "slab_sizes",
]
