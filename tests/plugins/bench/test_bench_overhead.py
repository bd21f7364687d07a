"""hwrl bench overhead, with few calls."""

import json
from pathlib import Path

import pytest

from hwrl.cli import main


def test_every_call_is_measured_beside_torchs_own_where_there_is_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "overhead.json"
    assert main(["bench", "overhead", "--calls", "100", "--json", str(target)]) == 0
    result = json.loads(target.read_text())
    assert {"device()", "current_stream()", "memory_info()", "Group.broadcast"} <= result["measured"].keys()
    assert all(found["hwrl_ns"] > 0 for found in result["measured"].values())
    assert result["measured"]["Group.broadcast"]["torch_ns"] > 0
    over = [name for name, found in result["measured"].items() if (found["more_ns"] or 0) > result["limit_ns"]]
    assert result["over_the_limit"] == over
    assert result["versions"]["torch"] and result["date"]
    assert "more ns" in capsys.readouterr().out
