"""Measure the memory of a training pass without a device or weights: :func:`measure_pass`."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface

from hwrl.interfaces import LoraSettings
from hwrl.lora import add_adapter
from hwrl.models import build_model
from hwrl.train.causal import replaced_forward, score_pass
from hwrl.train.context_parallel import HeadExchange
from hwrl.train.packing import MicroBatch
from hwrl.train.scoring import OutputScorer
from hwrl.train.sharding import layers_of, outermost

_ATTENTION = "hwrl_measured"
_PRODUCTS = (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm, torch.ops.aten.baddbmm)
_ALIKE = 2
"""How many layers of each kind run in a measured pass. The others count as these."""
_WIDTHS = 17
"""Values that a layer keeps for each token, in hidden sizes, if the model cannot run without a device.

That is 34 bytes in a two-byte dtype (Korthikanti et al. 2022, https://arxiv.org/abs/2205.05198, with fused attention).
"""


@dataclass(frozen=True)
class PassMemory:
    """Bytes that one forward and backward pass allocates, beside weights and their gradients.

    ``kept`` has the bytes that each layer keeps for its backward pass, and ``inputs`` those that it keeps if it is
    recomputed. ``outside`` is kept outside the layers. ``scoring`` is the most temporary memory while the output layer
    scores, ``working`` the most in the backward pass of a layer, and ``recomputing`` the most in that of a recomputed
    layer. ``measured`` is False if the model cannot run without a device; then the numbers are a rule of thumb.
    """

    kept: tuple[int, ...]
    inputs: tuple[int, ...]
    outside: int
    scoring: int
    working: int
    recomputing: int
    measured: bool = True

    def kept_nbytes(self, recomputed: int) -> int:
        """Return the bytes between forward and backward pass, if the first ``recomputed`` layers run again."""
        return self.outside + sum(self.inputs[:recomputed]) + sum(self.kept[recomputed:])

    def peak_nbytes(self, recomputed: int) -> int:
        """Return the most bytes at one time, if the first ``recomputed`` layers run again."""
        kept = self.kept_nbytes(recomputed)
        peaks = [kept + self.scoring]
        if recomputed < len(self.kept):
            peaks.append(kept + self.working)
        if recomputed:
            peaks.append(self.outside + sum(self.inputs[:recomputed]) + self.recomputing)
        return max(peaks)


@functools.lru_cache(maxsize=64)
def measure_pass(
    directory: Path,
    *,
    dtype: torch.dtype,
    tokens: int,
    targets: int,
    lora: LoraSettings | None = None,
    context_parallel: int = 1,
    compiled: bool = False,
) -> PassMemory:
    """Return the memory of a pass over one pack of ``tokens`` tokens with ``targets`` response tokens.

    ``context_parallel`` ranks share the pack, and these are the tokens of one of them.

    Runs the model of ``directory`` in ``dtype`` on the meta device, with a fused attention, and counts every
    allocation. So it needs no weights, and no memory. Two layers of each kind run, and the others count as these.
    Routed experts count as if each got the same number of tokens.

    A ``compiled`` layer keeps the inputs and results of its matrix products and of its attention. Everything between
    them is fused into kernels, and the backward pass computes it again from these values.
    """
    with torch.device("meta"):
        model = build_model(directory, dtype=dtype).eval()
    kinds, left = _shorten(model)
    if lora is not None:
        model = add_adapter(model, lora).to("meta")
    try:
        plain, recomputed = (
            _run(model, tokens=tokens, targets=targets, recompute=recompute, context_parallel=context_parallel)
            for recompute in (False, True)
        )
    except (RuntimeError, TypeError, ValueError, AttributeError):  # a model that needs a mask, or values
        return _rule_of_thumb(model, kinds, dtype=dtype, tokens=tokens, targets=targets)
    each = dict(zip(left, plain.compiled_layers if compiled else plain.layers, strict=True))
    inputs = dict(zip(left, recomputed.layers, strict=True))
    return PassMemory(
        kept=tuple(each[kind] for kind in kinds),
        inputs=tuple(inputs[kind] for kind in kinds),
        outside=plain.kept - sum(plain.layers),
        scoring=plain.scoring,
        working=plain.working,
        recomputing=recomputed.working,
    )


@dataclass(frozen=True)
class _Run:
    """The bytes that each of the ``layers`` kept, and ``kept`` by the whole pass; see :class:`PassMemory` for the rest.

    ``compiled_layers`` is what they would keep if they were compiled.
    """

    layers: tuple[int, ...]
    compiled_layers: tuple[int, ...]
    kept: int
    scoring: int
    working: int


class _Allocations(TorchDispatchMode):
    """Counts the bytes of all living storages from inside the context: ``now``, and the ``peak``.

    ``of_products`` counts the bytes of each storage that a matrix product or attention has read or written, whether the
    storage is still alive or not.
    """

    def __init__(self, known: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch's
        self._alive: dict[int, weakref.ref[Any]] = {}
        self._in_products: dict[int, weakref.ref[Any]] = {}
        self._known = {tensor.untyped_storage()._cdata for tensor in known}
        self.now = self.peak = self.of_products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._see(leaf.untyped_storage())
        if func.overloadpacket in _PRODUCTS:
            self.note_product(leaf for leaf in tree_leaves((args, result)) if isinstance(leaf, torch.Tensor))
        return result

    def note_product(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count the storages of ``tensors`` as those of a product, each once."""
        for storage in (tensor.untyped_storage() for tensor in tensors):
            key = storage._cdata
            known = self._in_products.get(key)
            if key not in self._known and (known is None or known() is not storage):
                self._in_products[key] = weakref.ref(storage)
                self.of_products += storage.nbytes()

    def _see(self, storage: Any) -> None:
        key, nbytes = storage._cdata, storage.nbytes()
        if key in self._alive or key in self._known:
            return

        def forget(_: Any) -> None:
            self.now -= nbytes
            del self._alive[key]

        self._alive[key] = weakref.ref(storage, forget)
        self.now += nbytes
        self.peak = max(self.peak, self.now)


def _run(model: Any, *, tokens: int, targets: int, recompute: bool, context_parallel: int) -> _Run:
    """Run a pass of ``model``, with gradients that leave it as soon as they are complete."""
    layers = outermost(layers_of(model))
    memory = _Allocations([*model.parameters(), *model.buffers()])
    hooks = [one.register_post_accumulate_grad_hook(_drop) for one in model.parameters() if one.requires_grad]
    kept: list[tuple[int, int]] = []
    scorer, part = OutputScorer(), _meta_part(tokens, targets)
    model.config._attn_implementation = _ATTENTION
    AttentionInterface.register(_ATTENTION, _attention(context_parallel, memory))
    with contextlib.ExitStack() as changes:
        for hook in hooks:
            changes.callback(hook.remove)
        for layer in layers:
            changes.enter_context(replaced_forward(layer, _observed(layer.forward, memory, kept, recompute)))
        for experts in filter(_has_experts, model.modules()):
            changes.enter_context(replaced_forward(experts, functools.partial(_experts, experts)))
        with memory, scorer.for_loss(lambda logprobs, *_: (torch.empty_like(logprobs), None)):
            scores, _ = score_pass(model, part, scorer)
            held, scoring = memory.now, memory.peak - memory.now
            memory.peak = held
            scores[:, 0].sum().backward()
    layers_kept, of_products = zip(*kept, strict=True)
    return _Run(layers_kept, tuple(map(min, layers_kept, of_products)), held, scoring, memory.peak - held)


def _observed(
    forward: Any,
    memory: _Allocations,
    kept: list[tuple[int, int]],
    recompute: bool,  # noqa: FBT001 - private
) -> Any:
    def observe(*args: Any, **kwargs: Any) -> Any:
        before, of_products = memory.now, memory.of_products
        run = functools.partial(checkpoint, forward, use_reentrant=False, preserve_rng_state=False)
        result = (run if recompute else forward)(*args, **kwargs)
        kept.append((memory.now - before, memory.of_products - of_products))
        return result

    return observe


def _drop(parameter: torch.Tensor) -> None:
    parameter.grad = None


def _meta_part(tokens: int, targets: int) -> MicroBatch:
    def empty(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    real = empty(targets, dtype=torch.float32)
    ids, places, rows = empty(1, tokens), empty(targets), torch.empty(0, dtype=torch.int64)
    known = (real, real, None, None, None)
    return MicroBatch(ids, empty(1, tokens), None, places, places, rows, rows, places, 1, *known, tokens, (targets,))


# -- a model to measure -----------------------------------------------------------------------------------------------


def _kind(layer: torch.nn.Module) -> tuple[Any, ...]:
    return type(layer), tuple((name, one.shape, one.requires_grad) for name, one in layer.named_parameters())


def _shorten(model: Any) -> tuple[list[Any], list[Any]]:
    """Leave two layers of each kind in ``model``; return the kinds of its layers before and after that."""
    layers = outermost(layers_of(model))
    kinds = [_kind(layer) for layer in layers]
    for holder in list(model.modules()):
        for name, child in holder.named_children():
            if isinstance(child, torch.nn.ModuleList) and len(child) == len(layers) and child[0] is layers[0]:
                left = [layer for index, layer in enumerate(layers) if kinds[:index].count(kinds[index]) < _ALIKE]
                setattr(holder, name, torch.nn.ModuleList(left))
    return kinds, [_kind(layer) for layer in outermost(layers_of(model))]


def _has_experts(module: torch.nn.Module) -> bool:
    weights = (getattr(module, name, None) for name in ("gate_up_proj", "down_proj"))
    return all(isinstance(weight, torch.nn.Parameter) and weight.dim() == 3 for weight in weights)


def _experts(module: Any, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Compute routed experts as one expert on all chosen rows: as many values as transformers' grouped product."""
    chosen = hidden.index_select(0, index.flatten())
    gate, up = _product(chosen, module.gate_up_proj).chunk(2, -1)
    weighted = _product(module.act_fn(gate) * up, module.down_proj) * weights.reshape(-1, 1)
    return weighted.index_select(0, index.flatten()).view(*index.shape, -1).sum(1).to(hidden.dtype)


def _product(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    one = weight[0]
    return rows @ (one if len(one) == rows.shape[-1] else one.t())


class _MeasuredAttention(torch.autograd.Function):
    """Allocates like a fused kernel: the result and a number for each row; backward, gradients for each head."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        result = query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[-1])
        ctx.save_for_backward(query, key, value, result, query.new_empty(query.shape[:-1], dtype=torch.float32))
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        query, key, value, _, _ = ctx.saved_tensors
        whole = [query.new_empty(*query.shape[:-1], each.shape[-1]) for each in (key, value)]
        shares = [each.unflatten(1, (key.shape[1], -1)).sum(2) for each in whole]
        return torch.empty_like(query), *shares


def _attention(context_parallel: int, memory: _Allocations) -> Any:
    """Return the attention function of ranks that share each pack: it allocates for both exchanges, too."""
    ranks = HeadExchange(context_parallel, torch.clone)

    def fused(*heads: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = _MeasuredAttention.apply(*heads)  # type: ignore[no-untyped-call] # torch's
        memory.note_product((*heads, result))
        return result

    def attend(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, None]:
        if context_parallel == 1:
            return fused(query, key, value), None
        whole = ranks.to_heads(*(each[0].transpose(0, 1) for each in (query, key, value)))
        attended = fused(*(each.transpose(0, 1)[None] for each in whole))
        return ranks.to_tokens(attended[0])[None], None

    return attend


def _rule_of_thumb(model: Any, kinds: Sequence[Any], *, dtype: torch.dtype, tokens: int, targets: int) -> PassMemory:
    hidden = model.config.get_text_config().hidden_size * tokens * dtype.itemsize
    vocabulary = model.get_output_embeddings().weight.shape[0]
    return PassMemory(
        kept=(_WIDTHS * hidden,) * len(kinds),
        inputs=(hidden,) * len(kinds),
        outside=4 * hidden,
        scoring=OutputScorer().needed_nbytes(targets, vocabulary),
        working=_WIDTHS * hidden,
        recomputing=2 * _WIDTHS * hidden,
        measured=False,
    )
