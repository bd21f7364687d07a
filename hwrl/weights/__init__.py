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
    transfer   buckets, then checksums           ==> compare the checksums
                                               <-- VOTE      whole, corrupt, torn, failed
    DECISION   committed, again or given up    -->

If a round does not commit, another one may follow, without the receivers that were late, silent, got corrupt bytes or
failed by themselves. A receiver that voted "torn" stays. The host transport has no READY, START, VOTE and DECISION: the
sender stores the version, and each receiver fetches it when it is ready.

The objects on the way, from the user's call to the memory:

- Sender: :class:`WeightSender` → ``SenderLink`` (what stays between versions) → ``Transaction`` (one version) →
  :class:`SenderRound` (one attempt) → a :class:`TransportSender`, which reads the :class:`WeightSource` by a
  :class:`TensorReader` and packs buckets into a :class:`BucketRing`.
- Receiver: :class:`WeightReceiver` → :class:`LinkRegistrations` (JOIN, READY, START) →
  ``WeightIntake`` (the bytes, VOTE and DECISION of one member) → :class:`ReceiverRound` (one attempt) → a
  :class:`TransportReceiver`, which fills a :class:`Destination`.
- Receiver in an engine: the engine's process has the :class:`LinkRegistrations`, and each worker an
  :class:`EngineReceiver` with a ``WeightIntake``.

Nothing here authenticates anybody. Any process with a connection to the store can join a link or depose its sender;
the store itself keeps strangers out (:mod:`hwrl.comm`).
"""

from hwrl.weights.buckets import BucketRing as BucketRing
from hwrl.weights.buckets import Checksums as Checksums
from hwrl.weights.buckets import TensorReader as TensorReader
from hwrl.weights.copy_destination import CopyDestination as CopyDestination
from hwrl.weights.copy_destination import CopyRule as CopyRule
from hwrl.weights.copy_destination import whole_rules as whole_rules
from hwrl.weights.destination import Destination as Destination
from hwrl.weights.destination import TensorLoader as TensorLoader
from hwrl.weights.destination import TensorStream as TensorStream
from hwrl.weights.destination import ring_nbytes_of as ring_nbytes_of
from hwrl.weights.engine_receiver import EngineReceiver as EngineReceiver
from hwrl.weights.engine_receiver import Taken as Taken
from hwrl.weights.layout import NamedTensor as NamedTensor
from hwrl.weights.layout import WeightLayout as WeightLayout
from hwrl.weights.membership import withdraw as withdraw
from hwrl.weights.messages import DecisionKind as DecisionKind
from hwrl.weights.messages import Limits as Limits
from hwrl.weights.messages import Proposal as Proposal
from hwrl.weights.messages import TransportPayload as TransportPayload
from hwrl.weights.policy import POLICY as POLICY
from hwrl.weights.policy import POLICY_BASE as POLICY_BASE
from hwrl.weights.policy import PolicySender as PolicySender
from hwrl.weights.policy import SyncPlan as SyncPlan
from hwrl.weights.policy import SyncReport as SyncReport
from hwrl.weights.receiver import Received as Received
from hwrl.weights.receiver import WeightReceiver as WeightReceiver
from hwrl.weights.registrations import LinkRegistrations as LinkRegistrations
from hwrl.weights.report import StageClock as StageClock
from hwrl.weights.report import TransferReport as TransferReport
from hwrl.weights.sender import WeightSender as WeightSender
from hwrl.weights.sender import bucket_sizes as bucket_sizes
from hwrl.weights.source import AHEAD_NBYTES as AHEAD_NBYTES
from hwrl.weights.source import WeightShard as WeightShard
from hwrl.weights.source import WeightSource as WeightSource
from hwrl.weights.source import gather_weights as gather_weights
from hwrl.weights.streaming import IncomingVersion as IncomingVersion
from hwrl.weights.streaming import StreamReceiver as StreamReceiver
from hwrl.weights.transport import ReceiverContext as ReceiverContext
from hwrl.weights.transport import ReceiverRound as ReceiverRound
from hwrl.weights.transport import SenderContext as SenderContext
from hwrl.weights.transport import SenderRound as SenderRound
from hwrl.weights.transport import Transport as Transport
from hwrl.weights.transport import TransportReceiver as TransportReceiver
from hwrl.weights.transport import TransportSender as TransportSender
from hwrl.weights.transports import TRANSPORTS as TRANSPORTS
from hwrl.weights.transports import TransportName as TransportName
from hwrl.weights.transports.installed import installed_transports as installed_transports
from hwrl.weights.transports.installed import with_transport as with_transport
