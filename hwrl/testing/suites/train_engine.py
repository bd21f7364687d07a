"""The checks of a train engine; ``run_kit`` provides the fixtures ``backend`` and ``subject``."""

from __future__ import annotations

from hwrl.testing import conformance


class TestTrainNumbers(conformance.TrainNumbersContract):
    """Log-probabilities and steps."""


class TestTrainOffload(conformance.TrainOffloadContract):
    """Parameters on the host."""


class TestTrainRanks(conformance.TrainRanksContract):
    """Two ranks."""


class TestTrainState(conformance.TrainStateContract):
    """Weights, state, learning."""


class TestTrainRun(conformance.RunContract):
    """``hwrl train`` with the engine."""
