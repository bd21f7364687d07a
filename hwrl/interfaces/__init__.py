"""The interfaces of backends, engines and process groups, and the data that passes through them.

Importing it is cheap and loads neither torch nor numpy: a probe may run where torch cannot be imported.
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
from hwrl.interfaces.chat import ParsedAnswer, ToolCall, ToolParser, Tools
from hwrl.interfaces.comm import Group, Pending, ReduceOp
from hwrl.interfaces.command import Command
from hwrl.interfaces.devicemap import DeviceMap
from hwrl.interfaces.groups import Ints, PromptGroup, Response, Segment, Trajectory
from hwrl.interfaces.handles import Handle
from hwrl.interfaces.kernels import Kernels
from hwrl.interfaces.lora import LoraSettings
from hwrl.interfaces.losses import Advantage, LossInputs, TokenLoss
from hwrl.interfaces.memory import LentState, LentTensor, Moved, OffloadedState, Transfer
from hwrl.interfaces.planning import ACTIVE, ALWAYS, MemoryCause, Phase, Place, peak_phase, phase_nbytes
from hwrl.interfaces.probing import (
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
from hwrl.interfaces.torchapi import fill_stream_functions
from hwrl.interfaces.tracing import PromptTrace, Span
from hwrl.interfaces.tracking import RunStatus, TrackedRun, Tracker
from hwrl.interfaces.train import EngineSettings, TrainEngine

__all__ = [
    "ACTIVE",
    "ALWAYS",
    "API_VERSION",
    "MEMORY_TAGS",
    "Advantage",
    "Backend",
    "BackendInfo",
    "Batch",
    "Capability",
    "Command",
    "Completion",
    "DeviceMap",
    "EngineSettings",
    "Finding",
    "GenerationRequest",
    "Group",
    "Handle",
    "Ints",
    "Kernels",
    "LentState",
    "LentTensor",
    "LoraSettings",
    "LossInputs",
    "MemoryCause",
    "MemoryInfo",
    "Moved",
    "OffloadedState",
    "ParsedAnswer",
    "PciDevice",
    "Pending",
    "Phase",
    "Place",
    "ProbeContext",
    "ProbeResult",
    "PromptGroup",
    "PromptTrace",
    "ReduceOp",
    "Response",
    "RolloutEngine",
    "RolloutSettings",
    "RunStatus",
    "Sampling",
    "Segment",
    "Span",
    "StreamLike",
    "Support",
    "TokenLoss",
    "ToolCall",
    "ToolParser",
    "Tools",
    "TrackedRun",
    "Tracker",
    "TrainEngine",
    "Trajectory",
    "Transfer",
    "WeightOffer",
    "fill_stream_functions",
    "peak_phase",
    "phase_nbytes",
    "without_device_files",
]
