"""Prompt groups through the real ledger of a run, and through Ray's queue."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hwrl.cli import main
from hwrl.run import Config
from hwrl_bench.ledger import summarize, table
from hwrl_bench.ledger_ways import queue_size

MIB = 1 << 20


def test_growth_counts_from_the_end_of_the_first_fifth() -> None:
    nbytes = [50 * MIB, 100 * MIB, 100 * MIB, 100 * MIB, 101 * MIB]
    rounds = [{"seconds": 2.0, "take_s": [0.5] * 98 + [9.0] * 2, "hand_in_s": [0.001], "nbytes": one} for one in nbytes]
    row = summarize(rounds, groups=100)
    expected = {
        "groups_per_s": 50.0,
        "growth": 0.01,
        "take_p50_ms": 500.0,
        "take_p99_ms": 9000.0,
        "hand_in_p50_ms": 1.0,
    }
    assert {name: row[name] for name in expected} == pytest.approx(expected)
    assert "hwrl ledger" in table({"groups": 500, "ways": {"hwrl ledger": row}})


@pytest.mark.parametrize(
    ("batch", "staleness", "call"), [(64, 0, 48), (64, 0, 64), (64, 3, 16), (1, 0, 500), (8, 0, 1)]
)
def test_the_queue_always_has_room_for_a_call_or_a_batch_for_the_trainer(
    tmp_path: Path, batch: int, staleness: int, call: int
) -> None:
    settings = {"train": {"batch_groups": batch}, "async_training": {"staleness_threshold": staleness}}
    words = {"dir": tmp_path, "model": {"path": "m"}, "data": {"train": "t"}, "reward": {"function": "m:f"}}
    size = queue_size(Config.model_validate({**words, **settings}), call)
    assert size >= (staleness + 1) * batch, "as many groups as in the ledger"
    assert size - (batch - 1) >= call, "with less than a batch in it, a call fits"


@pytest.mark.extended  # starts Ray; the rules of the ledger's process have tests without
@pytest.mark.long(30)
@pytest.mark.parametrize("more", [[], ["--staleness", "0", "--call", "24"]])
def test_every_group_arrives_by_both_ways_and_the_memory_is_flat(tmp_path: Path, more: list[str]) -> None:
    words = ["--groups", "6400", "--rounds", "10", "--batch", "32", *more, "--json", str(tmp_path / "result.json")]
    assert main(["bench", "ledger", *words]) == 0
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["groups"] == 6400 and set(result["ways"]) == {"hwrl ledger", "ray.util.queue"}
    for row in result["ways"].values():
        assert row["groups_per_s"] > 100 and row["growth"] < 0.1
