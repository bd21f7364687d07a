"""Wrapped, averaged, compiled, shared and unusual parts: with and without hwrl's, and resumed, no bit differs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CyclicLR,
    ExponentialLR,
    LinearLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn

from hwrl.checkpoint import CheckpointManager, rng_state
from hwrl.comm import HashStore
from hwrl.errors import CheckpointError
from hwrl.memory import Offloader
from hwrl_cpu import INFO, CpuBackend
from tests.support.optimizers import assert_same, frozen

BACKEND = CpuBackend(INFO)
STEPS = 4


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 8))


def loss_of(model: Any) -> torch.Tensor:
    loss: torch.Tensor = model(torch.randn(4, 8)).square().mean()
    return loss


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05)


def program(model: Any, *after: Callable[[], Any], optimizer: Any = None, **parts: Any) -> SimpleNamespace:
    """A loop over ``model``. Each step ends with the calls ``after``."""
    optimizer = adam(model) if optimizer is None else optimizer

    def step() -> None:
        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()
        for call in after:
            call()

    return SimpleNamespace(step=step, parts={"model": model, "optimizer": optimizer, **parts})


def with_schedule(make: Callable[[Any], Any]) -> SimpleNamespace:
    model = net()
    optimizer = adam(model)
    schedule = make(optimizer)
    return program(model, schedule.step, optimizer=optimizer, schedule=schedule)


def with_plateau() -> SimpleNamespace:
    model = net()
    optimizer = adam(model)
    schedule = ReduceLROnPlateau(optimizer, patience=0, threshold=10.0)
    return program(model, lambda: schedule.step(1.0), optimizer=optimizer, schedule=schedule)


def with_average(**options: Any) -> SimpleNamespace:
    model = net()
    optimizer, average = adam(model), AveragedModel(model, **options)
    swa = SWALR(optimizer, swa_lr=0.01)
    batches = [torch.ones(4, 8), torch.linspace(-1, 1, 32).reshape(4, 8)]
    calls = [lambda: average.update_parameters(model), swa.step, lambda: update_bn(batches, average)]
    return program(model, *calls, optimizer=optimizer, average=average, swa=swa)


def with_scaler() -> SimpleNamespace:
    model = net()
    optimizer, scaler = adam(model), torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)

    def step() -> None:
        scaler.scale(loss_of(model)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    off = torch.amp.GradScaler("cpu", enabled=False)
    return SimpleNamespace(step=step, parts={"model": model, "optimizer": optimizer, "any_name": scaler, "off": off})


def compiled_inside() -> SimpleNamespace:
    model = net()
    model[0] = torch.compile(model[0], backend="eager")  # type: ignore[assignment] # it is a module
    return program(model)


class Usual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = net()


class Unusual(Usual):
    """Buffers that are not saved, and extra state that grows."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((8,), 0.5), persistent=False)
        self.seen: dict[str, Any] = {}

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.seen[f"call {len(self.seen)}"] = [rows.sum(), (len(rows), None)]
        result: torch.Tensor = self.inner(rows) * self.scale
        return result

    def get_extra_state(self) -> Any:
        return dict(self.seen)

    def set_extra_state(self, state: Any) -> None:
        self.seen = dict(state)


def two_modules(*, order: tuple[str, ...] = ("model", "critic"), shares: bool = False) -> SimpleNamespace:
    """Two modules with equal names of their parameters, and one optimizer for both."""
    modules = {"model": net(), "critic": net()}
    if shares:
        modules["critic"][0] = modules["model"][0]
    trained = [one for module in modules.values() for one in module.parameters()]
    optimizer = torch.optim.AdamW(dict.fromkeys(trained), lr=0.05)

    def step() -> None:
        (loss_of(modules["model"]) + 2 * loss_of(modules["critic"])).backward()
        optimizer.step()
        optimizer.zero_grad()

    return SimpleNamespace(step=step, parts={**{name: modules[name] for name in order}, "optimizer": optimizer})


def two_optimizers() -> SimpleNamespace:
    """One for each linear layer; the layer in the middle has none."""
    model = net()
    model[1].requires_grad_(False)
    first, second = adam(model[3]), torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9)

    def step() -> None:
        loss_of(model).backward()
        for one in (first, second):
            one.step()
            one.zero_grad()

    return SimpleNamespace(step=step, parts={"model": model, "optimizer": first, "second": second})


def in_closure() -> SimpleNamespace:
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3, history_size=2)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        return loss

    return SimpleNamespace(step=lambda: optimizer.step(closure), parts={"model": model, "optimizer": optimizer})


def with_norm() -> SimpleNamespace:
    model = net()
    nn.utils.parametrizations.weight_norm(model[3])
    return program(model)


def with_adapter() -> SimpleNamespace:
    peft = pytest.importorskip("peft")
    return program(peft.get_peft_model(net(), peft.LoraConfig(target_modules=["0"])))


