"""The output layer: from hidden states to log-probabilities and entropies, without ever holding all logits."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


def score_chunk(logits: torch.Tensor, targets: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return what ``logits`` (positions × this rank's part of the vocabulary) say about ``targets``, in float32.

    ``targets`` (positions, int64) count from the first token of that part; others belong to another rank. The rows of
    the result (3 × positions) are the logarithm of the sum of the exponentials of the logits, the target's logit (0 for
    another rank's) and the negative entropy. Traceable by ``torch.compile``.
    """
    scaled = logits.to(torch.float32, copy=True).div_(temperature)
    normalizer = scaled.logsumexp(-1)
    inside = (targets >= 0) & (targets < logits.shape[-1])
    chosen = scaled.gather(1, targets.where(inside, 0)[:, None])[:, 0].where(inside, 0.0)
    shifted = scaled.sub_(normalizer[:, None])  # first, so that large logits do not cancel
    return torch.stack([normalizer, chosen, shifted.exp().mul_(shifted).sum(-1)])


def logit_gradients(
    logits: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
    normalizer: torch.Tensor,
    gradient: torch.Tensor,
    entropy: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Return the gradient of ``logits``, in their shape and dtype; see :func:`score_chunk` for the inputs.

    ``gradient`` (positions, float32) is that of the targets' log-probabilities. ``normalizer`` (positions, float32) is
    the logarithm of the sum of exponentials over the whole vocabulary. Softmax minus one-hot, as in Wijmans et al.
    2024, https://arxiv.org/abs/2411.09009. ``entropy`` has the negative entropies, and the gradient of the entropies
    (positions, float32, each): -p · (log p + entropy) for each logit. Traceable by ``torch.compile``.
    """
    scaled = logits.to(torch.float32, copy=True).div_(temperature)
    share = (gradient / temperature)[:, None]
    inside = (targets >= 0) & (targets < logits.shape[-1])
    shifted = scaled.sub_(normalizer[:, None])
    if entropy is None:
        gradients = shifted.exp_().mul_(-share)
    else:
        negative, of_entropy = entropy
        factor = (shifted - negative[:, None]).mul_((of_entropy / temperature)[:, None]).add_(share)
        gradients = shifted.exp_().mul_(factor.neg_())
    return gradients.scatter_add_(1, targets.where(inside, 0)[:, None], share.where(inside[:, None], 0.0)).to(
        logits.dtype
    )


def _score_logits(
    logits: torch.Tensor, targets: torch.Tensor, temperature: float, *, entropy_gradient: bool
) -> torch.Tensor:
    distribution = (logits.float() / temperature).log_softmax(-1)
    logprobs = distribution.gather(1, targets[:, None])[:, 0]
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
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


GradientOf = Callable[[torch.Tensor, torch.Tensor, slice], tuple[torch.Tensor, torch.Tensor | None]]
"""Takes log-probabilities and entropies of a slice of the targets; returns the loss's gradients by them (float32).

The second is None if the loss does not need the entropy's gradient.
"""


@dataclass
class OutputScorer:
    """Computes log-probability and entropy of targets from hidden states, a chunk of positions at a time.

    At most ``chunk_logits`` logits exist at once, but at least those of one position. The backward pass computes the
    logits of a chunk again, unless :meth:`for_loss` got the gradients. An engine may replace ``forward`` and
    ``backward`` by compiled versions.
    """

    temperature: float = 1.0
    chunk_logits: int = 1 << 27
    shard: VocabularyShard | None = None
    forward: Callable[..., torch.Tensor] = score_chunk
    backward: Callable[..., torch.Tensor] = logit_gradients
    gradient_of: GradientOf | None = None
    entropy_gradient: bool = False

    @contextlib.contextmanager
    def for_loss(self, gradient_of: GradientOf | None, *, entropy_gradient: bool = False) -> Iterator[None]:
        """Compute scores inside the block for a loss; with ``entropy_gradient`` their entropies have a gradient, too.

        With ``gradient_of`` the gradients are computed with the scores: the logits of a chunk are there already. That
        saves one of four products with the weight, as in Hsu et al. 2024, https://arxiv.org/abs/2410.10989. The
        backward pass must get exactly these gradients. Ranks that share the vocabulary compute the logits again.
        """
        self.gradient_of, self.entropy_gradient = gradient_of, entropy_gradient
        try:
            yield
        finally:
            self.gradient_of, self.entropy_gradient = None, False

    def __call__(
        self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor
    ) -> torch.Tensor:
        """Return log-probability and entropy of ``targets`` (2 × positions, float32).

        ``hidden`` (positions × size), ``weight`` (vocabulary × size), ``bias`` (vocabulary or None), ``targets``
        (positions, int64). The entropy has a gradient only inside :meth:`for_loss` with ``entropy_gradient``. Under
        autocast the product is computed in autocast's dtype.
        """
        kind = hidden.device.type
        casts = torch.amp.is_autocast_available(kind)  # not on the meta device
        dtype = torch.get_autocast_dtype(kind) if casts and torch.is_autocast_enabled(kind) else weight.dtype
        bias = bias if bias is None else bias.to(dtype)
        with torch.autocast(kind, enabled=False) if casts else contextlib.nullcontext():
            inputs = (hidden.to(dtype), weight.to(dtype), bias, targets)
            scores: torch.Tensor = _Score.apply(*inputs, self)  # type: ignore[no-untyped-call] # torch's
        return scores

    def needed_nbytes(self, positions: int, vocabulary: int) -> int:
        """Return about how many bytes scoring allocates for ``positions``: a chunk's logits, a few times over."""
        return 16 * min(self.chunk_logits, positions * vocabulary)

    def of_logits(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return log-probability and entropy of ``targets`` from ``logits`` (positions × the whole vocabulary)."""
        score = functools.partial(_score_logits, entropy_gradient=self.entropy_gradient)
        parts = [logits[:0, :2].t().float()] + [  # connects the result to the graph if there are no positions
            checkpoint(score, logits[chunk], targets[chunk], self.temperature, use_reentrant=False)
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
    """The chunks' scores. Only the inputs or their gradients stay in memory for the backward pass."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: Any, bias: Any, targets: Any, scorer: OutputScorer) -> Any:
        if scorer.shard is not None:
            targets = targets - scorer.shard.first
        early = scorer.gradient_of if scorer.shard is None else None
        ctx.gradients = None if early is None else _Gradients(ctx.needs_input_grad, hidden, weight, bias)
        parts = [hidden.new_zeros(3, 0, dtype=torch.float32)]
        for chunk in scorer.chunks(len(hidden), len(weight)):
            logits = functional.linear(hidden[chunk], weight, bias)
            parts.append(scorer.forward(logits, targets[chunk], scorer.temperature))
            if early is not None:
                normalizer, chosen, negative = parts[-1]
                of_logprobs, of_entropy = early(chosen - normalizer, -negative, chunk)
                known = (normalizer, of_logprobs, None if of_entropy is None else (negative, of_entropy))
                ctx.gradients.add(chunk, scorer.backward(logits, targets[chunk], scorer.temperature, *known))
        normalizer, chosen, negative = _joined(torch.cat(parts, 1), scorer.shard)
        if early is None:
            ctx.save_for_backward(hidden, weight, bias, targets, normalizer, negative)
            ctx.scorer, ctx.entropy_gradient = scorer, scorer.entropy_gradient
        return torch.stack([chosen - normalizer, -negative])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        if ctx.gradients is not None:
            gradients, ctx.gradients = ctx.gradients.found, None  # so that autograd takes them without a copy
            return *gradients, None, None
        hidden, weight, bias, targets, normalizer, negative = ctx.saved_tensors
        scorer: OutputScorer = ctx.scorer
        gradients = _Gradients(ctx.needs_input_grad, hidden, weight, bias)
        for chunk in scorer.chunks(len(hidden), len(weight)):
            logits = functional.linear(hidden[chunk], weight, bias)
            of_entropy = (negative[chunk], gradient[1, chunk]) if ctx.entropy_gradient else None
            known = (normalizer[chunk], gradient[0, chunk], of_entropy)
            gradients.add(chunk, scorer.backward(logits, targets[chunk], scorer.temperature, *known))
        of_hidden, *others = gradients.found
        if of_hidden is not None and scorer.shard is not None:
            of_hidden = scorer.shard.add(of_hidden)
        return of_hidden, *others, None, None


class _Gradients:
    """The gradients of hidden states, weight and bias, each None if it is not needed; chunks of logits add to them."""

    def __init__(
        self, needed: Sequence[bool], hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> None:
        self._hidden, self._weight = hidden, weight
        wanted = zip((hidden, weight, bias), needed, strict=False)
        self.found = [None if each is None or not needs else torch.zeros_like(each) for each, needs in wanted]

    def add(self, chunk: slice, of_logits: torch.Tensor) -> None:
        of_hidden, of_weight, of_bias = self.found
        if of_hidden is not None:
            of_hidden[chunk] = of_logits @ self._weight
        if of_weight is not None:
            of_weight.addmm_(of_logits.t(), self._hidden[chunk])
        if of_bias is not None:
            of_bias += of_logits.sum(0)


def _joined(parts: torch.Tensor, shard: VocabularyShard | None) -> torch.Tensor:
    """Return :func:`score_chunk`'s result for the whole vocabulary, from the results for the ranks' parts."""
    if shard is None:
        return parts
    normalizers, chosen, negatives = shard.gather(parts).unbind(1)  # each ranks × positions
    normalizer = normalizers.logsumexp(0)
    shifted = normalizers - normalizer
    return torch.stack([normalizer, chosen.sum(0), (shifted.exp() * (negatives + shifted)).sum(0)])
