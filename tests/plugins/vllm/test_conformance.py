"""The conformance kit on the engine with real vLLM."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from hwrl.cli import main
from tests.plugins.vllm.serving import ON_DEVICE_OPTIONS, ON_HOST

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM: make test-vllm"),
]


def test_the_engine_reaches_the_level_rollout(tmp_path: Path) -> None:
    target = tmp_path / "report.json"
    options = {"enforce_eager": True, "kv_cache_memory_bytes": 64 << 20, **({} if ON_HOST else ON_DEVICE_OPTIONS)}
    words = ["--options", json.dumps(options), "--level", "rollout", "--json", str(target)]
    assert main(["conformance", "vllm", *words]) == 0
    report = json.loads(target.read_text())
    skipped = {check["name"].partition("::")[0] for check in report["checks"] if check["outcome"] == "skipped"}
    assert report["reached"] == "rollout" and skipped <= ({"TestRolloutSleep"} if ON_HOST else set())
