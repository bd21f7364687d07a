"""Calls of a causal language model of transformers: packed if it can be, and without logits if it allows."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator
from typing import Any

import torch
from transformers import AttentionInterface

from hwrl.errors import ConfigError
from hwrl.interfaces import Backend, Batch
from hwrl.models import logits_at, uses_attention_interface
from hwrl.train.context_parallel import ContextGroup
from hwrl.train.packing import MicroBatch, PackShare, make_pack, make_rows
from hwrl.train.scoring import OutputScorer

_PACKED = "hwrl_packed"
_TRIAL = "hwrl_trial"
_ROWS = "sdpa"
_SHORT = (7, 4, 9)
"""The lengths of the rows of the trial."""

_TOLERANCE = {torch.float32: 1e-3}
"""The largest mean difference of log-probabilities between packed and plain calls; see ``_COARSE`` for other dtypes."""

_COARSE = 0.1
_OF_LENGTH = ("dynamic", "longrope")
"""Rotary embeddings that depend on the longest row of a call."""

_log = logging.getLogger("hwrl.train")


class PackedAttention:
    """The attention function of transformers for packs, on ``backend``; with ``context``, for its ranks' shares."""

    def __init__(self, backend: Backend, context: ContextGroup | None = None) -> None:
        self._backend, self._context = backend, context

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        scaling: float | None = None,
        cu_seq_lens_q: torch.Tensor | None = None,
        max_length_q: int = 0,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """Take query, key and value (1 × heads × length × size); return 1 × length × heads × size.

        With a context group the length is that of this rank's share of the pack. A call without ``cu_seq_lens_q``, the
        boundaries of a pack, is one on padded rows.
        """
        if cu_seq_lens_q is None:
            rows: Any = AttentionInterface()[_ROWS]
            attended: tuple[torch.Tensor, None] = rows(
                module, query, key, value, attention_mask, scaling=scaling, **kwargs
            )
            return attended
        q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        if self._context is not None:
            q, k, v = self._context.to_heads(q, k, v)
        packed = self._backend.varlen_attention(
            q, k, v, cu_seqlens=cu_seq_lens_q, max_length=max_length_q, scale=scaling
        )
        if self._context is not None:
            packed = self._context.to_tokens(packed)
        return packed[None], None


class _TrialAttention(PackedAttention):
    """Notes the layers that call it, and what they ask for beyond plain causal attention."""

    def __init__(self, backend: Backend, context: ContextGroup | None) -> None:
        super().__init__(backend, context)
        self.layers: set[int] = set()
        self.refused: set[str] = set()

    def __call__(self, module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> Any:
        self.layers.add(id(module))
        asked = {"a mask of its own": attention_mask, "a sliding window": kwargs.get("sliding_window")}
        asked |= {"capped scores": kwargs.get("softcap"), "attention sinks": kwargs.get("s_aux")}
        asked |= {"a bias for positions": kwargs.get("position_bias"), "dropout": kwargs.get("dropout") or None}
        causal = kwargs.get("is_causal")
        if not (getattr(module, "is_causal", True) if causal is None else causal):
            asked["attention to later tokens"] = True
        self.refused |= {name for name, answer in asked.items() if answer is not None}
        if self.refused:  # the result is not used
            return value.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1]), None
        return super().__call__(module, query, key, value, None, **kwargs)


