"""The output layer: from hidden states to log-probabilities and entropies, without ever holding all logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


def score_chunk(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor, temperature: float
) -> torch.Tensor:
    """Return what this rank's part of the vocabulary says about ``targets``: 3 × positions, float32.

    ``hidden`` (positions × size), ``weight`` (vocabulary × size), ``bias`` (vocabulary), ``targets`` (positions,
    int64; a target outside the vocabulary is on another rank). The rows are the logarithm of the sum of the
    exponentials of the logits, the target's logit (0 if it is outside) and the negative entropy. The logits are
    computed in the dtype of ``hidden``, and float32 from there on. Traceable by ``torch.compile``.
    """
    logits = functional.linear(hidden, weight, bias).float().div_(temperature)
    normalizer = logits.logsumexp(-1)
    inside = (targets >= 0) & (targets < logits.shape[-1])
    chosen = logits.gather(1, targets.where(inside, 0)[:, None])[:, 0].where(inside, 0.0)
    shifted = logits.sub_(normalizer[:, None])  # so that no large numbers cancel
    return torch.stack([normalizer, chosen, shifted.exp().mul_(shifted).sum(-1)])


def logit_gradients(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    temperature: float,
    normalizer: torch.Tensor,
    gradient: torch.Tensor,
) -> torch.Tensor:
    """Return the gradient of the logits (positions × vocabulary, in the dtype of ``hidden``).

    ``gradient`` (positions, float32) is that of the targets' log-probabilities. ``normalizer`` (positions, float32) is
    the logarithm of the sum of exponentials over the whole vocabulary. Traceable by ``torch.compile``.
    """
    logits = functional.linear(hidden, weight, bias).float().div_(temperature)
    scaled = (gradient / temperature)[:, None]
    inside = (targets >= 0) & (targets < logits.shape[-1])
    gradients = logits.sub_(normalizer[:, None]).exp_().mul_(-scaled)
    share = scaled.where(inside[:, None], 0.0)
    return gradients.scatter_add_(1, targets.where(inside, 0)[:, None], share).to(hidden.dtype)


def _score_logits(logits: torch.Tensor, targets: torch.Tensor, temperature: float) -> torch.Tensor:
    distribution = (logits.float() / temperature).log_softmax(-1)
    logprobs = distribution.gather(1, targets[:, None])[:, 0]
    with torch.no_grad():
        entropy = -(distribution.exp() * distribution).sum(-1)
    return torch.stack([logprobs, entropy])


@dataclass(frozen=True)
class VocabularyShard:
    """This rank's part of a vocabulary that several ranks share: from token ``first`` on.

    ``gather`` returns the ranks' tensors as one (ranks × …). ``add`` returns their sum. Both are collective.
    """

    first: int
    gather: Callable[[torch.Tensor], torch.Tensor]
    add: Callable[[torch.Tensor], torch.Tensor]


@dataclass
class OutputScorer:
    """Computes log-probability and entropy of targets from hidden states, a chunk of positions at a time.

    At most ``chunk_logits`` logits exist at once (a position's at least). The backward pass computes the logits of a
    chunk again. An engine may replace ``forward`` and ``backward`` by compiled versions.
    """

    temperature: float = 1.0
    chunk_logits: int = 1 << 27
    shard: VocabularyShard | None = None
    forward: Callable[..., torch.Tensor] = score_chunk
    backward: Callable[..., torch.Tensor] = logit_gradients

    def __call__(
        self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor
    ) -> torch.Tensor:
        """Return log-probability and entropy of ``targets`` (2 × positions, float32); the entropy has no gradient.

        ``hidden`` (positions × size), ``weight`` (vocabulary × size), ``bias`` (vocabulary or None), ``targets``
        (positions, int64). Under autocast the product is computed in its dtype.
        """
        kind = hidden.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
        bias = bias if bias is None else bias.to(dtype)
        with torch.autocast(kind, enabled=False):
            inputs = (hidden.to(dtype), weight.to(dtype), bias, targets)
            scores: torch.Tensor = _Score.apply(*inputs, self)  # type: ignore[no-untyped-call] # torch's
        return scores

    def of_logits(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the same from ``logits`` (positions × vocabulary, all of it), for models that compute them."""
        parts = [logits.new_zeros(2, 0, dtype=torch.float32)] + [
            checkpoint(_score_logits, logits[chunk], targets[chunk], self.temperature, use_reentrant=False)
            for chunk in self.chunks(*logits.shape)
        ]
        return torch.cat(parts, 1)

    def chunks(self, positions: int, vocabulary: int) -> Iterator[slice]:
        """Yield equal slices of ``positions``, the last one perhaps shorter."""
        most = max(1, self.chunk_logits // vocabulary)
        size = -(-positions // -(-positions // most)) if positions else 1
        for start in range(0, positions, size):
            yield slice(start, start + size)


class _Score(torch.autograd.Function):
    """The chunks' scores. Only the inputs and a number for each position stay for the backward pass.

    The gradient is softmax minus one-hot, as in Wijmans et al. 2024, https://arxiv.org/abs/2411.09009.
    """

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: Any, bias: Any, targets: Any, scorer: OutputScorer) -> Any:
        if scorer.shard is not None:
            targets = targets - scorer.shard.first
        parts = [hidden.new_zeros(3, 0, dtype=torch.float32)] + [
            scorer.forward(hidden[chunk], weight, bias, targets[chunk], scorer.temperature)
            for chunk in scorer.chunks(len(hidden), len(weight))
        ]
        normalizer, chosen, negative = _joined(torch.cat(parts, 1), scorer.shard)
        ctx.save_for_backward(hidden, weight, bias, targets, normalizer)
        ctx.scorer = scorer
        return torch.stack([chosen - normalizer, -negative])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        hidden, weight, bias, targets, normalizer = ctx.saved_tensors
        scorer: OutputScorer = ctx.scorer
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        of_hidden = torch.zeros_like(hidden) if wants_hidden else None
        of_weight = torch.zeros_like(weight) if wants_weight else None
        of_bias = torch.zeros_like(bias) if wants_bias else None
        for chunk in scorer.chunks(len(hidden), len(weight)):
            part, known = hidden[chunk], (normalizer[chunk], gradient[0, chunk])
            logits = scorer.backward(part, weight, bias, targets[chunk], scorer.temperature, *known)
            if of_hidden is not None:
                of_hidden[chunk] = logits @ weight
            if of_weight is not None:
                of_weight.addmm_(logits.t(), part)
            if of_bias is not None:
                of_bias += logits.sum(0)
        if of_hidden is not None and scorer.shard is not None:
            of_hidden = scorer.shard.add(of_hidden)
        return of_hidden, of_weight, of_bias, None, None


def _joined(parts: torch.Tensor, shard: VocabularyShard | None) -> torch.Tensor:
    """Return :func:`score_chunk`'s result for the whole vocabulary, from the results for the ranks' parts."""
    if shard is None:
        return parts
    normalizers, chosen, negatives = shard.gather(parts).unbind(1)  # each ranks × positions
    normalizer = normalizers.logsumexp(0)
    shifted = normalizers - normalizer
    return torch.stack([normalizer, chosen.sum(0), (shifted.exp() * (negatives + shifted)).sum(0)])