KINDS: dict[str, Callable[[], SimpleNamespace]] = {
    "OneCycleLR": lambda: with_schedule(lambda one: OneCycleLR(one, 0.1, total_steps=10)),
    "CyclicLR": lambda: with_schedule(lambda one: CyclicLR(one, 0.01, 0.1, step_size_up=2, cycle_momentum=False)),
    "SequentialLR": lambda: with_schedule(lambda one: SequentialLR(one, [LinearLR(one), ExponentialLR(one, 0.9)], [2])),
    "ChainedScheduler": lambda: with_schedule(lambda one: ChainedScheduler([LinearLR(one), ExponentialLR(one, 0.9)])),
    "ReduceLROnPlateau": with_plateau,
    "SWA": with_average,
    "EMA": lambda: with_average(multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True),
    "GradScaler": with_scaler,
    "torch.compile": lambda: program(torch.compile(net(), backend="eager")),
    "a compiled layer": compiled_inside,
    "DDP": lambda: program(DistributedDataParallel(net())),
    "PEFT": with_adapter,
    "extra state": lambda: program(Unusual()),
    "weight norm": with_norm,
    "two modules": two_modules,
    "a shared trunk": lambda: two_modules(shares=True),
    "two optimizers": two_optimizers,
    "LBFGS": in_closure,
}


def made(kind: str, seed: int) -> SimpleNamespace:
    torch.manual_seed(seed)
    return KINDS[kind]()


def state_of(one: SimpleNamespace) -> Any:
    states = {name: part.state_dict() for name, part in one.parts.items()}
    return frozen({**states, "random numbers": rng_state(BACKEND)})


def train(one: SimpleNamespace, directory: Path, *, begin: int, offloads: bool) -> None:
    """Train from a checkpoint of the step ``begin`` in ``directory``, if it is not 0."""
    with contextlib.ExitStack() as opened:
        manager = opened.enter_context(CheckpointManager(directory, backend=BACKEND, async_save=True, **one.parts))
        if begin:
            with CheckpointManager(directory / "../fresh", backend=BACKEND, **one.parts) as saved:
                assert saved.resume(step=begin) is not None
        optimizers = [part for part in one.parts.values() if isinstance(part, torch.optim.Optimizer)]
        others = [part for name, part in one.parts.items() if isinstance(part, nn.Module)]
        offloader = Offloader(nn.ModuleList(others), SimpleNamespace(all=optimizers), backend=BACKEND)
        opened.enter_context(offloader)
        for step in range(begin, STEPS):
            with offloader.loaded():
                one.step()
            if offloads:
                offloader.offload()
            with offloader.lending():
                manager.save(step + 1, offloader=offloader)


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Any:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("kind", KINDS)
def test_no_bit_differs_fresh_or_resumed(kind: str, tmp_path: Path) -> None:
    plain = made(kind, 0)
    for _ in range(STEPS):
        plain.step()
    expected = state_of(plain)
    for name, seed, begin, offloads in [("fresh", 0, 0, False), ("moved", 0, 0, True), ("resumed", 1, 2, True)]:
        one = made(kind, seed)
        train(one, tmp_path / name, begin=begin, offloads=offloads)
        assert_same(state_of(one), expected, where=name)


def test_the_order_of_parts_does_not_matter(tmp_path: Path) -> None:
    """The names of an optimizer's parameters must not depend on it: a state that is not found is not restored."""
    one, other = two_modules(shares=True), two_modules(order=("critic", "model"), shares=True)
    one.step()
    with CheckpointManager(tmp_path, backend=BACKEND, **one.parts) as manager:
        manager.save(1)
    with CheckpointManager(tmp_path, backend=BACKEND, **other.parts) as manager:
        assert manager.resume() is not None
    for name, part in one.parts.items():
        assert_same(frozen(other.parts[name].state_dict()), frozen(part.state_dict()))


def test_a_model_with_another_extra_state_is_refused_by_name(tmp_path: Path) -> None:
    for saved, other, where in ((Unusual, Usual, "state"), (Usual, Unusual, "checkpoint")):
        with CheckpointManager(tmp_path / where, backend=BACKEND, model=saved()) as manager:
            manager.save(1)
        match = f"the {where} has no 'model._extra_state'"
        manager = CheckpointManager(tmp_path / where, backend=BACKEND, model=other())
        with manager, pytest.raises(CheckpointError, match=match):
            manager.resume()


def test_an_optimizer_state_of_an_earlier_form_is_refused_by_that(tmp_path: Path) -> None:
    one = made("DDP", 0)
    one.step()
    with CheckpointManager(tmp_path, backend=BACKEND) as manager:
        manager.save(1, {name: part.state_dict() for name, part in one.parts.items()})
    manager = CheckpointManager(tmp_path, backend=BACKEND, **one.parts)
    with manager, pytest.raises(CheckpointError, match="'optimizer' is there in another form, of an earlier version"):
        manager.resume()
