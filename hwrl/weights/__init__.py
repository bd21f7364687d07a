"""Weights from a trainer to rollout replicas: planned layouts, the broadcast buffer, transactional versions."""

from hwrl.interfaces.weights import WeightSource as WeightSource
from hwrl.weights.buffer import BroadcastBuffer as BroadcastBuffer
from hwrl.weights.layout import WeightLayout as WeightLayout
from hwrl.weights.plan import PolicySender as PolicySender
from hwrl.weights.plan import SyncPlan as SyncPlan
from hwrl.weights.plan import SyncReport as SyncReport
from hwrl.weights.receiver import Received as Received
from hwrl.weights.receiver import WeightReceiver as WeightReceiver
from hwrl.weights.report import TransferReport as TransferReport
from hwrl.weights.sender import WeightSender as WeightSender
