"""The promises of hwrl.comm, with real processes."""

import contextlib
import functools
import gc
import os
import resource
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hwrl.comm import Comm, Group, HashStore, Store, await_keys, connect_store, serve_store, store_address
from hwrl.errors import CommAbortedError, CommError, CommTimeoutError, PeerLostError, UnsupportedError
from hwrl.interfaces import Capability, Support
from hwrl.testing.processes import Processes, run_processes
from hwrl_cpu import INFO, CpuBackend
from tests.support.speed import slow

DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.uint8,
    torch.int64,
    torch.uint16,
    torch.uint64,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
)


def _group(rank: int, address: str, *, size: int, name: str = "g", timeout_s: float = 200.0) -> Group:
    comm = Comm(CpuBackend(INFO))
    return comm.standalone_group(connect_store(address), rank=rank, size=size, name=name, timeout_s=timeout_s)


def _sample(dtype: torch.dtype, seed: int) -> torch.Tensor:
    raw = torch.randint(0, 2, (24,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return raw.view(torch.bool) if dtype is torch.bool else raw.view(dtype)


def _same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.equal(left.view(-1).view(torch.uint8), right.view(-1).view(torch.uint8))


def _every_operation(rank: int, address: str) -> bool:
    with _group(rank, address, size=2) as group:
        group.warm_up()
        for dtype in DTYPES:
            _move_every_way(group, dtype)
        _reduce_every_way(group)
        scalar = torch.tensor(float(rank))
        group.broadcast(scalar, src=1)
        group.broadcast(torch.empty(0), src=0)
        pending = group.broadcast(scalar, src=0, async_op=True)
        pending.wait()
        group.barrier()
        return scalar.item() == 1.0 and not dist.is_initialized()


def _move_every_way(group: Group, dtype: torch.dtype) -> None:
    theirs = _sample(dtype, 0)
    tensor = theirs.clone() if group.rank == 0 else torch.zeros_like(theirs)
    group.broadcast(tensor, src=0)
    assert _same(tensor, theirs), dtype
    gathered = torch.zeros(2 * theirs.numel(), dtype=dtype)
    group.all_gather(gathered, _sample(dtype, group.rank))
    assert _same(gathered, torch.cat([_sample(dtype, 0), _sample(dtype, 1)])), dtype
    if group.rank == 0:
        group.send(_sample(dtype, 7), dst=1)
        return
    group.recv(tensor, src=0)
    assert _same(tensor, _sample(dtype, 7)), dtype


def _reduce_every_way(group: Group) -> None:
    mine = torch.tensor([1.0, 10.0]) * (group.rank + 1)
    for op, expected in (("sum", [3.0, 30.0]), ("max", [2.0, 20.0]), ("min", [1.0, 10.0])):
        tensor = mine.clone()
        group.all_reduce(tensor, op=op)  # type: ignore[arg-type]  # the tuple's type is str
        assert tensor.tolist() == expected
    part = torch.empty(1)
    group.reduce_scatter(part, mine)
    assert part.item() == (3.0, 30.0)[group.rank]
    with pytest.raises(UnsupportedError, match="complex64"):
        group.all_reduce(torch.ones(1, dtype=torch.complex64))
    with pytest.raises(CommError, match="contiguous"):
        group.broadcast(torch.ones(2, 3).T, src=0)
    with pytest.raises(CommError, match="is not 2 times"):
        group.all_gather(torch.empty(3), torch.empty(2))


def test_every_operation_and_dtype_without_a_default_group() -> None:
    store = serve_store()
    assert run_processes(_every_operation, 2, store_address(store)) == [True, True]


def _default_and_standalone(rank: int, address: str) -> tuple[Any, ...]:
    comm = Comm(CpuBackend(INFO))
    store = connect_store(address)
    with comm.init_default(store=store, rank=rank, size=2, timeout_s=200.0) as world:
        before = (dist.get_world_size(), dist.group.WORLD)
        with comm.standalone_group(store, rank=0, size=1, name=f"alone {rank}") as alone:
            alone.barrier()
        assert (dist.get_world_size(), dist.group.WORLD) == before
        with pytest.raises(CommError, match=r"make the group of ranks 0,2 failed"):
            comm.new_group([0, 2])
        pair, lonely = comm.new_group([1, 0]), comm.new_group([1])
        assert pair is not None and (lonely is None) == (rank == 0)
        assert pair.rank == rank
        total = torch.ones(1)
        pair.all_reduce(total)
        with pytest.raises(UnsupportedError, match="torch made it"):
            world.abort("this cannot work")
        world.barrier()
    return total.item(), dist.is_initialized()


def test_a_default_group_and_standalone_groups_do_not_meet() -> None:
    store = serve_store()
    assert run_processes(_default_and_standalone, 2, store_address(store)) == [(2.0, False), (2.0, False)]


def _borrow_the_default_group(_: int) -> list[float]:
    found = []
    for backend in (CpuBackend(INFO), Mute(INFO)):
        comm = Comm(backend)
        with comm.init_default(store=HashStore(), rank=0, size=1, timeout_s=30.0):
            with comm.default_group() as borrowed:
                found.append(borrowed.timeout_s)
            with pytest.raises(CommAbortedError):
                borrowed.barrier()
            with pytest.raises(KeyError), Comm(backend).default_group():
                raise KeyError
            comm.default_group().barrier()
        assert not dist.is_initialized()
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=45))
    with Comm(CpuBackend(INFO)).default_group() as borrowed:
        found.append(borrowed.timeout_s)
    assert dist.is_initialized()
    return found