class CausalModel:
    """How to call one model: in packs or in padded rows, with its output layer replaced or with logits.

    :meth:`prove` tries the ways, and chooses. Before it, calls use padded rows and logits. It registers an attention
    function with transformers. ``context`` is the group of ranks that share each pack; models of this process with
    groups of one size use the same function. ``level`` is the level of the log lines.
    """

    def __init__(
        self,
        *,
        backend: Backend,
        scorer: OutputScorer,
        level: int = logging.WARNING,
        context: ContextGroup | None = None,
    ) -> None:
        self.scorer, self._level = scorer, level
        self.packs = self.scores = False
        self._backend, self._context = backend, context
        self._attention = _PACKED if context is None else f"{_PACKED}_{context.size}"

    def __call__(self, model: Any, part: MicroBatch) -> torch.Tensor:
        """Return log-probability and entropy of ``part.targets`` (2 × targets, float32)."""
        if self.scores:
            return score_pass(model, part, self.scorer)[0].t()
        return self._from_logits(model, part)

    @torch.no_grad()
    def prove(self, model: Any, *, dtype: torch.dtype) -> None:
        """Call ``model`` on a few short rows in several ways, and choose the fastest with the right result.

        ``dtype`` is that of the computation. Logs the reasons for padded rows and for logits. With a context group,
        raises ConfigError with the reason for padded rows. Collective on ranks that share the model or a pack. With
        FSDP2 the weights may stay whole afterwards.
        """
        batch, name = _short_rows(model), type(model).__name__
        with torch.compiler.set_stance("force_eager"):
            self._choose_output(model, batch)
            why = _why_not_static(model) or self._why_not_packed(model, batch, dtype)
        self.packs = not why
        if why and self._context is not None:
            raise ConfigError(
                f"{name} cannot be trained with train.context_parallel={self._context.size}",
                why=f"ranks can share packs only, and it trains on padded rows: {why}",
                fix="set train.context_parallel=1",
            )
        if why:
            _log.log(self._level, "%s trains on padded rows, not on packs: %s", name, why)

    # -- one call -----------------------------------------------------------------------------------------------

    def _from_logits(self, model: Any, part: MicroBatch) -> torch.Tensor:
        logits = logits_at(model, part.places, **model_inputs(part))
        return self.scorer.of_logits(logits, part.targets)

    # -- the trial ----------------------------------------------------------------------------------------------

    def _choose_output(self, model: Any, batch: Batch) -> None:
        """Replace the output layer by scores if the result is right; log it if not."""
        self.scores = self._can_score(model, batch)
        if not self.scores:
            _log.log(self._level, "The output layer of %s computes all logits of a micro-batch", type(model).__name__)

    def _can_score(self, model: Any, batch: Batch) -> bool:
        """Return whether the output layer is a plain matrix product, and the model returns its result unchanged."""
        if type(model.get_output_embeddings()) is not torch.nn.Linear:
            return False
        return torch.equal(*score_pass(model, self._rows(batch, torch.arange(batch.rows)), self.scorer))

    def _rows(self, batch: Batch, rows: torch.Tensor) -> MicroBatch:
        return make_rows(batch, rows, device=self._backend.device())

    def _why_not_packed(self, model: Any, batch: Batch, dtype: torch.dtype) -> str:
        every = torch.arange(batch.rows)
        wanted = torch.zeros(batch.tokens.shape)
        for row in every:
            part = self._rows(batch, row[None])
            wanted[part.rows, part.columns] = self._from_logits(model, part)[0, : part.trained_tokens].cpu()
        trial, before = _TrialAttention(self._backend, self._context), model.config._attn_implementation
        AttentionInterface.register(_TRIAL, trial)
        model.config._attn_implementation = _TRIAL
        try:
            off = self._distance(model, batch, every, wanted)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, TypeError, ValueError) as exc:  # a kernel, or a model, that refuses
            why = f"a pack is refused: {' '.join(str(exc).split())[:200]}"
        else:
            why = _why_wrong(model, trial, off, dtype)
        AttentionInterface.register(self._attention, PackedAttention(self._backend, self._context))
        model.config._attn_implementation = before if why else self._attention
        return why

    def _distance(self, model: Any, batch: Batch, rows: torch.Tensor, wanted: torch.Tensor) -> float:
        """Return the mean distance of a pack's log-probabilities from ``wanted``: the largest of the ranks'."""
        share = PackShare() if self._context is None else self._context.share
        pack = make_pack(batch, rows, device=self._backend.device(), share=share)
        packed = self(model, pack)[0, : pack.trained_tokens].cpu()
        off = 0.0  # the short pack may have no token for the last ranks
        if pack.trained_tokens:
            off = float((packed - wanted[pack.rows, pack.columns]).abs().mean())
        if self._context is None:
            return off
        return self._context.largest(off if math.isfinite(off) else math.inf)


def score_pass(model: Any, part: MicroBatch, scorer: OutputScorer) -> tuple[torch.Tensor, torch.Tensor]:
    """Run ``model`` with ``scorer`` in place of its output layer; return the result of the model, and the scores.

    The scores (targets × 2) pass through the model, because FSDP2 prepares the backward pass at its results.
    """
    output = model.get_output_embeddings()
    made: list[torch.Tensor] = []

    def score(hidden: torch.Tensor) -> torch.Tensor:
        chosen = hidden.flatten(0, 1).index_select(0, part.places)
        scores = scorer(chosen, output.weight, output.bias, part.targets)
        made.append(scores.t()[None].clone())  # no view: FSDP2 hooks the result
        return made[0]

    with replaced_forward(output, score):
        result = model(**model_inputs(part)).logits
    return result[0], made[0][0]


def _why_wrong(model: Any, trial: _TrialAttention, off: float, dtype: torch.dtype) -> str:
    """Return why packs are wrong, or an empty text. ``off`` is the mean difference from the rows' results."""
    layers = model.config.get_text_config().num_hidden_layers
    if len(trial.layers) != layers:
        return f"{len(trial.layers)} of its {layers} layers call transformers' attention interface"
    if trial.refused:
        return f"its attention has {', '.join(sorted(trial.refused))}"
    if not off <= _TOLERANCE.get(dtype, _COARSE):
        return f"the log-probabilities of a short pack differ by {off:.3g} from those of its rows"
    return ""


def model_inputs(part: MicroBatch) -> dict[str, Any]:
    """Return the model's arguments for ``part``."""
    inputs: dict[str, Any] = {"input_ids": part.input_ids, "use_cache": False}
    if part.boundaries is not None:
        cu_seqlens, longest = part.boundaries.cu_seqlens, part.boundaries.max_length
        inputs |= {"cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens}
        inputs |= {"max_length_q": longest, "max_length_k": longest, "position_ids": part.position_ids}
    return inputs


@contextlib.contextmanager
def replaced_forward(module: torch.nn.Module, forward: Any) -> Iterator[None]:
    """Replace the forward method of ``module`` inside the block; its hooks stay."""
    module.forward = forward
    try:
        yield
    finally:
        del module.forward


def _why_not_static(model: Any) -> str:
    """Return why the kind of ``model`` cannot be packed, or an empty text: reasons that short rows do not show."""
    config = model.config.get_text_config()
    if not uses_attention_interface(model):
        return "it does not use transformers' attention interface"
    others = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if others:
        return f"it has layers of {', '.join(sorted(others))}"
    rotary = (getattr(config, "rope_parameters", None) or {}).get("rope_type")
    if rotary in _OF_LENGTH:
        return f"its rotary embedding ({rotary}) depends on the longest row of a call"
    return ""


def _short_rows(model: Any) -> Batch:
    vocabulary = model.config.get_text_config().vocab_size
    lengths = torch.tensor(_SHORT)
    places = torch.arange(max(_SHORT))
    tokens = (torch.arange(len(_SHORT))[:, None] * 31 + places * 7 + 3) % vocabulary
    mask = (places >= 1) & (places < lengths[:, None])
    return Batch(tokens, mask, torch.zeros(tokens.shape), torch.zeros(len(_SHORT)))
