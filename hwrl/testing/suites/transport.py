"""The checks of a transport; ``run_kit`` provides the fixtures ``backend`` and ``subject``."""

from __future__ import annotations

from hwrl.testing import conformance


class TestTransport(conformance.TransportContract):
    """Two processes."""


class TestTransfer(conformance.TransferContract):
    """Failures."""
