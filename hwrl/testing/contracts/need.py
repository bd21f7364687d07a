"""Skip a contract's test, with the reason, if the backend lacks a capability."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from hwrl.errors import HwrlError, UnsupportedError
from hwrl.interfaces import Backend, Capability


def need(backend: Backend, capability: Capability) -> None:
    """Skip the test if the backend does not support ``capability``."""
    support = backend.supports(capability)
    if not support.usable:
        pytest.skip(f"{backend.info.name} lacks {capability.value}: {support.reason}")


def need_claim(backend: Backend, capability: Capability) -> None:
    """Skip the test unless the backend says that ``capability`` is supported."""
    support = backend.supports(capability)
    if support.state != "supported":
        pytest.skip(f"{backend.info.name} does not claim {capability.value}: {support.reason}")


def need_two_ranks(backend: Backend) -> None:
    """Skip the test if two processes cannot join one group: they share the only device, and groups forbid that."""
    if not backend.supports(Capability.COLLECTIVES).usable:
        return  # its groups are staged through the host, and need no device each
    support = backend.supports(Capability.SHARED_DEVICE_GROUPS)
    if not support.usable and backend.device_count() < 2:
        pytest.skip(f"needs two devices: {support.reason}")


@contextlib.contextmanager
def skipping_refused(kind: type[HwrlError] = UnsupportedError) -> Iterator[None]:
    """Skip the test if the block raises an error of ``kind``: the engine refuses the call."""
    try:
        yield
    except kind as error:
        pytest.skip(f"{error.what}: {error.why}")
