"""What a device may lack: :class:`Capability`, and the answer :class:`Support`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal


class Capability(StrEnum):
    """Features that some devices lack. :meth:`Backend.supports` checks for one; :meth:`Backend.require` raises."""

    STREAMS = "streams"
    """Work on a side stream runs while the caller continues."""
    PINNED_MEMORY = "pinned_memory"
    """The backend allocates page-locked host memory, so copies to and from the device are asynchronous."""
    REGISTERED_MEMORY = "registered_memory"
    """Existing host memory, such as shared memory, can be page-locked in place."""
    MEMORY_STATS = "memory_stats"
    """:meth:`Backend.memory_info` counts the bytes that tensors of this process hold on the device."""
    COLLECTIVES = "collectives"
    """torch has a collective library for the device. Without it, :mod:`hwrl.comm` stages groups through the host."""
    REDUCE_AVERAGE = "reduce_average"
    """The collective library averages. Without it, FSDP2's gradients are summed and divided."""
    COMM_ABORT = "comm_abort"
    """Another thread can end a blocked collective."""
    SHARED_DEVICE_GROUPS = "shared_device_groups"
    """Two processes on the same device can join one process group."""
    DEVICE_IPC = "device_ipc"
    """Another process of the same host can open device memory."""
    VARLEN_ATTENTION = "varlen_attention"
    """A fused kernel computes :meth:`Backend.varlen_attention`. Without it, sequences are padded to the longest."""
    COMPILED_TRAINING = "compiled_training"
    """Compiling a model's layers makes training faster."""


@dataclass(frozen=True)
class Support:
    """Whether a feature works, and why. ``unverified`` means: expected to work, not proven on this device."""

    state: Literal["supported", "unsupported", "unverified"]
    reason: str

    @property
    def usable(self) -> bool:
        """True unless the state is ``unsupported``."""
        return self.state != "unsupported"


NOT_GENERAL = {
    Capability.SHARED_DEVICE_GROUPS: "most collective libraries need a device of its own for each rank",
    Capability.DEVICE_IPC: "the backend does not implement it",
    Capability.COMM_ABORT: "the backend does not implement it",
    Capability.REGISTERED_MEMORY: "the backend does not implement it",
    Capability.VARLEN_ATTENTION: "no fused kernel: sequences are padded to the longest",
    Capability.COMPILED_TRAINING: "torch's compiler is not proven on this device",
}
"""Capabilities that torch's general functions do not give, with the reason."""
