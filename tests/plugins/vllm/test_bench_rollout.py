"""``hwrl bench rollout`` with real vLLM on the host: its own generation in two ways, and hwrl's engine."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from hwrl.cli import main
from tests.plugins.vllm.serving import ON_HOST

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM: make test-vllm"),
    pytest.mark.skipif(not ON_HOST, reason="the benchmark itself is run on devices"),
]


def test_every_way_generates_the_same_tokens(tmp_path: Path) -> None:
    target = tmp_path / "bench.json"
    sizes = "--requests 6 --prompt 8 --mean 16 --longest 48 --max-running 4 --rounds 1"
    assert main(["bench", "rollout", *sizes.split(), "--json", str(target)]) == 0
    rows = json.loads(target.read_text())["ways"]
    assert list(rows) == ["LLM.generate", "LLM.generate inline", "hwrl"]
    assert len({str(row["tokens"]) for row in rows.values()}) == 1 and all(row["of_first"] > 0 for row in rows.values())
