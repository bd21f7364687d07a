"""The promises of Offloader on FSDP2, two real ranks."""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import hwrl
from hwrl.comm import Comm, connect_store, serve_store, store_address
from hwrl.memory import Offloader
from hwrl.testing.processes import run_processes

BACKEND = hwrl.get_backend()
WIDTH = 513  # odd: the ranks' shards differ in size and are padded


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(3)]).to(BACKEND.device())


def _sharded() -> tuple[nn.Module, torch.optim.Optimizer]:
    model, mesh = _model(), init_device_mesh(BACKEND.info.device_type, (2,))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model[1], mesh=mesh)
    fully_shard(model, mesh=mesh)  # the last layer is the root's own
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> float:
    data = torch.arange(2 * WIDTH, dtype=torch.float32).reshape(2, WIDTH).sin() + rank
    loss = model(data.to(BACKEND.device())).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def _held_nbytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of this rank's shards, which are not what the model shows while it is gathered."""
    with torch.no_grad():
        shards = [one.to_local() for group in optimizer.param_groups for one in group["params"]]
    return sum(shard.untyped_storage().nbytes() for shard in shards)


def _train(rank: int, address: str) -> dict[str, object]:
    BACKEND.set_device(rank % BACKEND.device_count())
    with Comm(BACKEND).init_default(store=connect_store(address), rank=rank, size=2):
        plain, moved = _sharded(), _sharded()
        losses: list[tuple[float, float]] = []
        with Offloader(*moved, backend=BACKEND) as offloader:
            for _ in range(4):
                offloader.load()
                with torch.no_grad():
                    moved[0](torch.ones(1, WIDTH, device=BACKEND.device()))  # leaves the root's parameters gathered
                before = BACKEND.memory_info().allocated_nbytes
                offloader.offload()
                freed = before - BACKEND.memory_info().allocated_nbytes
                left = _held_nbytes(moved[1])
                with offloader.loaded():
                    losses.append((_step(*moved, rank), _step(*plain, rank)))
            offloader.load()
            offloader.offload()
            offloader.load()
            return {"losses": losses, "freed": freed, "left": left, "unchanged": offloader.offload().nbytes}


def test_fsdp2_trains_bit_equal_with_offload_between_steps() -> None:
    store = serve_store()
    nbytes = 3 * 4 * (WIDTH * WIDTH + WIDTH) * 3 // 2  # parameters and two moments, half on each rank
    for result in run_processes(_train, 2, store_address(store)):
        assert all(one == other for one, other in result["losses"])
        assert result["left"] == 0
        assert result["freed"] > 0.95 * nbytes
        assert result["unchanged"] == 0
