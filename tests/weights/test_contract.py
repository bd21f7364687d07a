"""hwrl's own transports keep the kit's contract of a transfer. (ipc connects no process with itself.)"""

from __future__ import annotations

from typing import Any

import pytest

from hwrl.interfaces import Backend
from hwrl.testing import Kind, Subject
from hwrl.testing.conformance import TransferContract
from hwrl_cpu import INFO, CpuBackend


class TestTransfer(TransferContract):
    @pytest.fixture
    def backend(self) -> Backend:
        return CpuBackend(INFO)

    @pytest.fixture(params=["device", "host"])
    def subject(self, request: Any) -> Subject:
        return Subject(Kind.TRANSPORT, request.param)
