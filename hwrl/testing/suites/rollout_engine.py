"""The checks of a rollout engine; ``run_kit`` provides the fixtures ``backend`` and ``subject``."""

from __future__ import annotations

from hwrl.testing import conformance


class TestRolloutNumbers(conformance.RolloutNumbersContract):
    """Tokens and log-probabilities."""


class TestRolloutSleep(conformance.RolloutSleepContract):
    """Memory."""


class TestRolloutReceivers(conformance.RolloutReceiversContract):
    """Weights from a link."""


class TestRollout(conformance.RolloutContract):
    """Requests, and new weights between tokens."""


class TestRolloutRun(conformance.RunContract):
    """``hwrl train`` with the engine."""
