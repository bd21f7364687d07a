"""Calls of a causal language model of transformers: packed if it can be, and without logits if it allows."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from transformers import AttentionInterface

from hwrl.errors import ConfigError
from hwrl.interfaces import Backend, Batch
from hwrl.models import EAGER, logits_at, uses_attention_interface
from hwrl.train.context_parallel import ContextGroup
from hwrl.train.packing import MicroBatch, PackShare, make_pack, make_rows
from hwrl.train.scoring import OutputScorer

_PACKED = "hwrl_packed"
_TRIAL = "hwrl_trial"
_ROWS = "sdpa"
_SHORT = (7, 4, 9)
"""The lengths of the trial's short rows."""

_TOLERANCE = {torch.float32: 1e-3}
"""The largest mean difference of log-probabilities between packed and plain calls; see ``_COARSE`` for other dtypes."""

_COARSE = 0.1
_PREFIX = 256
"""The most tokens of the long row that the trial compares."""
_LONGEST_EAGER = 2048
"""The most tokens of the long row if attention holds the scores of all pairs of tokens."""

_Case = tuple[Batch, torch.Tensor, torch.Tensor]
"""Rows, the log-probabilities that their tokens have without other rows and later tokens, and the rows to pad."""

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
    def prove(self, model: Any, *, dtype: torch.dtype, max_length: int | None = None) -> None:
        """Call ``model`` on a few rows in several ways, and choose the fastest with the right result.

        The rows are short, but for one of ``max_length`` tokens, the run's longest (None: there is none). ``dtype`` is
        that of the computation. Logs the reasons for padded rows and for logits. Raises ConfigError if the result of a
        row depends on the rows beside it, or that of a token on later ones: no engine would then agree with another.
        With a context group, raises ConfigError with the reason for padded rows. Collective on ranks that share the
        model or a pack. With FSDP2 the weights may stay whole afterwards.
        """
        name = type(model).__name__
        with torch.compiler.set_stance("force_eager"):
            batch = _trial_rows(model, _SHORT)
            self._choose_output(model, batch)
            cases = [(batch, self._alone(model, batch, range(batch.rows)), torch.arange(batch.rows))]
            if max_length is not None and max_length > 2 * max(_SHORT):
                cases.append(self._long_case(model, max_length))
            why = _why_not_static(model) or self._why_not_packed(model, cases, dtype)
            if not (why and self._context is not None):
                self._require_independent(model, cases, dtype)
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

    def _alone(self, model: Any, batch: Batch, rows: Iterable[int]) -> torch.Tensor:
        """Return the log-probabilities of ``rows`` of ``batch``, each from a call by itself; NaN elsewhere."""
        wanted = torch.full(batch.tokens.shape, math.nan)
        for row in rows:
            part = self._rows(batch, torch.tensor([row]))
            wanted[part.rows, part.columns] = self._from_logits(model, part)[0, : part.trained_tokens].cpu()
        return wanted

    def _long_case(self, model: Any, length: int) -> _Case:
        """Return a row of ``length`` tokens and its first ones as a row of their own: the same results for those."""
        if model.config._attn_implementation == EAGER:
            length = min(length, _LONGEST_EAGER)
        batch = _trial_rows(model, (length, min(_PREFIX, length // 4)), same=True)
        return batch, self._alone(model, batch, [1])[1].expand(batch.tokens.shape), torch.zeros(1, dtype=torch.long)

    def _why_not_packed(self, model: Any, cases: Sequence[_Case], dtype: torch.dtype) -> str:
        trial, before = _TrialAttention(self._backend, self._context), model.config._attn_implementation
        AttentionInterface.register(_TRIAL, trial)
        model.config._attn_implementation = _TRIAL
        share, why = PackShare() if self._context is None else self._context.share, ""
        try:
            for batch, wanted, _ in cases:
                pack = make_pack(batch, torch.arange(batch.rows), device=self._backend.device(), share=share)
                why = why or _why_wrong(model, trial, self._distance(model, pack, wanted), dtype)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, TypeError, ValueError) as exc:  # a kernel, or a model, that refuses
            why = f"a pack is refused: {' '.join(str(exc).split())[:200]}"
        AttentionInterface.register(self._attention, PackedAttention(self._backend, self._context))
        model.config._attn_implementation = before if why else self._attention
        return why

    def _require_independent(self, model: Any, cases: Sequence[_Case], dtype: torch.dtype) -> None:
        for batch, wanted, rows in cases:
            off = self._distance(model, self._rows(batch, rows), wanted)
            if not off <= _TOLERANCE.get(dtype, _COARSE):
                beside = "rows beside it" if len(rows) > 1 else f"tokens after it, in a row of {batch.tokens.shape[1]}"
                raise ConfigError(
                    f"{type(model).__name__} cannot be trained",
                    why=f"the log-probability of a token depends on the {beside}: it changes by {off:.3g} in the mean, "
                    "so the trainer would not compute the policy that the replicas sample from",
                    fix="take an architecture with causal attention, and without limits or means over a whole batch",
                )

    def _distance(self, model: Any, part: MicroBatch, wanted: torch.Tensor) -> float:
        """Return the mean distance of ``part``'s log-probabilities from ``wanted``: the largest of the ranks'."""
        known = wanted[part.rows, part.columns]
        each = (self(model, part)[0, : part.trained_tokens].cpu() - known).abs()[~known.isnan()]
        off = float(each.mean()) if len(each) else 0.0  # a short pack may have no token for the last ranks
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
    return f"it has layers of {', '.join(sorted(others))}" if others else ""


def _trial_rows(model: Any, lengths: Sequence[int], *, same: bool = False) -> Batch:
    """Return rows of ``lengths``; with ``same``, of the same tokens, and only those of the last row count.

    The number of tokens in a row comes from its mask, so a longer row has its last token, too.
    """
    vocabulary, count = model.config.get_text_config().vocab_size, len(lengths)
    places, ends = torch.arange(max(lengths)), torch.tensor(lengths)[:, None]
    tokens = ((torch.arange(count)[:, None] * (0 if same else 31)) + places * places * 5 + places * 7 + 3) % vocabulary
    counted = torch.full_like(ends, lengths[-1]) if same else ends
    mask = (places >= 1) & ((places < counted) | (places == ends - 1))
    return Batch(tokens, mask, torch.zeros(tokens.shape), torch.zeros(count))
