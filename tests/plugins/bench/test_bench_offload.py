"""hwrl bench offload, at a size that tests can afford."""

import json
from pathlib import Path

import pytest

from hwrl.cli import main


def test_the_benchmark_measures_every_way_and_allocates_nothing_later(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "bench.json"
    assert main(["bench", "offload", "--gib", "0.05", "--rounds", "2", "--json", str(target)]) == 0
    result = json.loads(target.read_text())
    assert result["bit_exact"] is True and result["host_allocated_nbytes"] == 0
    assert 0.05 * (1 << 30) < result["payload_nbytes"] <= result["pool_nbytes"]
    assert result["freed_nbytes"] > 0.9 * result["payload_nbytes"]
    moves = {"raw_offload", "raw_load", "offload", "load", "per_tensor_offload_wall", "per_tensor_load_wall"}
    assert moves | {"offload_wall", "load_wall", "skipped_offload_wall", "load_again_wall"} == result["ways"].keys()
    assert all(way["median_s"] > 0 and len(way["seconds"]) == 2 for way in result["ways"].values())
    assert all(result["ways"][name]["gb_per_s"] > 0 for name in moves)
    assert result["hardware"]["cores"] >= 1 and result["command"].startswith("hwrl")
    printed = capsys.readouterr().out
    assert "of raw" in printed and "every value came back" in printed and "0 bytes more" in printed
