"""hwrl bench checkpoint, at a size that tests can afford."""

import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from hwrl.cli import main
from hwrl_bench.checkpoint_ways import SaveWorkload


def test_the_benchmark_measures_a_save_and_says_what_cannot_be_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "bench.json"
    command = ["bench", "checkpoint", "--gib", "0.006", "--rounds", "2", "--tokens", "2", "--offload", "optimizer"]
    command += ["--staging", "device", "--timeout", "240"]
    ways = ["--ways", "hwrl", "dcp thread", "megatron fork", "--dir", str(tmp_path), "--json", str(target)]
    assert main([*command, *ways]) == 0
    result = json.loads(target.read_text())
    assert "why_not" in result["ways"].pop("megatron fork")
    for found in result["ways"].values():
        assert 0 < found["staged_nbytes"] < found["payload_nbytes"] / 2, "the optimizer's state is on the host"
        assert len(found["rounds"]) == 2 and all(seconds > 0 for one in found["rounds"] for seconds in one.values())
        assert found["blocked_of_raw"] > 0 and found["next_step_of_step"] > 0
    assert result["staging"] == "device"
    assert result["ways"].keys() == {"hwrl", "dcp thread"} and result["command"].startswith("hwrl")
    assert "megatron fork: not measured: " in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == [target], "checkpoints are left"


def test_a_way_that_takes_too_long_is_a_line_with_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "checkpoint", "--gib", "0.006", "--ways", "hwrl", "--timeout", "0.1"]) == 1
    assert "hwrl: not measured: it took longer than 0.1 s" in capsys.readouterr().out


def test_a_spawned_process_begins_without_torch() -> None:
    """It imports torch in its own session, where an error is reported."""
    packed = pickle.dumps(SaveWorkload(1, "none", 1, 0.0, "host", Path())).hex()
    code = f"import pickle, sys, hwrl_bench.checkpoint_process; pickle.loads(bytes.fromhex('{packed}'))"
    code += "; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
