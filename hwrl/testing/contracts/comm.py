"""The contract of process groups, in two real processes."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import ClassVar, cast

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import hwrl
from hwrl.comm import Comm, Group, connect_store
from hwrl.errors import CommAbortedError, CommTimeoutError, PeerLostError, UnsupportedError
from hwrl.interfaces import Backend, Capability
from hwrl.testing.contracts.need import need, need_two_ranks
from hwrl.testing.contracts.pair import StoreAddress, await_others, backend_of_rank
from hwrl.testing.levels import Level
from hwrl.testing.limits import scaled
from hwrl.testing.processes import Processes, run_processes

_DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
)
_ABORT_S = 5.0
_NOTICE_S = 5.0
_UNDER_WAY = 4
_SUM = 3.0


class CommContract:
    """Groups of two processes with only a store in common: right results, named missing ranks, a working abort."""

    level: ClassVar[Level] = Level.COLLECTIVES

    @pytest.fixture(autouse=True)
    def _only_where_two_ranks_fit(self, backend: Backend) -> None:
        need_two_ranks(backend)

    @pytest.fixture
    def address(self) -> StoreAddress:
        """The address of the two processes' store."""
        return StoreAddress()

    def test_collectives_are_right(self, backend: Backend, address: StoreAddress) -> None:
        """Bit for bit: gathers, broadcasts, sends and receives of every usual dtype, 0-d and odd sizes too.

        Sums of float32 and the maximum of int64, too.
        """
        assert run_processes(_collect, 2, backend.info.name, str(address)) == [[], []]

    def test_the_default_group_is_torchs(self, backend: Backend, address: StoreAddress) -> None:
        """DeviceMesh and FSDP2 use torch's default group. A sharded step equals the step of one process."""
        assert run_processes(_shard_over_default_group, 2, backend.info.name, str(address)) == [[], []]

    def test_an_absent_peer_is_named(self, backend: Backend, address: StoreAddress) -> None:
        """An incomplete group fails after its timeout, and the error names the missing ranks."""
        store = connect_store(str(address))
        with pytest.raises(CommTimeoutError, match=r"did not come within 0\.2 s: 1"):
            Comm(backend).standalone_group(store, rank=0, size=2, name="lonely", timeout_s=0.2)

    def test_abort_ends_what_is_blocked_or_is_refused(self, backend: Backend, address: StoreAddress) -> None:
        """A receive without a sender ends at once after an abort. A backend without abort refuses the abort."""
        able = backend.supports(Capability.COMM_ABORT).usable
        wanted = [CommAbortedError.__name__ if able else UnsupportedError.__name__, ""]
        assert run_processes(_abort_blocked_receive, 2, backend.info.name, str(address)) == wanted

    def test_a_killed_peer_is_noticed_and_replaced(self, backend: Backend, address: StoreAddress) -> None:
        """A rank is killed during a broadcast: the other gets an error within the timeout, and works in new groups."""
        need(backend, Capability.COMM_ABORT)  # without it, nothing frees a device from waiting for a dead peer
        store = connect_store(str(address))
        with Processes(_survive_or_be_killed, 2, backend.info.name, str(address), timeout_s=120.0) as pair:
            await_others(store, "moving", limit_s=60.0)
            pair.kill(1)
            await_others(store, "noticed", limit_s=2 * _NOTICE_S)
            with Processes(_replace, 1, backend.info.name, str(address), timeout_s=60.0) as replacement:
                survived, replaced = pair.wait(0), replacement.wait(0)
        for outcome in (replaced, survived):
            if outcome.error is not None:
                raise outcome.error
            assert outcome.value == _SUM


def _group(rank: int, name: str, address: str) -> Group:
    store = connect_store(address)
    return Comm(backend_of_rank(rank, name)).standalone_group(
        store, rank=rank, size=2, name="pair", timeout_s=scaled(30.0)
    )


def _collect(rank: int, name: str, address: str) -> list[str]:
    """Return the errors, one line each."""
    with _group(rank, name, address) as group:
        wrong = [line for shape in ((), (1,), (4097,)) for dtype in _DTYPES for line in _moved(group, shape, dtype)]
        return wrong + _reduced(group)


def _moved(group: Group, shape: tuple[int, ...], dtype: torch.dtype) -> list[str]:
    first, second = (_numbers(group.backend, shape, dtype, seed=seed) for seed in (1, 2))
    mine = (first, second)[group.rank].clone()
    gathered = torch.stack([torch.zeros_like(mine), torch.zeros_like(mine)])
    group.all_gather(gathered, mine)
    group.broadcast(mine, src=1)
    received = torch.zeros_like(first)
    if group.rank == 0:
        group.send(first, dst=1)
        group.recv(received, src=1)
    else:
        group.recv(received, src=0)
        group.send(first, dst=0)
    checks = {
        "all_gather": torch.equal(gathered, torch.stack([first, second])),
        "broadcast": torch.equal(mine, second),
        "send and recv": torch.equal(received, first),
    }
    return [f"{op} of {dtype} {shape} is wrong on rank {group.rank}" for op, good in checks.items() if not good]


def _numbers(backend: Backend, shape: tuple[int, ...], dtype: torch.dtype, *, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 100, shape, generator=generator).to(dtype).to(backend.device())


