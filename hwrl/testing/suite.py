"""The test module that ``hwrl conformance NAME`` runs; ``run_kit`` gives it the fixture ``backend``."""

from __future__ import annotations

from hwrl.testing import conformance


class TestPlugin(conformance.PluginContract):
    """What must hold before torch is imported."""


class TestDeviceMap(conformance.DeviceMapContract):
    """Device numbers."""


class TestCapability(conformance.CapabilityContract):
    """Honesty."""


class TestDevice(conformance.DeviceContract):
    """Work on the device."""


class TestCompute(conformance.ComputeContract):
    """The numbers of a small model."""


class TestPinnedMemory(conformance.PinnedMemoryContract):
    """Host memory."""


class TestRegisteredMemory(conformance.RegisteredMemoryContract):
    """Host memory that is shared."""


class TestDeviceMemory(conformance.DeviceMemoryContract):
    """Device memory."""


class TestDeviceIpc(conformance.DeviceIpcContract):
    """Device memory that another process opens."""


class TestOffload(conformance.OffloadContract):
    """A model on the way to the host and back."""


class TestComm(conformance.CommContract):
    """Two processes."""


class TestWeights(conformance.WeightsContract):
    """Weights on the way from one process to another."""
