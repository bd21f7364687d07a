"""Slices of sent tensors in a receiver's own tensors: every element at its place, from a bounded ring."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from hwrl.comm import connect_store, raw_bytes, serve_store, store_address
from hwrl.errors import LayoutMismatchError
from hwrl.interfaces import WeightOffer
from hwrl.testing.processes import run_processes
from hwrl.weights import (
    BucketRing,
    CopyDestination,
    CopyRule,
    Destination,
    EngineReceiver,
    LinkRegistrations,
    WeightLayout,
    WeightSender,
    WeightSource,
    ring_nbytes_of,
)
from hwrl.weights.buckets import TensorReader
from hwrl_cpu import INFO, CpuBackend

BUCKET_NBYTES, WORKERS = 4096, 2
CPU = CpuBackend(INFO)
Tensors = dict[str, torch.Tensor]


def rule_of(name: str, view: torch.Tensor, target: torch.Tensor) -> CopyRule:
    """Return the rule that copies ``view``, of a whole tensor in a storage of its own, to ``target``."""
    return CopyRule(name, target, view.stride(), int(view.storage_offset()))


def carry(layout: WeightLayout, named: list[tuple[str, torch.Tensor]], destination: Any) -> None:
    """Bring a version of ``named`` to ``destination``."""
    destination.begin()
    fill(layout, named, destination)
    destination.finish()


def fill(layout: WeightLayout, named: list[tuple[str, torch.Tensor]], destination: Destination) -> None:
    """Bring the buckets of ``named`` to ``destination`` as a transport does."""
    ring, reader = BucketRing(layout, backend=CPU), TensorReader(layout, WeightSource.of(named))
    for index, bucket in enumerate(layout.buckets):
        sent, lease = ring.pack(index, reader.tensors_of(bucket)), destination.memory_for(index)
        lease.memory.copy_(sent.memory)
        destination.unpack(lease)


@st.composite
def _slices(draw: st.DrawFn) -> tuple[torch.Tensor, list[slice], bool]:
    shape = draw(st.lists(st.integers(1, 40), min_size=1, max_size=3))
    slices = [slice(begin := draw(st.integers(0, size - 1)), draw(st.integers(begin + 1, size))) for size in shape]
    return torch.randn(shape), slices, draw(st.booleans())


@given(st.lists(_slices(), min_size=1, max_size=4), st.sampled_from([512, 1024, 4096]))
@settings(max_examples=80)
def test_every_slice_of_every_tensor_arrives(wanted: list[tuple[torch.Tensor, list[slice], bool]], bucket: int) -> None:
    named = [(f"t{number}", tensor) for number, (tensor, _, _) in enumerate(wanted)]
    layout, targets, rules = WeightLayout.plan(named, bucket_nbytes=bucket), [], []
    for (name, tensor), (_, slices, turned) in zip(named, wanted, strict=True):
        view = tensor[tuple(slices)]
        room = torch.full([size + 2 for size in view.shape], torch.nan)
        target = room[tuple(slice(1, -1) for _ in view.shape)]
        if turned:
            view, target = view.T if view.dim() == 2 else view, target.T if view.dim() == 2 else target
        targets.append((room, target, view))
        rules.append(rule_of(name, view, target))
    carry(layout, named, CopyDestination(layout, rules, backend=CPU))
    for room, target, view in targets:
        assert torch.equal(target, view)
        assert int(room.isnan().sum()) == room.numel() - target.numel(), "nothing else is overwritten"


def direct_buckets(layout: WeightLayout, placed: CopyDestination) -> list[int]:
    """Return the buckets that are received directly into the targets, without a copy."""
    return [index for index in range(len(layout.buckets)) if not placed.memory_for(index).copied]


def test_what_lies_as_in_the_buckets_is_received_directly_into_the_targets() -> None:
    query, key = torch.randn(64, 32), torch.randn(32, 32)
    fused, scale = torch.zeros(96, 32), torch.zeros(3)
    named = [("q", query), ("k", key), ("scale", torch.ones(3))]
    layout = WeightLayout.plan(named, bucket_nbytes=BUCKET_NBYTES, own_nbytes=512)
    rules = [rule_of("q", query, fused[:64]), rule_of("k", key, fused[64:]), CopyRule.whole("scale", scale)]
    placed = CopyDestination(layout, rules, backend=CPU)
    assert direct_buckets(layout, placed) == [0, 1, 2, 3]
    carry(layout, named, placed)
    assert torch.equal(fused, torch.cat([query, key])) and scale.eq(1).all()


def test_a_bucket_is_not_received_directly_over_bytes_of_others() -> None:
    named = [("a", torch.ones(5)), ("b", torch.ones(7))]  # the layout has a gap between them
    layout, room = WeightLayout.plan(named, bucket_nbytes=BUCKET_NBYTES), torch.zeros(400)
    rules = [rule_of("a", named[0][1], room[:5]), rule_of("b", named[1][1], room[128:135])]
    placed = CopyDestination(layout, rules, backend=CPU)
    assert direct_buckets(layout, placed) == []
    carry(layout, named, placed)
    assert room.sum() == 12


@pytest.mark.parametrize(
    ("name", "stride", "offset", "why"),
    [
        ("other", (8, 1), 0, "the sender has no tensor of this name"),
        ("w", (8, 1), 1, r"has it as torch.float32 \[4, 8\], and a rule copies element 32"),
    ],
)
def test_rules_that_do_not_fit_are_refused(name: str, stride: tuple[int, ...], offset: int, why: str) -> None:
    layout = WeightLayout.plan([("w", torch.zeros(4, 8))])
    with pytest.raises(LayoutMismatchError, match=why):
        CopyDestination(layout, [CopyRule(name, torch.zeros(4, 8), stride, offset)], backend=CPU)


def test_the_ring_is_as_small_as_it_is_told_to_be() -> None:
    layout = WeightLayout.plan([(f"t{n}", torch.zeros(100)) for n in range(40)], bucket_nbytes=1024)
    room = 2 * max(bucket.nbytes for bucket in layout.buckets) + 8
    assert len(layout.buckets) > 4
    assert CopyDestination(layout, [], backend=CPU, buckets=4, ring_nbytes=room).slots == 2
    assert CopyDestination(layout, [], backend=CPU, buckets=4, ring_nbytes=1).slots == 1
    assert ring_nbytes_of(layout, ring_nbytes=room) == room - 8 < ring_nbytes_of(layout)


# -- several processes ----------------------------------------------------------------------------------------------


def weights_of(version: int) -> Tensors:
    """Return tensors of every kind; some are larger than a bucket, and no row of theirs divides a bucket."""
    torch.manual_seed(version)
    embeddings = torch.randn(40, 24)
    return {
        "rows": torch.randn(64, 97),
        "columns": torch.randn(48, 82).bfloat16(),
        "q": torch.randn(32, 40),
        "k": torch.randn(16, 40),
        "turned": torch.randn(24, 56).half(),
        "embed": embeddings,
        "head": embeddings,
        "norm": torch.randn(33).bfloat16(),
        "scale": torch.tensor(float(version)),
        "nothing": torch.zeros(0, 5),
        "flags": torch.rand(17) > 0.5,
        "counts": torch.randint(1 << 40, (7, 3)),
        "other": torch.randn(9, 5),
    }


def shares_of(weights: Tensors, worker: int) -> Tensors:
    """Return the worker's views of ``weights``, as a tensor-parallel model divides them."""

    def part(name: str, dim: int) -> torch.Tensor:
        return weights[name].chunk(WORKERS, dim)[worker]

    whole = {name: weights[name] for name in ("norm", "scale", "nothing", "flags", "counts")}
    return {
        **whole,
        "rows": part("rows", 0),
        "columns": part("columns", 1),
        "q": part("q", 0),
        "k": part("k", 0),
        "turned": part("turned", 0).T,
        "embed": part("embed", 0),
        "head": part("head", 1),
        "other": weights["other"],
    }


