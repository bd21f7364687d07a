"""hwrl bench weights --peers: other packages' ways beside hwrl's, or the reason why there are none."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hwrl.cli import main
from hwrl_bench import weights
from hwrl_bench.ways import TransferResult
from hwrl_bench.weights_peers import PEERS, PeerTransfer
from hwrl_bench.weights_ways import TransferSetup

WORDS = ["bench", "weights", "--mib", "1", "--rounds", "1", "--bucket-mib", "1", "--ways", "hwrl host"]


class Stored(PeerTransfer):
    """A peer that needs no other package: the tensors go through a file."""

    package = "stored"
    turn = 0

    @classmethod
    def version(cls) -> str:
        return "1"

    @classmethod
    def run(cls, measure: Any, size: int, *args: Any, timeout_s: float) -> list[Any]:
        from hwrl.testing import run_processes

        return run_processes(measure_with, size, size, cls.__name__, *args, timeout_s=timeout_s)

    def send(self, version: int) -> TransferResult:
        self.turn += 1
        with tempfile.NamedTemporaryFile(delete=False) as file:
            torch.save(dict(self.tensors), file)
        self.worker.put(f"{self.turn}", file.name)
        return self.finished()

    def receive(self, version: int) -> TransferResult:
        self.turn += 1
        file = Path(self.worker.get(f"{self.turn}"))
        self.load(list(torch.load(file, weights_only=True).items()))
        file.unlink()
        return self.finished()


class Wrong(Stored):
    """It loses the last bit of everything."""

    def load(self, pairs: list[tuple[str, torch.Tensor]]) -> None:
        from hwrl.comm import raw_bytes

        super().load(pairs)
        for tensor in self.target.values():
            raw_bytes(tensor).bitwise_and_(0xFE)


class Hanging(Stored):
    """Its receivers wait for ever."""

    def receive(self, version: int) -> TransferResult:
        time.sleep(3600)
        return self.finished()


class Refusing(Stored):
    """It cannot work on this machine."""

    def __init__(self, setup: TransferSetup) -> None:
        raise RuntimeError("no such device\nand forty lines of stack")


def measure_with(rank: int, size: int, peer: str, address: str, plan: Any, workload: Any) -> Any:
    PEERS["stored"] = globals()[peer]
    return weights.measure(rank, size, address, plan, workload)


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[type[PeerTransfer]], dict[str, Any]]:
    def run(peer: type[PeerTransfer]) -> dict[str, Any]:
        monkeypatch.setitem(PEERS, "stored", peer)
        target = tmp_path / "bench.json"
        patience = ["--peer-timeout", "5"] if peer is Hanging else []
        assert main([*WORDS, "--peers", "stored", *patience, "--json", str(target)]) == 0
        result: dict[str, Any] = json.loads(target.read_text())
        return result

    return run


def test_a_peer_is_measured_in_turns_with_the_raw_ways(bench: Any, capsys: pytest.CaptureFixture[str]) -> None:
    ways = bench(Stored)["peers"]["stored"]["ways"]
    assert set(ways) == {"flat broadcast", "flat broadcast in pieces", "stored"}
    assert ways["stored"]["bit_exact"] and ways["stored"]["of_raw"] > 0 and ways["stored"]["gb_per_s"] > 0
    assert "stored 1" in capsys.readouterr().out


def test_wrong_bits_of_a_peer_are_seen(bench: Any, capsys: pytest.CaptureFixture[str]) -> None:
    result = bench(Wrong)
    assert result["peers"]["stored"]["ways"]["stored"]["bit_exact"] is False
    assert result["bit_exact"] is True, "of hwrl's own ways"
    assert "NOT BIT-EXACT: stored 1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("peer", "why"), [(Hanging, "still running at the deadline"), (Refusing, "RuntimeError: no such device")]
)
def test_a_peer_that_fails_is_a_row_with_its_reason(
    peer: type[PeerTransfer], why: str, bench: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    result = bench(peer)
    why_not = result["peers"]["stored"]["why_not"]
    assert why in why_not and "\n" not in why_not
    assert result["ways"]["hwrl host"]["bit_exact"]
    assert f"stored: not measured: {why_not}" in capsys.readouterr().out


def test_real_peers_are_measured_or_say_why_not(tmp_path: Path) -> None:
    target = tmp_path / "bench.json"
    assert main([*WORDS, "--peers", "all", "--json", str(target)]) == 0
    for name, row in json.loads(target.read_text())["peers"].items():
        if PEERS[name].why_not() is not None:
            assert row == {"why_not": f"{name} is not installed"}
        else:
            assert row.get("why_not") or row["ways"][name]["bit_exact"], "none of them works on the CPU"


def test_an_unknown_peer_is_refused_with_the_nearest_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*WORDS, "--peers", "vlm"])
    assert "there is no peer 'vlm'; did you mean 'vllm'?" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*WORDS, "--peers", "zzz"])
    assert "choose all, or some of checkpoint-engine, vllm, verl" in capsys.readouterr().err