def _reduced(group: Group) -> list[str]:
    device = group.backend.device()
    total = torch.full((5,), float(group.rank + 1), device=device)
    group.all_reduce(total)
    largest = torch.tensor([group.rank], dtype=torch.int64, device=device)
    group.all_reduce(largest, op="max")
    part = torch.empty(3, device=device)
    group.reduce_scatter(part, torch.arange(6.0, device=device))
    group.barrier()
    checks = {
        "all_reduce sum": total.tolist() == [3.0] * 5,
        "all_reduce max": largest.tolist() == [1],
        "reduce_scatter": part.tolist() == ([0.0, 2.0, 4.0], [6.0, 8.0, 10.0])[group.rank],
    }
    return [f"{op} is wrong on rank {group.rank}" for op, good in checks.items() if not good]


def _shard_over_default_group(rank: int, name: str, address: str) -> list[str]:
    """Compare a sharded step with one process's step on the whole batch; return the names of different parameters."""
    from hwrl.train.sharding import sum_if_needed  # late: it counts the devices of some vendors

    backend = backend_of_rank(rank, name)
    with Comm(backend).init_default(store=connect_store(address), rank=rank, size=2, timeout_s=scaled(30.0)):
        mesh = init_device_mesh(backend.info.device_type, (1, 2), mesh_dim_names=("replicate", "shard"))
        total = torch.tensor(float(rank + 1), device=backend.device())
        torch.distributed.all_reduce(total, group=mesh["shard"].get_group())
        assert float(total) == _SUM
        alone, sharded = _small_model(), _small_model().to(backend.device())
        for layer in sharded:
            fully_shard(layer, mesh=mesh["shard"])
        fully_shard(sharded, mesh=mesh["shard"])
        sum_if_needed(sharded, backend)
        batch = torch.linspace(-1, 1, 2 * 3 * 8).view(2, 3, 8)
        _take_step(alone, batch)
        _take_step(sharded, batch[rank].to(backend.device()))
        wholes = {key: cast(DTensor, parameter).full_tensor().cpu() for key, parameter in sharded.named_parameters()}
        return [key for key, right in alone.named_parameters() if not torch.allclose(wholes[key], right, atol=1e-3)]


def _small_model() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 5), nn.Linear(5, 3))  # odd sizes: uneven shards


def _take_step(model: nn.Module, batch: torch.Tensor) -> None:
    model(batch).square().mean().backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()


def _abort_blocked_receive(rank: int, name: str, address: str) -> str:
    """On rank 0, return the name of the error of the receive, or of a refused abort. Rank 1 only waits for the end."""
    group, store = _group(rank, name, address), connect_store(address)
    first = torch.zeros(4, device=group.backend.device())
    if rank == 1:
        group.send(first, dst=0)
        store.wait(["tried"], timedelta(seconds=scaled(300.0)))  # the other rank ends by its own limit
        return ""
    try:
        group.recv(first, src=1, async_op=True).complete()
        return _end_of_receive(group)
    finally:
        store.set("tried", "yes")


def _end_of_receive(group: Group) -> str:
    ended: list[str] = []
    buffer = torch.zeros(4, device=group.backend.device())

    def receive() -> None:
        try:
            group.recv(buffer, src=1, async_op=True).complete()
        except hwrl.HwrlError as error:
            ended.append(type(error).__name__)

    # A daemon, because a receive without an end must not keep the process alive.
    blocked = threading.Thread(target=receive, daemon=True)
    blocked.start()
    blocked.join(0.5)
    try:
        group.abort("the test ends it")
    except UnsupportedError as error:
        return type(error).__name__
    blocked.join(scaled(_ABORT_S))
    if not ended:
        raise TimeoutError(f"the receive did not end within {scaled(_ABORT_S):g} s after abort")
    return ended[0]


def _survive_or_be_killed(rank: int, name: str, address: str) -> float:
    """Broadcast from rank 0 until rank 1 is killed; return the sum in a group with its replacement."""
    backend, store = backend_of_rank(rank, name), connect_store(address)
    store.set(f"started/{rank}", "")  # wait for both: a start may take longer than the group's timeout
    await_others(store, "started/0", "started/1", limit_s=60.0)
    group = Comm(backend).standalone_group(store, rank=rank, size=2, name="doomed", timeout_s=scaled(_NOTICE_S))
    group.warm_up()
    tensor = torch.zeros(1 << 22, device=backend.device())
    with pytest.raises((CommTimeoutError, PeerLostError)):
        for _ in range(1_000_000):
            pending = [group.broadcast(tensor, src=0, async_op=True) for _ in range(_UNDER_WAY)]
            for one in pending:
                one.complete()
            if rank == 0:
                store.set("moving", "")
    store.set("noticed", "")
    backend.synchronize()
    with group.rebuild(survivors=[0]) as alone:
        alone.barrier()
    return _sum_in_new_pair(backend, address, rank=0)


def _replace(_: int, name: str, address: str) -> float:
    return _sum_in_new_pair(backend_of_rank(1, name), address, rank=1)


def _sum_in_new_pair(backend: Backend, address: str, *, rank: int) -> float:
    store = connect_store(address)
    with Comm(backend).standalone_group(store, rank=rank, size=2, name="after", timeout_s=scaled(60.0)) as group:
        total = torch.tensor(float(rank + 1), device=backend.device())
        group.all_reduce(total, async_op=True).complete()
        return total.item()
