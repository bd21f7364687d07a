"""The output layer's scores: right, with right gradients, and never all logits at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hwrl.train import OutputScorer, VocabularyShard
from tests.support.near import assert_near

POSITIONS, SIZE, VOCABULARY = 60, 24, 512


def inputs(*, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(POSITIONS, SIZE, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(VOCABULARY, SIZE, generator=generator).to(dtype).requires_grad_()
    bias = torch.randn(VOCABULARY, generator=generator).to(dtype).requires_grad_()
    return hidden, weight, bias, torch.randint(0, VOCABULARY, (POSITIONS,), generator=generator)


def plain(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor) -> torch.Tensor:
    distribution = (torch.nn.functional.linear(hidden, weight, bias).float() / 0.7).log_softmax(-1)
    logprobs = distribution.gather(1, targets[:, None])[:, 0]
    return torch.stack([logprobs, -(distribution.exp() * distribution).sum(-1).detach()])


def with_gradients(score: Any, *tensors: torch.Tensor | None, of_entropy: float = 0.0) -> list[torch.Tensor]:
    scores = score(*tensors)
    weights = torch.linspace(-1, 1, POSITIONS)
    leaves = [tensor for tensor in tensors if tensor is not None and tensor.requires_grad]
    total = (scores[0] * weights).sum() + of_entropy * scores[1].sum()
    return [scores.detach(), *torch.autograd.grad(total, leaves)]


@pytest.mark.parametrize("chunk", [1, 7 * VOCABULARY, 1 << 27])
@pytest.mark.parametrize("biased", [True, False])
def test_scores_and_gradients_are_those_of_the_formula(chunk: int, biased: bool) -> None:
    hidden, weight, bias, targets = inputs()
    tensors = (hidden, weight, bias if biased else None, targets)
    wanted = with_gradients(plain, *tensors)
    for one, other in zip(with_gradients(OutputScorer(0.7, chunk), *tensors), wanted, strict=True):
        assert_near(one, other)


@pytest.mark.parametrize("chunk", [1, 7 * VOCABULARY, 1 << 27])
def test_gradients_that_are_known_with_the_scores_are_those_of_the_formula(chunk: int) -> None:
    tensors, scorer = inputs(), OutputScorer(0.7, chunk)
    weights = torch.linspace(-1, 1, POSITIONS)

    def of_squares(logprobs: torch.Tensor, _: torch.Tensor, targets: slice) -> tuple[torch.Tensor, None]:
        return 2 * logprobs * weights[targets], None

    def gradients(score: Any) -> list[torch.Tensor]:
        logprobs = score(*tensors)[0]
        return [logprobs.detach(), *torch.autograd.grad((logprobs.square() * weights).sum(), tensors[:3])]

    with scorer.for_loss(of_squares):
        found = gradients(scorer)
    for one, other in zip(found, gradients(plain), strict=True):
        torch.testing.assert_close(one, other, atol=3e-4, rtol=1e-4)


def with_entropy(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> list[torch.Tensor]:
    """Return the gradients of squared scores, weighted, through autograd's own operations."""
    distribution = ((hidden @ weight.t()) / 0.7).log_softmax(-1)
    logprobs = distribution.gather(1, targets[:, None])[:, 0]
    entropy = -(distribution.exp() * distribution).sum(-1)
    weights = torch.linspace(-1, 1, POSITIONS)
    return list(torch.autograd.grad((weights * (logprobs.square() + 3 * entropy.square())).sum(), (hidden, weight)))


@pytest.mark.parametrize("way", ["known", "later", "of_logits"])
@pytest.mark.parametrize("chunk", [7 * VOCABULARY, 1 << 27])
def test_the_entropy_has_a_gradient_if_it_is_asked_for(chunk: int, way: str) -> None:
    hidden, weight, _, targets = inputs()
    scorer, weights = OutputScorer(0.7, chunk), torch.linspace(-1, 1, POSITIONS)

    def known(logprobs: torch.Tensor, entropy: torch.Tensor, chosen: slice) -> tuple[torch.Tensor, torch.Tensor]:
        return 2 * logprobs * weights[chosen], 6 * entropy * weights[chosen]

    with scorer.for_loss(known if way == "known" else None, entropy_gradient=True):
        if way == "of_logits":
            scores = scorer.of_logits(hidden @ weight.t(), targets)
        else:
            scores = scorer(hidden, weight, None, targets)
    found = torch.autograd.grad((weights * (scores[0].square() + 3 * scores[1].square())).sum(), (hidden, weight))
    for one, other in zip(found, with_entropy(hidden, weight, targets), strict=True):
        torch.testing.assert_close(one, other, atol=1e-3, rtol=1e-4)


