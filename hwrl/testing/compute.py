"""Compare attention and a tiny transformer on a device with the same on the host, in double precision.

The host uses no fused operation: it computes attention as a softmax of products, step by step. So a wrong kernel cannot
affect both sides of a comparison.
"""

from __future__ import annotations

import copy
import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from hwrl.interfaces import Backend

TOLERANCES = {torch.float32: 5e-3, torch.bfloat16: 6e-2, torch.float16: 1e-2}
"""The largest accepted distance from the host's tensor, relative to its norm.

Torch 2.13's CPU kernels are off by 1e-5, 9e-3 and 1.2e-3. In float32 a device may multiply with mantissas of 10 bits.
"""
_VOCABULARY, _WIDTH, _HEADS, _LAYERS = 64, 32, 4, 2
_LEARNING_RATE = 1e-2
# Adam divides by the gradient's size plus this value. It is large here, so a gradient of only rounding errors makes a
# small step.
_EPSILON = 1e-3
_CHAINED, _TURNS = 1 << 21, 6
_PAYS = 0.9  # a chain that a compiler has fused takes less than half the time

ROWS = {"a row": (1, 64), "tokens": (37, 128), "heads": (5, 4, 96), "an odd width": (3, 200)}
"""Shapes of the inputs of a backend's fused operations, in models' layers."""
_NORM_EPS = 1e-6

Operation = Callable[..., torch.Tensor]
_Attend = Operation
"""``(query, key, value, *, visible, causal)``; ``visible`` is the mask of the keys, None for all keys."""


@dataclass(frozen=True)
class Attention:
    """A shape of attention. ``keys`` is their number, by default ``queries``; ``padded`` masks the last keys."""

    queries: int
    keys: int | None = None
    heads: int = 4
    kv_heads: int = 4
    head_size: int = 16
    causal: bool = False
    padded: bool = False


ATTENTIONS = {
    "causal": Attention(queries=33, causal=True),
    "causal, large": Attention(queries=130, head_size=64, causal=True),
    "one query": Attention(queries=1, keys=37),
    "padded": Attention(queries=24, padded=True),
    "grouped": Attention(queries=17, heads=4, kv_heads=2, causal=True),
}
"""The shapes of training and generation."""


def why_refused(backend: Backend, dtype: torch.dtype) -> str:
    """Return the device's error when it multiplies matrices of ``dtype``; ``''`` if it can multiply them."""
    try:
        ones = torch.ones(4, 4, device=backend.device()).to(dtype)
        (ones @ ones).sum().item()
    except (RuntimeError, TypeError) as exc:  # NotImplementedError is a RuntimeError
        return str(exc).strip().partition("\n")[0]
    return ""


def wrong_attention(backend: Backend, shape: Attention, dtype: torch.dtype) -> list[str]:
    """Return the errors in the device's attention and its gradients, one line each."""
    generator = torch.Generator().manual_seed(0)
    keys = shape.keys or shape.queries
    sizes = {"query": (shape.heads, shape.queries), "key": (shape.kv_heads, keys), "value": (shape.kv_heads, keys)}
    inputs = {
        name: torch.randn(2, heads, length, shape.head_size, generator=generator).to(dtype)
        for name, (heads, length) in sizes.items()
    }
    visible = _visible_keys(shape.queries, keys) if shape.padded else None
    on_device = None if visible is None else visible.to(backend.device())
    return wrong_operation(
        backend,
        functools.partial(_fused, visible=on_device, causal=shape.causal),
        functools.partial(_step_by_step, visible=visible, causal=shape.causal),
        inputs,
    )