class Mute(CpuBackend):
    """A device whose groups are staged through the host."""

    def supports(self, capability: Capability) -> Support:
        return Support("unsupported", "none") if capability is Capability.COLLECTIVES else super().supports(capability)


def test_who_asks_for_the_default_group_gets_its_timeout_and_does_not_end_it() -> None:
    assert run_processes(_borrow_the_default_group, 1) == [[30.0, 30.0, 45.0]]


def _abort_from_another_thread(rank: int, address: str) -> float:
    group, other = (_group(rank, address, size=2, name=name) for name in ("doomed", "spared"))
    store = connect_store(address)
    if rank == 1:
        assert not await_keys(store, ["aborted"], timeout_s=600.0)
        other.barrier()
        with pytest.raises(PeerLostError):
            group.recv(torch.empty(1), src=0)
        return 0.0
    aborted_s: list[float] = []

    def abort() -> None:
        aborted_s.append(time.monotonic())
        group.abort("the test says so")

    timer = threading.Timer(0.3, abort)
    timer.start()
    with pytest.raises(CommAbortedError, match="the test says so"):
        group.recv(torch.empty(1), src=1)
    ended_s = time.monotonic()
    timer.join()
    store.set("aborted", "")
    other.barrier()
    with pytest.raises(CommAbortedError, match="the test says so"):
        group.barrier()
    return ended_s - aborted_s[0]


def test_abort_ends_a_blocked_operation_and_spares_other_groups() -> None:
    store = serve_store()
    took_s, _ = run_processes(_abort_from_another_thread, 2, store_address(store))
    assert took_s < slow(1.0)


def _receive_and_abort(group: Group) -> None:
    with contextlib.suppress(CommError):
        begun = [group.broadcast(torch.zeros(1024), src=0, async_op=True) for _ in range(8)]
        begun[-1].wait()  # which never comes: rank 0 aborts
    group.abort("rank 0 has ended it")
    group.close()


def _abort_while_sending(rank: int, address: str) -> float:
    """Return the longest time that one of many aborts took, beside operations that begin just then."""
    longest_s = 0.0
    stores = [connect_store(address) for _ in range(2)]
    for number in range(100):
        make = functools.partial(
            Comm(CpuBackend(INFO)).standalone_group, name=f"g{number}", size=2, timeout_s=slow(60.0)
        )
        with ThreadPoolExecutor(2) as threads:
            other = threads.submit(make, stores[1], rank=1)
            group = make(stores[0], rank=0)
            receiving = threads.submit(_receive_and_abort, other.result())
            begun = [group.broadcast(torch.zeros(1024), src=0, async_op=True) for _ in range(2)]
            time.sleep(0.0001 * (number % 20))
            began_s = time.monotonic()
            group.abort("the test says so")
            with contextlib.suppress(CommError):
                begun[-1].wait()
            del begun
            group.close()
            receiving.result()
            longest_s = max(longest_s, time.monotonic() - began_s)
    return longest_s


def test_an_abort_waits_for_no_operation_that_the_library_has_lost() -> None:
    store = serve_store()
    (took_s,) = run_processes(_abort_while_sending, 1, store_address(store))
    assert took_s < slow(30.0)


def _abort_without_files(rank: int, address: str) -> tuple[str, str]:
    group, store = _group(rank, address, size=1), connect_store(address)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    with pytest.raises(CommError) as aborted:
        group.abort("this process may open no file")
    with pytest.raises(CommError) as made:
        Comm(CpuBackend(INFO)).standalone_group(store, rank=rank, size=1, name="more", timeout_s=600.0)
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    return aborted.value.why, made.value.why


