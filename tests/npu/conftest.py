"""These tests need the environment that ci/npu makes: the real torch_npu over a simulated CANN, or NPUs."""

from __future__ import annotations

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("torch_npu") else ["test_*.py"]
