"""hwrl bench weights, at a size that tests can afford."""

import json
from pathlib import Path

import pytest

from hwrl.cli import main


def test_the_benchmark_measures_every_way_bit_exactly(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "bench.json"
    words = ["bench", "weights", "--mib", "4", "--rounds", "2", "--receivers", "2", "--slab-mib", "1"]
    assert main([*words, "--json", str(target)]) == 0
    result = json.loads(target.read_text())
    assert result["bit_exact"] is True and result["receivers"] == 2
    ours = {f"hwrl {way}" for way in ("device", "device in place", "device flat", "ipc in place", "host")}
    assert set(result["ways"]) == {"flat broadcast", "flat broadcast in pieces", "per-tensor broadcast"} | ours
    assert all(way["wall_median_s"] > 0 and len(way["device_s"]) == 2 for way in result["ways"].values())
    assert {"gather", "rendezvous", "pack", "wire", "vote"} <= result["ways"]["hwrl device"]["stages_s"].keys()
    assert result["payload_nbytes"] > 4 << 20 and result["small_publish_median_s"] > 0
    assert result["hardware"]["cores"] >= 1 and result["versions"]["torch"]
    assert result["date"] and result["command"].startswith("hwrl")
    printed = capsys.readouterr().out
    assert "of raw" in printed and "bit-exact" in printed
