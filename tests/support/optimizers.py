"""Optimizers of many kinds for tests of hwrl's parts in other programs, and a comparison of states bit for bit."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

MakeOptimizers = Callable[[nn.Module], list[Any]]


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    """Return two groups: matrices and the rest."""
    trained = [one for one in model.parameters() if one.requires_grad]
    return [
        {"params": [one for one in trained if one.ndim == 2]},
        {"params": [one for one in trained if one.ndim != 2]},
    ]


def _one(kind: Any, **options: Any) -> MakeOptimizers:
    def make(model: nn.Module) -> list[Any]:
        first, second = _groups(model)
        return [kind([first, {**second, "lr": 0.02}], lr=0.01, **options)]

    return make


def _muon(model: nn.Module) -> list[Any]:
    """Muon for matrices only, and AdamW for the rest."""
    first, second = _groups(model)
    return [torch.optim.Muon(first["params"], lr=0.01), torch.optim.AdamW(second["params"], lr=0.01)]


def _eight_bit_of_torchao(model: nn.Module) -> list[Any]:
    from torchao.optim import AdamW8bit  # type: ignore[import-not-found, unused-ignore] # ci/stack trl has it

    return [AdamW8bit(_groups(model), lr=0.01, block_size=32)]


def _eight_bit_of_bitsandbytes(model: nn.Module) -> list[Any]:
    from bitsandbytes.optim import AdamW8bit  # type: ignore[import-not-found, unused-ignore] # likewise

    return [AdamW8bit(_groups(model), lr=0.01, min_8bit_size=32)]


class OwnState(torch.optim.Optimizer):
    """A user's own optimizer: float64 moments, an ``int`` key, a tuple, a tensor that all parameters share."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr, "bounds": (0.1, None)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override] # torch's has overloads
        shared = next((one["shared"] for one in self.state.values()), torch.zeros(1))
        shared += 1
        for group in self.param_groups:
            for one in (one for one in group["params"] if one.grad is not None):
                state = self.state[one]
                state.setdefault("shared", shared)
                state["kind"] = "own"
                moments = state.setdefault("moments", {0: torch.zeros_like(one, dtype=torch.float64), "seen": (0, [])})
                moments[0].mul_(0.9).add_(one.grad)
                moments["seen"] = (moments["seen"][0] + 1, [])
                one.sub_(group["lr"] * (moments[0] / shared).to(one.dtype))


OPTIMIZERS: dict[str, MakeOptimizers] = {
    "AdamW": _one(torch.optim.AdamW),
    "AdamW-fused": _one(torch.optim.AdamW, fused=True),
    "AdamW-foreach": _one(torch.optim.AdamW, foreach=True, amsgrad=True),
    "AdamW-tensor-lr": lambda model: [torch.optim.AdamW(_groups(model), lr=torch.tensor(0.01), foreach=False)],
    "SGD": _one(torch.optim.SGD, weight_decay=0.1),
    "SGD-momentum": _one(torch.optim.SGD, momentum=0.9, nesterov=True),
    "Muon": _muon,
    "NAdam": _one(torch.optim.NAdam),
    "Adagrad": _one(torch.optim.Adagrad),  # it has a state before its first step
    "Adafactor": _one(torch.optim.Adafactor),
    "Rprop": _one(torch.optim.Rprop),
    "ASGD": _one(torch.optim.ASGD),
    "own": _one(OwnState),
}
if importlib.util.find_spec("torchao"):
    OPTIMIZERS["AdamW8bit-torchao"] = _eight_bit_of_torchao
if importlib.util.find_spec("bitsandbytes"):
    OPTIMIZERS["AdamW8bit-bitsandbytes"] = _eight_bit_of_bitsandbytes


def frozen(value: Any) -> Any:
    """Return a copy of ``value`` for :func:`assert_same`; all content of tensors as bytes."""
    if isinstance(value, torch.Tensor):
        value = value.detach()
        if hasattr(value, "to_local"):
            return ["sharded", str(value.placements), frozen(value.to_local())]
        if hasattr(value, "__tensor_flatten__"):
            names, context = value.__tensor_flatten__()
            return [type(value).__name__, str(context), *(frozen(getattr(value, name)) for name in names)]
        content = bytes(value.flatten().clone().view(torch.uint8).numpy()) if value.numel() else b""
        return [str(value.dtype), tuple(value.shape), str(value.device), content]
    if isinstance(value, dict):
        return {key: frozen(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(frozen(one) for one in value)
    return value


def assert_same(found: Any, expected: Any, *, where: str = "state") -> None:
    """Compare two frozen values, and name the first difference."""
    assert type(found) is type(expected), f"{where}: {found!r:.200} is not {expected!r:.200}"
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), f"{where}: {found.keys() ^ expected.keys()}"
        for key in expected:
            assert_same(found[key], expected[key], where=f"{where}.{key}")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), where
        for index, (own, other) in enumerate(zip(found, expected, strict=True)):
            assert_same(own, other, where=f"{where}.{index}")
    else:
        assert found == expected or found != found, f"{where}: {found!r:.200} is not {expected!r:.200}"
