"""hwrl bench load, at a size that tests can afford."""

import json
from pathlib import Path

import pytest

from hwrl.cli import main
from hwrl.errors import ConfigError
from hwrl.interfaces import Capability, Support
from hwrl_bench.load import require_devices
from hwrl_cpu import INFO, CpuBackend


def test_the_benchmark_measures_each_rank_in_each_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "bench.json"
    assert main(["bench", "load", "--gib", "0.15", "--ranks", "2", "--json", str(target)]) == 0
    result = json.loads(target.read_text())
    assert list(result["ways"]) == ["by parts", "first rank"]
    for ranks in result["ways"].values():
        assert len(ranks) == 2 and all(rank["seconds"] > 0 and rank["shard_nbytes"] > 0 for rank in ranks)
    peaks = {way: max(rank["peak_nbytes"] for rank in ranks) for way, ranks in result["ways"].items()}
    assert peaks["by parts"] < peaks["first rank"]
    assert "| by parts | 1 |" in capsys.readouterr().out


class OneDevice(CpuBackend):
    """Its collectives need a device for each rank."""

    def supports(self, capability: Capability) -> Support:
        if capability is Capability.SHARED_DEVICE_GROUPS:
            return Support("unsupported", "a rank takes a whole device")
        return super().supports(capability)


def test_more_ranks_than_devices_are_refused_at_once() -> None:
    require_devices(OneDevice(INFO), 1)
    require_devices(CpuBackend(INFO), 4)
    with pytest.raises(ConfigError, match=r"--ranks=4 (.|\n)*a rank takes a whole device(.|\n)*--ranks 1 or fewer"):
        require_devices(OneDevice(INFO), 4)
