"""Run by test_hccl.py, once a rank: every collective on the NPU over HCCL and on the CPU over Gloo; prints the cases that differ."""

import sys

import torch
import torch.distributed as dist

CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


def data(device, *, shape=(8, 3), dtype=torch.float32, seed=0):
    """This rank's own numbers, the same on both devices; small whole ones, so that sums are exact in any type."""
    generator = torch.Generator().manual_seed(100 * dist.get_rank() + seed)
    return torch.randint(-4, 5, shape, generator=generator).to(dtype).to(device)


def reductions(device, dtype, ops):
    outputs = []
    for op in ops:
        tensor = data(device, dtype=dtype)
        dist.all_reduce(tensor, op=op)
        outputs.append(tensor)
    return outputs


ALL_OPS = (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT)


@case
def all_reduce_floats(device):
    return [out for dtype in (torch.float32, torch.bfloat16, torch.float16) for out in reductions(device, dtype, ALL_OPS)]


@case
def all_reduce_integers(device):
    return [out for dtype in (torch.int32, torch.int64, torch.int8) for out in reductions(device, dtype, ALL_OPS)]


@case
def all_reduce_of_many_bytes(device):
    tensor = data(device, shape=(3_000_000,))
    dist.all_reduce(tensor)
    return [tensor]


@case
def all_reduce_in_flight(device):
    tensors = [data(device, seed=seed) for seed in range(4)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in works:
        work.wait()
    return tensors


@case
def broadcast(device):
    outputs = []
    for source in range(dist.get_world_size()):
        for dtype in (torch.float32, torch.uint8, torch.bool, torch.float64 if device == "cpu" else torch.float32):
            tensor = data(device, dtype=dtype).to(torch.float32 if dtype == torch.float64 else dtype)
            dist.broadcast(tensor, src=source)
            outputs.append(tensor)
    return outputs


@case
def reduce(device):
    tensor = data(device)
    last = dist.get_world_size() - 1
    dist.reduce(tensor, dst=last)
    return [tensor] if dist.get_rank() == last else []


@case
def all_gather(device):
    tensor = data(device)
    outputs = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(outputs, tensor)
    return outputs


@case
def all_gather_into_tensor(device):
    tensor = data(device)
    output = torch.empty((8 * dist.get_world_size(), 3), device=device)
    dist.all_gather_into_tensor(output, tensor)
    return [output]


@case
def reduce_scatter_tensor(device):
    world = dist.get_world_size()
    output = torch.empty((2, 3), device=device)
    dist.reduce_scatter_tensor(output, data(device, shape=(2 * world, 3)))
    return [output]


@case
def gather(device):
    world, rank = dist.get_world_size(), dist.get_rank()
    tensor = data(device)
    outputs = [torch.empty_like(tensor) for _ in range(world)] if rank == 0 else None
    dist.gather(tensor, outputs, dst=0)
    return outputs or []


@case
def scatter(device):
    world, rank = dist.get_world_size(), dist.get_rank()
    output = torch.empty((8, 3), device=device)
    parts = [data(device, seed=part) for part in range(world)] if rank == 0 else None
    dist.scatter(output, parts, src=0)
    return [output]


@case
def all_to_all_single(device):
    output = torch.empty((8, 3), device=device)
    dist.all_to_all_single(output, data(device))
    return [output]


@case
def all_to_all_uneven(device):
    """Rank r sends s + 1 rows to rank s."""
    world, rank = dist.get_world_size(), dist.get_rank()
    sizes = [part + 1 for part in range(world)]
    output = torch.empty((world * (rank + 1), 3), device=device)
    dist.all_to_all_single(output, data(device, shape=(sum(sizes), 3)), [rank + 1] * world, sizes)
    return [output]


@case
def send_recv(device):
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
def subgroups(device):
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
def objects(device):
    """Through the device's backend, as they have to be serialised into its tensors."""
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, {"rank": dist.get_rank(), "text": "x" * 10 * dist.get_rank()})
    return [torch.tensor([entry["rank"] + len(entry["text"]) for entry in found])]


@case
def barrier(device):
    dist.barrier()
    return []


def main(rank, world, store, names):
    torch.npu.set_device(rank)
    dist.init_process_group("cpu:gloo,npu:hccl", init_method=f"file://{store}", rank=rank, world_size=world)
    for name in names or CASES:
        try:
            expected = [tensor.cpu() for tensor in CASES[name]("cpu")]
            found = [tensor.cpu() for tensor in CASES[name]("npu")]
            same = len(found) == len(expected) and all(map(torch.equal, found, expected))
            print("CASE", name, "same" if same else f"differs: {found} instead of {expected}", flush=True)
        except Exception as exc:
            print("CASE", name, "raised", repr(exc).replace("\n", " "), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:])
