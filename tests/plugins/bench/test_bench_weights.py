"""hwrl bench weights, at a size that tests can afford."""

import json
from pathlib import Path
from typing import Any

import pytest

from hwrl.cli import main
from hwrl.comm import serve_store, store_address
from hwrl.testing import run_processes
from hwrl_bench.ways import BenchPlan, TransferResult
from hwrl_bench.weights import TransferWorkload, measure
from hwrl_bench.weights_ways import WAYS, Needs, PayloadWay


def test_the_benchmark_measures_every_way_bit_exactly(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "bench.json"
    words = ["bench", "weights", "--mib", "4", "--rounds", "2", "--receivers", "2", "--bucket-mib", "1"]
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


def test_two_senders_of_the_benchmark_share_each_version(tmp_path: Path) -> None:
    target = tmp_path / "bench.json"
    words = ["bench", "weights", "--mib", "4", "--rounds", "2", "--senders", "2", "--bucket-mib", "1"]
    assert main([*words, "--json", str(target)]) == 0
    result = json.loads(target.read_text())
    assert result["bit_exact"] is True and (result["senders"], result["receivers"]) == (2, 1)
    assert {"hwrl device", "hwrl device flat"} <= set(result["ways"]) and "hwrl host" not in result["ways"]


def test_a_mixtures_experts_are_sent_as_parts_of_their_parameters(tmp_path: Path) -> None:
    target = tmp_path / "bench.json"
    words = ["bench", "weights", "--model", "tiny-mixture", "--layers", "2", "--rounds", "1", "--ways", "hwrl device"]
    assert main([*words, "--json", str(target)]) == 0
    result = json.loads(target.read_text())
    assert result["bit_exact"] is True
    assert result["tensors"] == 2 * (9 + 3 * 8) + 3


class IdleWay(PayloadWay):
    """Moves nothing, and shows the memory that another way filled in the same round."""

    def send(self, version: int) -> TransferResult:
        return TransferResult()

    def receive(self, version: int) -> TransferResult:
        return TransferResult(tensors=self.payload.copies)


def measure_with_an_idle_way(rank: int, size: int, address: str, plan: BenchPlan, workload: TransferWorkload) -> Any:
    WAYS["idle"] = (Needs.NOTHING, IdleWay)
    return measure(rank, size, address, plan, workload)["exact"]


@pytest.mark.parametrize("between", [(), ("hwrl host",)], ids=["one change later", "two changes later"])
def test_a_way_in_place_that_moves_nothing_is_found(between: tuple[str, ...]) -> None:
    plan = BenchPlan(("per-tensor broadcast", *between, "idle"), rounds=2)
    store = serve_store()
    workload = TransferWorkload("awkward", 1 << 20, None, 4)
    _, exact = run_processes(measure_with_an_idle_way, 2, 2, store_address(store), plan, workload)
    assert exact == {way: way != "idle" for way in plan.ways}
