"""Ranks that are processes: each collective equals Gloo's, and what a lost, late or aborting rank does to others."""

import re
from collections.abc import Callable
from pathlib import Path

import collectives
import pytest
from conftest import Python

Start = Callable[..., Python]


@pytest.fixture(scope="module", params=[2, 4])
def reports(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What each rank printed of all cases: its processes are shared, as each takes seconds to import torch."""
    path = tmp_path_factory.mktemp("ranks")
    ranks = [
        Python(
            "",
            rank,
            request.param,
            path / "store",
            env={"NPUSIM_NODE": str(path / "node")},
            file=Path(collectives.__file__),
        )
        for rank in range(request.param)
    ]
    results = [rank.result() for rank in ranks]
    assert [status for status, _, _ in results] == [0] * request.param, results
    return [out for _, out, _ in results]


@pytest.mark.parametrize("name", collectives.CASES)
def test_a_collective_equals_gloos(reports: list[str], name: str) -> None:
    for rank, report in enumerate(reports):
        assert f"CASE {name} same" in report.splitlines(), (rank, re.findall(f"CASE {name} .*", report))


PREAMBLE = """
import os, sys, threading, time, torch, torch.distributed as dist
rank, world, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
torch.npu.set_device(rank)
dist.init_process_group("hccl", init_method=f"file://{store}", rank=rank, world_size=world)
tensor = torch.ones(4, device="npu")
dist.all_reduce(tensor)
torch.npu.synchronize()
def failure(function):
    start = time.monotonic()
    try:
        function()
        torch.npu.synchronize()
    except RuntimeError as exc:
        print(f"FAILED after {time.monotonic() - start:.1f} s:", str(exc).replace("\\n", " "), flush=True)
        os._exit(0)
"""


def run_ranks(python: Start, tmp_path: Path, code: str, *, world: int, **env: str) -> list[tuple[int, str, str]]:
    ranks = [python(PREAMBLE + code, rank, world, tmp_path / "store", **env) for rank in range(world)]
    return [rank.result() for rank in ranks]


def failed(result: tuple[int, str, str]) -> tuple[float, str]:
    """How long a rank waited, in seconds, and what it was told."""
    found = re.search(r"FAILED after ([0-9.]+) s: (.*)", result[1])
    assert found, result
    return float(found[1]), found[2]


def test_a_lost_peer_is_named_within_seconds(python: Start, tmp_path: Path) -> None:
    """By NPUSIM_FAULT_EXIT: rank 1 is killed at its second collective, and no file is left of it."""
    results = run_ranks(python, tmp_path, "failure(lambda: dist.all_reduce(tensor))", world=3, NPUSIM_FAULT_EXIT="1:2")
    assert results[1][0] == -9
    for rank in (0, 2):
        seconds, message = failed(results[rank])
        assert seconds < 60
        assert "507015" in message
        assert "rank 1 is gone" in message


def test_a_late_peer_times_out_and_is_named(python: Start, tmp_path: Path) -> None:
    code = "failure(lambda: dist.all_reduce(tensor)) if rank == 0 else sys.stdin.readline()\nos._exit(0)"
    ranks = [python(PREAMBLE + code, rank, 2, tmp_path / "store", NPUSIM_HCCL_TIMEOUT="4") for rank in range(2)]
    seconds, message = failed(ranks[0].result())
    ranks[1].tell("end")
    assert seconds >= 4
    assert "timed out" in message
    assert "waiting for rank 1" in message


ABORT = """
if rank == 1:
    sys.stdin.readline()
    os._exit(0)
backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device("npu"))
threading.Timer(1, lambda: backend.abort_hccl_comm("test")).start()
failure(lambda: dist.all_reduce(tensor))
"""


def test_abort_ends_a_blocked_collective(python: Start, tmp_path: Path) -> None:
    ranks = [python(PREAMBLE + ABORT, rank, 2, tmp_path / "store") for rank in range(2)]
    seconds, message = failed(ranks[0].result())
    assert seconds < 60
    assert "aborted" in message
    ranks[1].tell("end")


def test_ranks_that_disagree_are_told(python: Start, tmp_path: Path) -> None:
    code = "failure(lambda: dist.all_reduce(tensor if rank == 0 else tensor[:2]))"
    for result in run_ranks(python, tmp_path, code, world=2):
        assert "AllReduce(count 4" in failed(result)[1]
        assert "AllReduce(count 2" in failed(result)[1]


def test_types_that_hccl_does_not_reduce_are_refused(python: Start) -> None:
    """Below torch_npu, which has checks of its own. int64 gets as far as the check of the communicator."""
    float64, uint8, int64, not_supported = 10, 7, 5, "5"
    call = "acl.HcclAllReduce(None, None, ctypes.c_uint64(1), {}, 0, None, None)"
    code = "".join(f"print({call.format(kind)}, flush=True)\n" for kind in (float64, uint8, int64))
    status, out, err = python(code).result()
    assert out.split() == [not_supported, not_supported]
    assert status == 86
    assert "AllReduce wants a handle of kind HcclComm and got null" in err
