"""Run by test_hccl.py, once a rank: every collective on the NPU over HCCL and on the CPU over Gloo, compared."""

import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

Case = Callable[[str], list[Tensor]]
CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


def data(device: str, *, shape: tuple[int, ...] = (8, 3), dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """This rank's own numbers, the same on both devices; small whole ones, so that sums are exact in any type."""
    generator = torch.Generator().manual_seed(100 * dist.get_rank() + seed)
    return torch.randint(-4, 5, shape, generator=generator).to(dtype).to(device)


def reductions(device: str, *dtypes: torch.dtype) -> list[Tensor]:
    outputs = []
    for dtype in dtypes:
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT):
            tensor = data(device, dtype=dtype)
            dist.all_reduce(tensor, op=op)
            outputs.append(tensor)
    return outputs


@case
def all_reduce_floats(device: str) -> list[Tensor]:
    return reductions(device, torch.float32, torch.bfloat16, torch.float16)


@case
def all_reduce_integers(device: str) -> list[Tensor]:
    return reductions(device, torch.int32, torch.int64, torch.int8)


@case
def all_reduce_of_many_bytes(device: str) -> list[Tensor]:
    tensor = data(device, shape=(3_000_000,))
    dist.all_reduce(tensor)
    return [tensor]


@case
def all_reduce_in_flight(device: str) -> list[Tensor]:
    tensors = [data(device, seed=seed) for seed in range(4)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in works:
        work.wait()
    return tensors


@case
def broadcast(device: str) -> list[Tensor]:
    outputs = []
    for source in range(dist.get_world_size()):
        for dtype in (torch.float32, torch.uint8, torch.bool):
            tensor = data(device, dtype=dtype)
            dist.broadcast(tensor, src=source)
            outputs.append(tensor)
    return outputs


@case
def reduce(device: str) -> list[Tensor]:
    tensor = data(device)
    last = dist.get_world_size() - 1
    dist.reduce(tensor, dst=last)
    return [tensor] if dist.get_rank() == last else []


@case
def all_gather(device: str) -> list[Tensor]:
    tensor = data(device)
    outputs = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(outputs, tensor)
    return outputs


@case
def all_gather_into_tensor(device: str) -> list[Tensor]:
    tensor = data(device)
    output = torch.empty((8 * dist.get_world_size(), 3), device=device)
    dist.all_gather_into_tensor(output, tensor)
    return [output]


@case
def reduce_scatter_tensor(device: str) -> list[Tensor]:
    world = dist.get_world_size()
    output = torch.empty((2, 3), device=device)
    dist.reduce_scatter_tensor(output, data(device, shape=(2 * world, 3)))
    return [output]


@case
def gather(device: str) -> list[Tensor]:
    world, rank = dist.get_world_size(), dist.get_rank()
    tensor = data(device)
    outputs = [torch.empty_like(tensor) for _ in range(world)] if rank == 0 else None
    dist.gather(tensor, outputs, dst=0)
    return outputs or []


@case
def scatter(device: str) -> list[Tensor]:
    world, rank = dist.get_world_size(), dist.get_rank()
    output = torch.empty((8, 3), device=device)
    parts = [data(device, seed=part) for part in range(world)] if rank == 0 else None
    dist.scatter(output, parts, src=0)
    return [output]


@case
def all_to_all_single(device: str) -> list[Tensor]:
    output = torch.empty((8, 3), device=device)
    dist.all_to_all_single(output, data(device))
    return [output]


@case
def all_to_all_uneven(device: str) -> list[Tensor]:
    """Rank r sends s + 1 rows to rank s."""
    world, rank = dist.get_world_size(), dist.get_rank()
    sizes = [part + 1 for part in range(world)]
    output = torch.empty((world * (rank + 1), 3), device=device)
    dist.all_to_all_single(output, data(device, shape=(sum(sizes), 3)), [rank + 1] * world, sizes)
    return [output]


@case
def send_recv(device: str) -> list[Tensor]:
    """Around a ring, once in turn and once as a batch in both directions."""
    world, rank = dist.get_world_size(), dist.get_rank()
    after, before = (rank + 1) % world, (rank - 1) % world
    first = torch.empty((8, 3), device=device)
    if rank % 2 == 0:
        dist.send(data(device), after)
        dist.recv(first, before)
    else:
        dist.recv(first, before)
        dist.send(data(device), after)
    outputs = [first, torch.empty((8, 3), device=device), torch.empty((8, 3), device=device)]
    batch = [
        dist.P2POp(dist.isend, data(device, seed=1), after),
        dist.P2POp(dist.isend, data(device, seed=2), before),
        dist.P2POp(dist.irecv, outputs[1], before),
        dist.P2POp(dist.irecv, outputs[2], after),
    ]
    if world == 2:  # both directions are one peer: messages keep their order
        batch[2], batch[3] = batch[3], batch[2]
        outputs[1], outputs[2] = outputs[2], outputs[1]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    return outputs


@case
def subgroups(device: str) -> list[Tensor]:
    """Two disjoint groups and one of all, interleaved: several communicators in a process."""
    world, rank = dist.get_world_size(), dist.get_rank()
    halves = [dist.new_group(list(range(part, world, 2))) for part in range(2)]
    everyone = dist.new_group(list(range(world)))
    tensor = data(device)
    for _ in range(3):
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=halves[rank % 2])
        dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=everyone)
    return [tensor]


@case
def objects(device: str) -> list[Tensor]:
    """Through the device's backend, as they have to be serialised into its tensors."""
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, {"rank": dist.get_rank(), "text": "x" * 10 * dist.get_rank()})
    return [torch.tensor([entry["rank"] + len(entry["text"]) for entry in found])]


@case
def barrier(device: str) -> list[Tensor]:
    dist.barrier()
    return []


def main(rank: int, world: int, store: str) -> None:
    torch.npu.set_device(rank)
    dist.init_process_group("cpu:gloo,npu:hccl", init_method=f"file://{store}", rank=rank, world_size=world)
    for name, collective in CASES.items():
        expected = [tensor.cpu() for tensor in collective("cpu")]
        found = [tensor.cpu() for tensor in collective("npu")]
        same = len(found) == len(expected) and all(map(torch.equal, found, expected))
        print("CASE", name, "same" if same else f"differs: {found} instead of {expected}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
