"""The conformance kit, all of it, on the backend that HWRL_BACKEND names."""

from __future__ import annotations

import pytest

import hwrl
from hwrl.testing.suites.backend import *  # noqa: F403 - every class of the kit

del TestBackendRun  # noqa: F821 - from the line above; a run would fill the simulated machine


@pytest.fixture
def backend() -> hwrl.Backend:
    return hwrl.get_backend()
