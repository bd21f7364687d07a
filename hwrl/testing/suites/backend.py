"""The checks of a backend; ``run_kit`` provides the fixture ``backend``. Its engines are the built-in ones."""

from __future__ import annotations

import pytest

from hwrl.testing import conformance
from hwrl.testing.levels import Kind
from hwrl.testing.subject import Subject


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


class _OnBuiltInTrainEngine:
    level = conformance.Level.TRAIN

    @pytest.fixture
    def subject(self) -> Subject:
        """The built-in train engine."""
        return Subject(Kind.TRAIN_ENGINE, "fsdp")


class TestBuiltInTrainNumbers(_OnBuiltInTrainEngine, conformance.TrainNumbersContract):
    """The numbers of the built-in train engine."""


class TestBuiltInTrainOffload(_OnBuiltInTrainEngine, conformance.TrainOffloadContract):
    """Its parameters on the host."""


class TestBuiltInTrainRanks(_OnBuiltInTrainEngine, conformance.TrainRanksContract):
    """Two ranks of it."""


class TestBuiltInTrainState(_OnBuiltInTrainEngine, conformance.TrainStateContract):
    """Its weights and its state."""


class _OnBuiltInRolloutEngine:
    level = conformance.Level.ROLLOUT

    @pytest.fixture
    def subject(self) -> Subject:
        """The built-in rollout engine."""
        return Subject(Kind.ROLLOUT_ENGINE, "embedded")


class TestBuiltInRolloutNumbers(_OnBuiltInRolloutEngine, conformance.RolloutNumbersContract):
    """The numbers of the built-in rollout engine."""


class TestBuiltInRolloutSleep(_OnBuiltInRolloutEngine, conformance.RolloutSleepContract):
    """Its memory."""


class TestBuiltInRolloutReceivers(_OnBuiltInRolloutEngine, conformance.RolloutReceiversContract):
    """Its receivers of weights."""


class TestBuiltInRollout(_OnBuiltInRolloutEngine, conformance.RolloutContract):
    """Its requests."""


class TestBackendRun(conformance.RunContract):
    """``hwrl train`` on the backend."""
