"""The interfaces of backends, engines and process groups, and the data that passes through them.

Importing it is cheap: it loads neither torch nor numpy, so a probe can run before torch is importable.
"""

from hwrl.interfaces.backend import (
    API_VERSION,
    Backend,
    BackendInfo,
    Capability,
    MemoryInfo,
    StreamLike,
    Support,
)
from hwrl.interfaces.batch import Batch
from hwrl.interfaces.comm import Group, Pending, ReduceOp
from hwrl.interfaces.command import Command
from hwrl.interfaces.devicemap import DeviceMap
from hwrl.interfaces.groups import Floats, Ints, PromptGroup, Response
from hwrl.interfaces.handles import Handle
from hwrl.interfaces.kernels import Kernels
from hwrl.interfaces.lora import LoraSettings
from hwrl.interfaces.memory import LentState, LentTensor, Moved, OffloadedState, Transfer
from hwrl.interfaces.probing import (
    PROBE_ROOT,
    Finding,
    PciDevice,
    ProbeContext,
    ProbeResult,
    without_device_files,
)
from hwrl.interfaces.rollout import (
    MEMORY_TAGS,
    Completion,
    GenerationRequest,
    RolloutEngine,
    RolloutSettings,
    Sampling,
    WeightOffer,
)
from hwrl.interfaces.train import EngineSettings, TokenLoss, TrainEngine

__all__ = [
    "API_VERSION",
    "MEMORY_TAGS",
    "PROBE_ROOT",
    "Backend",
    "BackendInfo",
    "Batch",
    "Capability",
    "Command",
    "Completion",
    "DeviceMap",
    "EngineSettings",
    "Finding",
    "Floats",
    "GenerationRequest",
    "Group",
    "Handle",
    "Ints",
    "Kernels",
    "LentState",
    "LentTensor",
    "LoraSettings",
    "MemoryInfo",
    "Moved",
    "OffloadedState",
    "PciDevice",
    "Pending",
    "ProbeContext",
    "ProbeResult",
    "PromptGroup",
    "ReduceOp",
    "Response",
    "RolloutEngine",
    "RolloutSettings",
    "Sampling",
    "StreamLike",
    "Support",
    "TokenLoss",
    "TrainEngine",
    "Transfer",
    "WeightOffer",
    "without_device_files",
]
