"""Programs whose parts hwrl saves and offloads: plain, wrapped, averaged, compiled, shared and unusual ones."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingLR,
    CyclicLR,
    ExponentialLR,
    LinearLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn

from hwrl.checkpoint import rng_state
from hwrl_cpu import INFO, CpuBackend
from tests.support.optimizers import OPTIMIZERS, frozen

BACKEND = CpuBackend(INFO)


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


def with_optimizers(kind: str, model: nn.Module, loss: Callable[[], torch.Tensor]) -> SimpleNamespace:
    """A plain loop: two micro-batches a step, clipped gradients, one scheduler for each optimizer, hooks of its own."""
    optimizers = OPTIMIZERS[kind](model)
    schedulers = [CosineAnnealingLR(one, 10) for one in optimizers]
    calls: list[str] = []
    for one in optimizers:
        one.register_step_pre_hook(lambda *_: calls.append("before"))
        one.register_step_post_hook(lambda *_: calls.append("after"))

    def step() -> None:
        for _ in range(2):
            loss().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

    parts: dict[str, Any] = {"model": model}
    for number, (optimizer, scheduler) in enumerate(zip(optimizers, schedulers, strict=True)):
        parts |= {f"optimizer{number}": optimizer, f"scheduler{number}": scheduler}
    return SimpleNamespace(step=step, parts=parts, calls=calls)


class Policy(nn.Module):
    """Tied, frozen and unused parameters, dropout, and a buffer that steps change."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 32)
        self.inner = nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Dropout(0.2), nn.Linear(32, 32))
        self.inner[3].bias.requires_grad_(False)
        self.unused = nn.Linear(32, 32)
        self.head = nn.Linear(32, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.inner(self.embed(tokens)))
        return result


def policy(kind: str) -> SimpleNamespace:
    model = Policy()

    def loss() -> torch.Tensor:
        tokens = torch.randint(16, (8,))
        return nn.functional.cross_entropy(model(tokens), tokens)

    return with_optimizers(kind, model, loss)


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
    **{kind: functools.partial(policy, kind) for kind in OPTIMIZERS},
}


def made(kind: str, *, seed: int) -> SimpleNamespace:
    torch.manual_seed(seed)
    return KINDS[kind]()


def state_of(one: SimpleNamespace) -> Any:
    """Return all state of a program, to compare with :func:`~tests.support.optimizers.assert_same`."""
    optimizers = [part for part in one.parts.values() if isinstance(part, torch.optim.Optimizer)]
    models = [part for part in one.parts.values() if isinstance(part, nn.Module)]
    return frozen(
        {
            "parts": {name: part.state_dict() for name, part in one.parts.items()},
            "gradients": [parameter.grad for model in models for parameter in model.parameters()],
            "random numbers": rng_state(BACKEND),
            "step": [type(own).step for own in optimizers],
            "hooks": [len(own._optimizer_step_pre_hooks) for own in optimizers],
        }
    )
