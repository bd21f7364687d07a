"""hwrl bench plan, on the tiny model."""

import json
from pathlib import Path

import pytest

from hwrl.cli import main


def test_the_command_measures_a_step_beside_its_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "plan", "--tokens", "1024", "--length", "256", "--checkpointing", "false"]
    assert main([*words, "--json", str(tmp_path / "result.json")]) == 0
    row = json.loads((tmp_path / "result.json").read_text())["models"]["tiny"]
    assert row["planned_nbytes"] == sum(row["causes"].values())
    assert row["planned_nbytes"] == pytest.approx(row["measured_nbytes"], rel=0.1)
    assert "tiny" in capsys.readouterr().out
