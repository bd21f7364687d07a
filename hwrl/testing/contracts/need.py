"""What a contract needs, and the skip, with the reason, where the backend lacks it."""

from __future__ import annotations

import pytest

from hwrl.interfaces import Backend, Capability


def need(backend: Backend, capability: Capability) -> None:
    """Skip the test where the backend says that it lacks ``capability``."""
    support = backend.supports(capability)
    if not support.usable:
        pytest.skip(f"{backend.info.name} lacks {capability.value}: {support.reason}")


def need_two_ranks(backend: Backend) -> None:
    """Skip the test where two processes cannot be in one group."""
    need(backend, Capability.COLLECTIVES)
    support = backend.supports(Capability.SHARED_DEVICE_GROUPS)
    if not support.usable and backend.device_count() < 2:
        pytest.skip(f"needs two devices: {support.reason}")