def targets_of(worker: int) -> Tensors:
    """Return the worker's tensors: "q" and "k" lie in one, and "other" has another dtype."""
    shares = shares_of(weights_of(0), worker)
    targets = {name: torch.zeros(share.shape, dtype=share.dtype) for name, share in shares.items()}
    fused = torch.zeros(24, 40)
    return {**targets, "q": fused[:16], "k": fused[16:], "other": torch.zeros(9, 5, dtype=torch.bfloat16)}


class Allocated(TorchDispatchMode):
    """Counts the bytes of new tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.empty, torch.ops.aten.zeros, torch.ops.aten.clone):
            self.nbytes += result.nbytes
        return result


def send_or_receive(rank: int, address: str, transport: str) -> Any:
    store = connect_store(address)
    if rank == 0:
        with WeightSender(store, transport=transport, bucket_nbytes=BUCKET_NBYTES, timeout_s=300.0) as sender:
            sender.wait_for_receivers(WORKERS)
            for version in (1, 2, 3, 4):
                report = sender.publish(version, weights_of(version).items())
                assert not report.excluded
                store.set(f"sent/{version}", "")
                store.wait([f"checked/{version}/{worker}" for worker in range(WORKERS)])
        return None
    return receive(store, address, rank - 1)


def receive(store: Any, address: str, worker: int) -> list[int]:
    targets, allocated, plans = targets_of(worker), [], []
    views = shares_of(weights_of(0), worker)

    def make_destination(layout: WeightLayout) -> CopyDestination:
        rules = [rule_of(name, views[name], target) for name, target in targets.items()]
        plans.append(layout)
        return CopyDestination(layout, rules, backend=CPU, buckets=2)

    receiver = EngineReceiver(worker, backend=CPU, make_destination=make_destination)
    members = LinkRegistrations(store, name="policy", replicas=[f"r0/{worker}"])
    for version in (1, 2, 3, 4):
        if version == 4:
            receiver.release(keep_plan=True)  # the engine sleeps
        deadline = 30.0 + time.monotonic()
        proposal = members.wait(deadline=deadline, timeout_s=300.0, aborted=None, have=None)
        members.begin(proposal)
        assert members.rendezvous(proposal)
        offered = [None, None]
        offered[worker] = members.numbers[0]  # type: ignore[call-overload]  # the other worker is another process's
        offer = WeightOffer(
            store=address,
            link="policy",
            proposal=proposal.number,
            version=version,
            members=tuple(offered),
            timeout_s=300.0,
            limit_s=990.0,
        )
        with Allocated() as counted:
            taken = receiver.take(offer)
        assert taken.version == version, taken.why
        allocated.append(counted.nbytes)
        for name, share in shares_of(weights_of(version), worker).items():
            wanted = share.to(targets[name].dtype).contiguous()
            assert bytes(raw_bytes(targets[name].contiguous()).numpy()) == bytes(raw_bytes(wanted).numpy()), name
        store.set(f"checked/{version}/{worker}", "")
    receiver.close()
    members.leave()
    assert len(plans) == 1
    return allocated


@pytest.mark.parametrize(
    "transport", ["device", *(pytest.param(name, marks=pytest.mark.extended) for name in ("ipc", "host"))]
)
def test_each_worker_receives_its_shares_with_a_ring_alone(transport: str) -> None:
    store = serve_store()
    _, *allocated = run_processes(send_or_receive, 1 + WORKERS, store_address(store), transport, timeout_s=1200.0)
    layout = WeightLayout.plan(weights_of(0).items(), bucket_nbytes=BUCKET_NBYTES)
    assert layout.payload_nbytes > 10 * BUCKET_NBYTES
    for first, second, third, after_release in allocated:
        assert first <= 2 * BUCKET_NBYTES + 2048, "the ring, and the checksums"
        assert max(second, third) <= 2048 < after_release <= first, "only the ring is allocated again"
