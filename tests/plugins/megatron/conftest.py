"""What holds for every test of this folder."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

# Not importorskip: the backend must prepare the process before megatron is imported.
MISSING = pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="needs hwrl[megatron]")
IGNORED = [  # of what megatron-core calls in torch and in itself
    "ignore:Warning. tp_group is None",
    "ignore:The .grad attribute of a Tensor that is not a leaf",
    "ignore:`torch.distributed:FutureWarning",
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(MISSING)
            for warning in IGNORED:
                item.add_marker(pytest.mark.filterwarnings(warning))