def wrong_operation(
    backend: Backend, fused: Operation, defined: Operation, inputs: Mapping[str, torch.Tensor]
) -> list[str]:
    """Return the errors of ``fused`` on the device and of its gradients, one line each.

    ``defined`` gives the right result, from the same ``inputs`` in double precision on the host.
    """
    exact = {name: tensor.double().requires_grad_() for name, tensor in inputs.items()}
    right, dtype = defined(**exact), next(iter(inputs.values())).dtype
    found = {name: tensor.to(backend.device(), copy=True).requires_grad_() for name, tensor in inputs.items()}
    out = fused(**found)
    if (out.shape, out.dtype) != (right.shape, dtype):
        return [f"it returned {tuple(out.shape)} in {out.dtype}, and not {tuple(right.shape)} in {dtype}"]
    out = out.clone()  # the operation may free or overwrite its own result in the backward pass
    weight = torch.randn(right.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    out.backward(weight.to(backend.device()))
    right.backward(weight.double())
    return list(differences(_with_gradients(out, found), _with_gradients(right, exact), dtype))


def wrong_training(backend: Backend, dtype: torch.dtype, *, step: bool) -> list[str]:
    """Return the errors in a forward pass, all gradients and, with ``step``, a step of AdamW, one line each."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = _Transformer().to(dtype)
        tokens = torch.randint(0, _VOCABULARY, (2, 19))
    got = _trained(copy.deepcopy(model).to(backend.device()), tokens.to(backend.device()), _fused, step=step)
    wanted = _trained(model.double(), tokens, _step_by_step, step=step)
    return list(differences(got, wanted, dtype))


def wrong_compiled(backend: Backend) -> list[str]:
    """Return the errors of a compiled chain of elementwise operations, one line each; one is that it is not faster.

    A compiler makes one pass over memory of it. The best of several turns of each counts: both meet the same load.
    """
    generator = torch.Generator().manual_seed(0)
    host = torch.randn(_CHAINED, generator=generator)
    ways: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"as it is": _chain, "compiled": torch.compile(_chain)}
    best_s = dict.fromkeys(ways, math.inf)
    wrong: list[str] = []
    exact = host.double().requires_grad_()
    right = _chain(exact)
    right.sum().backward()
    for turn in range(_TURNS):
        for name, way in ways.items():
            x = host.to(backend.device(), copy=True).requires_grad_()
            backend.synchronize()
            begun_s = time.perf_counter()
            out = way(x)
            out.sum().backward()
            backend.synchronize()
            best_s[name] = min(best_s[name], time.perf_counter() - begun_s)
            if turn == 0:
                found = _with_gradients(out, {"x": x})
                wrong += [
                    f"{name}: {line}" for line in differences(found, _with_gradients(right, {"x": exact}), x.dtype)
                ]
    if best_s["compiled"] > _PAYS * best_s["as it is"]:
        taken = ", ".join(f"{name} {1e3 * seconds:.3g} ms" for name, seconds in best_s.items())
        wrong.append(f"compiling a chain of operations makes it no faster: {taken}")
    return wrong


def _chain(x: torch.Tensor) -> torch.Tensor:
    for _ in range(8):
        x = functional.silu(x) * 1.25 + x.tanh() * 0.5
    return x


def differences(
    got: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor], dtype: torch.dtype
) -> Iterator[str]:
    """Yield a line for each tensor of ``got`` with a larger distance from ``wanted`` than ``dtype`` allows."""
    for name, right in wanted.items():
        off = float((got[name].cpu().double() - right).norm() / right.norm())
        if not off <= TOLERANCES[dtype]:  # true for NaN, too
            yield f"{name} in {dtype} is off by {off:.2g} of its norm, and {TOLERANCES[dtype]:g} is allowed"


def _visible_keys(queries: int, keys: int) -> torch.Tensor:
    """Return the key masks of two sequences; the second one is a third shorter."""
    lengths = torch.tensor([keys, keys - keys // 3])
    return (torch.arange(keys) < lengths[:, None])[:, None, None, :].expand(2, 1, queries, keys)


def _trained(model: _Transformer, tokens: torch.Tensor, attend: _Attend, *, step: bool) -> dict[str, torch.Tensor]:
    """Return the logits, the gradients and, with ``step``, the change of each parameter by a step of AdamW."""
    logits = model(tokens[:, :-1], attend)
    functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten()).backward()
    names = dict(model.named_parameters())
    found = _with_gradients(logits, names)
    if not step:
        return found
    before = {name: parameter.detach().clone() for name, parameter in names.items()}
    torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, eps=_EPSILON).step()
    return found | {f"the step of {name}": parameter.detach() - before[name] for name, parameter in names.items()}


def _with_gradients(out: torch.Tensor, leaves: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the result ``out`` of an operation, and the gradients of its inputs, under their names."""
    return {"the result": out.detach()} | {f"the gradient of {name}": _gradient(leaf) for name, leaf in leaves.items()}


def wrong_rms_norm(backend: Backend, rms_norm: Operation, shape: tuple[int, ...], dtype: torch.dtype) -> list[str]:
    """Return the errors of ``rms_norm`` and its gradients, one line each."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator)
    x[..., ::2, :] *= 1e-3  # so small that eps changes the result in these rows
    weight = 1 + torch.randn(shape[-1], generator=generator) / 4

    def defined(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + _NORM_EPS).sqrt() * weight

    inputs = {"x": x.to(dtype), "weight": weight.to(dtype)}
    return wrong_operation(backend, lambda x, weight: rms_norm(x, weight, _NORM_EPS), defined, inputs)


def wrong_swiglu(backend: Backend, swiglu: Operation, shape: tuple[int, ...], dtype: torch.dtype) -> list[str]:
    """Return the errors of ``swiglu`` and its gradients, one line each."""
    generator = torch.Generator().manual_seed(0)
    inputs = {name: (2 * torch.randn(shape, generator=generator)).to(dtype) for name in ("gate", "up")}
    return wrong_operation(backend, swiglu, lambda gate, up: gate / (1 + (-gate).exp()) * up, inputs)


def _gradient(leaf: torch.Tensor) -> torch.Tensor:
    """Return a copy of the gradient of ``leaf``; zeros if it has none."""
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad.clone()


def _fused(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, visible: torch.Tensor | None, causal: bool
) -> torch.Tensor:
    grouped = query.shape[1] != key.shape[1]
    return functional.scaled_dot_product_attention(
        query, key, value, attn_mask=visible, is_causal=causal, enable_gqa=grouped
    )


def _step_by_step(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, visible: torch.Tensor | None, causal: bool
) -> torch.Tensor:
    key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], dim=1) for each in (key, value))
    scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
    if causal:
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if visible is not None:
        scores = scores.masked_fill(~visible, -math.inf)
    return scores.softmax(-1) @ value


class _Transformer(nn.Module):
    """A tiny language model with all usual parts."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_VOCABULARY, _WIDTH)
        self.blocks = nn.ModuleList(_Block() for _ in range(_LAYERS))
        self.head = nn.Linear(_WIDTH, _VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor, attend: _Attend) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden, attend)
        logits: torch.Tensor = self.head(_normalised(hidden))
        return logits


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inwards, self.outwards = nn.Linear(_WIDTH, 3 * _WIDTH), nn.Linear(_WIDTH, _WIDTH)
        self.up, self.down = nn.Linear(_WIDTH, 4 * _WIDTH), nn.Linear(4 * _WIDTH, _WIDTH)

    def forward(self, hidden: torch.Tensor, attend: _Attend) -> torch.Tensor:
        parts = self.inwards(_normalised(hidden)).unflatten(-1, (3, _HEADS, -1)).permute(2, 0, 3, 1, 4)
        attended = attend(*parts.unbind(0), visible=None, causal=True).transpose(1, 2).flatten(-2)
        hidden = hidden + self.outwards(attended)
        moved: torch.Tensor = self.down(functional.silu(self.up(_normalised(hidden))))
        return hidden + moved


def _normalised(hidden: torch.Tensor) -> torch.Tensor:
    return hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + 1e-6)
