"""The test module of ``hwrl conformance NAME``; ``run_kit`` provides the fixture ``backend``."""

from __future__ import annotations

from hwrl.testing import conformance


class TestPlugin(conformance.PluginContract):
    """The plugin before torch is imported."""


class TestDeviceMap(conformance.DeviceMapContract):
    """Device numbers."""


class TestCapability(conformance.CapabilityContract):
    """The answers of ``supports`` and ``require``."""


class TestDevice(conformance.DeviceContract):
    """Work on the device."""


class TestCompute(conformance.ComputeContract):
    """The numbers of a small model."""


class TestKernels(conformance.KernelsContract):
    """The backend's fused operations."""


class TestPinnedMemory(conformance.PinnedMemoryContract):
    """Host memory."""


class TestRegisteredMemory(conformance.RegisteredMemoryContract):
    """Shared host memory."""


class TestDeviceMemory(conformance.DeviceMemoryContract):
    """Device memory."""


class TestDeviceIpc(conformance.DeviceIpcContract):
    """Device memory, opened by another process."""


class TestOffload(conformance.OffloadContract):
    """A model, moved to the host and back."""


class TestComm(conformance.CommContract):
    """Two processes."""


class TestWeights(conformance.WeightsContract):
    """Weights, sent from one process to another."""
