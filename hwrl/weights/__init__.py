"""Weights from a trainer to rollout replicas: planned layouts, transports, two-phase commit of versions.

A link has a name in a store. A sender publishes versions on it. One decision of the sender commits a version for its
receivers. Receivers without a whole copy by then are excluded. Control messages travel through the store; the bytes
travel by a transport. One round of a version::

    sender                                         each receiver
    ------                                         -------------
                                                   JOIN (once)
    PROPOSAL   version, layout hash, receivers -->
                                               <-- READY
    START      go, or withdrawn                -->
    transfer   slabs, then checksums           ==> compare the checksums
                                               <-- VOTE      whole, corrupt, torn, failed
    DECISION   committed, again or given up    -->

If a round does not commit, another one may follow, without the receivers that were late, silent, got corrupt bytes or
failed by themselves. A receiver that voted "torn" stays. The host transport has no READY, START, VOTE and DECISION: the
sender stores the version, and each receiver fetches it when it is ready.

The objects on the way, from the user's call to the memory:

- Sender: :class:`WeightSender` → ``SenderLink`` (what stays between versions) → ``Transaction`` (one version) →
  :class:`SenderRound` (one attempt) → a :class:`TransportSender`, which reads the :class:`WeightSource` by a
  :class:`TensorReader` and packs slabs into a :class:`SlabRing`.
- Receiver: :class:`WeightReceiver` → :class:`LinkRegistrations` (JOIN, READY, START) →
  ``WeightIntake`` (the bytes, VOTE and DECISION of one member) → :class:`ReceiverRound` (one attempt) → a
  :class:`TransportReceiver`, which fills a :class:`Destination`.
- Receiver in an engine: the engine's process has the :class:`LinkRegistrations`, and each worker an
  :class:`EngineReceiver` with a ``WeightIntake``.

Nothing here authenticates anybody. Any process with a connection to the store can join a link or depose its sender;
the store itself keeps strangers out (:mod:`hwrl.comm`).
"""

from hwrl.weights.copy_destination import CopyDestination, CopyRule, whole_rules
from hwrl.weights.destination import (
    Destination,
    TensorLoader,
    TensorStream,
    ring_nbytes_of,
)
from hwrl.weights.engine_receiver import EngineReceiver, Taken
from hwrl.weights.layout import NamedTensor, WeightLayout
from hwrl.weights.membership import withdraw
from hwrl.weights.memory import receiver_nbytes, sender_nbytes
from hwrl.weights.messages import DecisionKind, Limits, Proposal, TransportPayload
from hwrl.weights.policy import POLICY, POLICY_BASE, PolicySender, SyncPlan, SyncReport
from hwrl.weights.receiver import Received, WeightReceiver
from hwrl.weights.registrations import LinkRegistrations
from hwrl.weights.report import StageClock, TransferReport
from hwrl.weights.sender import WeightSender, slab_sizes
from hwrl.weights.slabs import Checksums, SlabRing, TensorReader
from hwrl.weights.source import WeightShard, WeightSource, gather_weights
from hwrl.weights.streaming import IncomingVersion, StreamReceiver
from hwrl.weights.transport import (
    ReceiverContext,
    ReceiverRound,
    SenderContext,
    SenderRound,
    Transport,
    TransportReceiver,
    TransportSender,
)
from hwrl.weights.transports import TRANSPORTS, TransportName
from hwrl.weights.transports.installed import installed_transports, with_transport

__all__ = [
    "POLICY",
    "POLICY_BASE",
    "TRANSPORTS",
    "Checksums",
    "CopyDestination",
    "CopyRule",
    "DecisionKind",
    "Destination",
    "EngineReceiver",
    "IncomingVersion",
    "Limits",
    "LinkRegistrations",
    "NamedTensor",
    "PolicySender",
    "Proposal",
    "Received",
    "ReceiverContext",
    "ReceiverRound",
    "SenderContext",
    "SenderRound",
    "SlabRing",
    "StageClock",
    "StreamReceiver",
    "SyncPlan",
    "SyncReport",
    "Taken",
    "TensorLoader",
    "TensorReader",
    "TensorStream",
    "TransferReport",
    "Transport",
    "TransportName",
    "TransportPayload",
    "TransportReceiver",
    "TransportSender",
    "WeightLayout",
    "WeightReceiver",
    "WeightSender",
    "WeightShard",
    "WeightSource",
    "gather_weights",
    "installed_transports",
    "receiver_nbytes",
    "ring_nbytes_of",
    "sender_nbytes",
    "slab_sizes",
    "whole_rules",
    "with_transport",
    "withdraw",
]