def test_a_process_that_may_open_no_file_is_told_why() -> None:
    store = serve_store()
    (whys,) = run_processes(_abort_without_files, 1, store_address(store))
    assert all("Too many open files" in why for why in whys), whys


def _survive(rank: int, address: str, ready: Path) -> tuple[int, int, float]:
    group = _group(rank, address, size=3)
    group.warm_up()
    if rank == 1:
        ready.touch()
        signal.pause()
    with pytest.raises((PeerLostError, CommTimeoutError)):
        group.recv(torch.empty(1), src=1)
    with pytest.raises(CommTimeoutError, match=f"did not come within {slow(2):g} s: 1"):
        group.rebuild(survivors=[0, 1, 2], timeout_s=slow(2))
    with group.rebuild(survivors=[2, 0], timeout_s=200.0) as rebuilt:
        total = torch.tensor([float(rank)])
        rebuilt.all_reduce(total)
        return rebuilt.rank, rebuilt.size, total.item()


def test_survivors_rebuild_after_a_member_is_killed(tmp_path: Path) -> None:
    store, ready = serve_store(), tmp_path / "ready"
    with Processes(_survive, 3, store_address(store), ready) as processes:
        _await_file(ready)
        processes.kill(1)
        assert processes.wait(0).value == (1, 2, 2.0), processes.wait(0)
        assert processes.wait(2).value == (0, 2, 2.0), processes.wait(2)


def _await_file(path: Path) -> None:
    deadline = time.monotonic() + 300.0
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} never came"
        time.sleep(0.01)


def _operation_times_out(rank: int, address: str) -> None:
    group = _group(rank, address, size=2, timeout_s=slow(3))
    if rank == 0:
        with pytest.raises(
            CommTimeoutError, match=f"recv from rank 1 in group 'g' on rank 0 of 2.*within {slow(3):g} s"
        ):
            group.recv(torch.empty(1), src=1)
        with pytest.raises(CommTimeoutError, match=r"cannot warm up 'g'[\s\S]*did not come within 0.3 s: 1"):
            group.warm_up(timeout_s=0.3)
        connect_store(address).set("done", "")
    assert not await_keys(connect_store(address), ["done"], timeout_s=600.0)


def test_timeouts_name_the_operation_the_group_and_the_absent_rank() -> None:
    store = serve_store()
    run_processes(_operation_times_out, 2, store_address(store))


def test_a_group_names_the_ranks_that_never_came() -> None:
    store, comm = serve_store(), Comm(CpuBackend(INFO))
    with pytest.raises(CommTimeoutError, match=r"of 3 ranks, these did not come within 0.2 s: 0, 2"):
        comm.standalone_group(store, rank=1, size=3, name="thin", timeout_s=0.2)
    with pytest.raises(CommError, match="rank 1 of group 'thin' is taken"):
        comm.standalone_group(store, rank=1, size=3, name="thin", timeout_s=0.2)


def test_a_store_that_is_not_there_is_named() -> None:
    with pytest.raises(CommTimeoutError, match=r"no store answers at 127.0.0.1:1"):
        connect_store("127.0.0.1:1#key", timeout_s=0.2)
    with pytest.raises(CommError, match="host:port"):
        connect_store("nonsense")
    store = serve_store()
    with pytest.raises(CommError, match="another port, or 0 for a free one"):
        serve_store(port=int(store_address(store).partition("#")[0].rpartition(":")[2]))


def test_the_store_helpers_agree() -> None:
    store: Store = serve_store()
    other = connect_store(store_address(store))
    other.set("key", "value")
    assert store.get("key") == b"value"
    assert await_keys(store, ["key", "absent"], timeout_s=0.05) == ("absent",)


def test_groups_and_aborts_leave_no_open_files() -> None:
    store, comm = serve_store(), Comm(CpuBackend(INFO))

    def make_and_close(number: int) -> None:
        comm.standalone_group(store, rank=0, size=1, name=f"alone {number}").close()

    make_and_close(0)
    before = len(os.listdir("/proc/self/fd"))
    for number in range(1, 6):
        make_and_close(number)
    gc.collect()
    deadline = time.monotonic() + 200.0
    while len(os.listdir("/proc/self/fd")) > before + 2 and time.monotonic() < deadline:  # a thread ends aborted groups
        time.sleep(0.05)
    assert len(os.listdir("/proc/self/fd")) <= before + 2
