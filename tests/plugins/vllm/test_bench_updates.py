"""``python -m hwrl_bench.vllm_updates`` on the host: hwrl's way alone, because vLLM's own need devices."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from hwrl_bench import vllm_updates
from tests.plugins.vllm.serving import ON_HOST

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM: make test-vllm"),
    pytest.mark.skipif(not ON_HOST, reason="the bench itself is run on devices"),
    pytest.mark.filterwarnings("default"),
]


@pytest.mark.parametrize("keep_old", [False, pytest.param(True, marks=pytest.mark.extended)])
def test_updates_are_timed_by_stage_and_compared_with_transformers(tmp_path: Path, keep_old: bool) -> None:
    words = ["--model", "tiny", "--rounds", "2", "--timeout", "500", "--json", str(tmp_path / "bench.json")]
    options = json.dumps({"kv_cache_memory_bytes": 64 << 20, "block_size": 32})
    words += ["--keep-old-version"] if keep_old else []
    assert vllm_updates.main([*words, "--options", options]) == 0
    result = json.loads((tmp_path / "bench.json").read_text())
    assert result["right"] and {"hwrl", "torch", "transformers"} < result["versions"].keys()
    (measured,) = result["updates"].values()
    assert len(measured["total_s"]) == 2 and measured["logprob_difference"]["mean"] < 0.1
    assert {"gather", "pack", "wire", "vote"} <= measured["sender"].keys()
    stages = measured["receiver"]
    assert measured["extra_nbytes"].keys() == {"rollout process", "worker"}
    if keep_old:
        assert stages["wire"] > 0 < measured["median_pause_s"] == stages["load"]
        assert measured["extra_nbytes"]["rollout process"] > result["bytes"]
    else:
        assert 0 < measured["median_pause_s"] <= stages["receive"]


def test_the_measurements_of_both_processes_become_one() -> None:
    mine = {"hwrl": {"level 1": [{"right": 1.0}]}}
    theirs = {"hwrl": {"level 1": [{"sleep": 0.2, "freed_nbytes": 7}]}}
    assert vllm_updates.merge(mine, theirs) == {"hwrl": {"level 1": [{"right": 1.0, "sleep": 0.2, "freed_nbytes": 7}]}}
    rows = [{"total_s": s, "pause_s": s / 2, "sender": {"pack": s / 4}} for s in (4.0, 8.0, 12.0)]
    assert vllm_updates.summarize(rows) == {
        "total_s": [4.0, 8.0, 12.0],
        "median_total_s": 8.0,
        "median_pause_s": 4.0,
        "sender": {"pack": 2.0},
    }