def test_logits_that_a_model_computed_have_the_same_scores() -> None:
    hidden, weight, bias, targets = inputs()

    def score(hidden: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        logits = torch.nn.functional.linear(hidden, weight, bias)
        return OutputScorer(0.7, 7 * VOCABULARY).of_logits(logits, targets)

    wanted = with_gradients(plain, hidden, weight, bias, targets)
    for one, other in zip(with_gradients(score, hidden, weight, bias, targets), wanted, strict=True):
        assert_near(one, other)


def test_bfloat16_is_multiplied_in_bfloat16_and_scored_in_float32() -> None:
    tensors = inputs(dtype=torch.bfloat16)
    scores, *gradients = with_gradients(OutputScorer(0.7, 7 * VOCABULARY), *tensors)
    wanted, *wanted_gradients = with_gradients(plain, *tensors)
    assert_near(scores, wanted)
    for one, other in zip(gradients, wanted_gradients, strict=True):
        assert one.dtype == torch.bfloat16
        assert (one - other).norm() < 0.02 * other.norm()


def test_autocast_gives_its_dtype_to_the_product_and_the_parameters_keep_theirs() -> None:
    hidden, weight, bias, targets = inputs()
    with torch.autocast("cpu", torch.bfloat16):
        _, *gradients = with_gradients(OutputScorer(0.7), hidden, weight, bias, targets)
        scores = OutputScorer(0.7)(hidden, weight, bias, targets)
    assert {gradient.dtype for gradient in gradients} == {torch.float32}
    wanted = plain(hidden.bfloat16(), weight.bfloat16(), bias.bfloat16(), targets)
    assert_near(scores, wanted)


def test_no_position_has_no_score_and_a_gradient_of_zero() -> None:
    hidden, weight, _, targets = inputs()
    scores = OutputScorer()(hidden[:0], weight, None, targets[:0])
    assert scores.shape == (2, 0)
    (gradient,) = torch.autograd.grad(scores.sum(), weight)
    assert not gradient.any()
    scores = OutputScorer().of_logits((hidden @ weight.t())[:0], targets[:0])
    assert scores.shape == (2, 0)
    (gradient,) = torch.autograd.grad(scores.sum(), weight)
    assert not gradient.any()


class Largest(TorchDispatchMode):
    """Notes the number of elements of the largest tensor that any operation makes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch's
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(made) if isinstance(leaf, torch.Tensor)]
        self.elements = max([self.elements, *sizes])
        return made


def test_no_tensor_is_larger_than_a_chunk_or_the_weight() -> None:
    tensors = inputs()
    with Largest() as largest:
        with_gradients(plain, *tensors)
    assert largest.elements == POSITIONS * VOCABULARY
    chunk = 30 * VOCABULARY
    with Largest() as largest:
        with_gradients(OutputScorer(0.7, chunk), *tensors)
    assert largest.elements == max(chunk, SIZE * VOCABULARY)


@pytest.mark.parametrize("of_entropy", [0.0, 2.0])
def test_shards_of_the_vocabulary_give_the_scores_and_gradients_of_the_whole(of_entropy: float) -> None:
    """Two shards in one process: what a rank would gather is computed here for both."""
    hidden, weight, _, targets = inputs()
    whole = OutputScorer(0.7)
    with whole.for_loss(None, entropy_gradient=bool(of_entropy)):
        wanted = with_gradients(whole, hidden, weight, None, targets, of_entropy=of_entropy)
    half, atol = VOCABULARY // 2, 1e-5 * (1 + 4 * of_entropy)  # the entropy's gradients are larger
    parts = [
        OutputScorer(0.7).forward((hidden @ part.t()).detach(), targets - first, 0.7)
        for first, part in ((0, weight[:half]), (half, weight[half:]))
    ]
    added: list[torch.Tensor] = []

    def add(part: torch.Tensor) -> torch.Tensor:
        added.append(part)
        return part

    for rank in range(2):
        shard = VocabularyShard(rank * half, lambda _: torch.stack(parts), add)
        mine = weight.detach()[rank * half : (rank + 1) * half].requires_grad_()
        scorer = OutputScorer(0.7, 7 * half, shard)
        with scorer.for_loss(None, entropy_gradient=bool(of_entropy)):
            scores, _, of_weight = with_gradients(scorer, hidden, mine, None, targets, of_entropy=of_entropy)
        assert_near(scores, wanted[0])
        of_its_part = wanted[2][rank * half : (rank + 1) * half]
        torch.testing.assert_close(of_weight, of_its_part, atol=atol, rtol=1e-5)
    torch.testing.assert_close(added[0] + added[1], wanted[1], atol=atol, rtol=1e-5)
