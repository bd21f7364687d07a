"""The rows of a training step to measure, and the floating-point operations in it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hwrl.interfaces import Batch
    from hwrl_bench.models import ModelShape

_SIGMA, _SHORTEST = 0.8, 16


@dataclass(frozen=True)
class RaggedRows:
    """``rows`` rows with ``prompt`` tokens of prompt and a response of random length, ``mean`` tokens before clipping.

    A row has at most ``longest`` tokens. Lengths of responses are lognormal, as in practice: most are short.
    """

    rows: int
    mean: int = 1024
    longest: int = 4096
    prompt: int = 128

    def responses(self, seed: int = 0) -> list[int]:
        """Return the length of each response.

        >>> lengths = RaggedRows(128).responses()
        >>> sum(lengths) + 128 * 128, max(lengths)
        (148104, 3690)
        """
        import numpy as np

        # A lognormal distribution has mean exp(mu + sigma² / 2), and half of sigma² is 0.32.
        mu = math.log(self.mean) - _SIGMA**2 / 2
        lengths = np.random.default_rng(seed).lognormal(mu, _SIGMA, size=self.rows)
        return [int(length) for length in np.clip(lengths, _SHORTEST, self.longest - self.prompt)]


def even_rows(rows: RaggedRows, *, length: int, multiple: int) -> list[int]:
    """Return lengths of responses for rows of ``length`` tokens, as many as have at most the tokens of ``rows``.

    Their number is a multiple of ``multiple``, the rows in one pass, so that no pass is smaller than the others.
    """
    tokens = sum(rows.responses()) + rows.rows * rows.prompt
    return [length - rows.prompt] * max(multiple, tokens // length // multiple * multiple)


def random_batch(responses: Sequence[int], *, prompt: int, vocabulary: int, seed: int = 0) -> Batch:
    """Return padded rows of random tokens, with behaviour log-probabilities of a uniform policy."""
    import torch

    from hwrl.interfaces import Batch

    generator = torch.Generator().manual_seed(seed)
    width = prompt + max(responses)
    ends = torch.tensor(responses)[:, None] + prompt
    places = torch.arange(width)[None]
    mask = (places >= prompt) & (places < ends)
    tokens = torch.randint(3, vocabulary, (len(responses), width), generator=generator)
    tokens[places >= ends] = 0
    behaviour = torch.full(mask.shape, -math.log(vocabulary)) * mask
    return Batch(tokens, mask, behaviour, torch.randn(len(responses), generator=generator))


def step_flops(shape: ModelShape, responses: Sequence[int], *, prompt: int) -> float:
    """Return the floating-point operations of forward and backward passes over the rows, without recomputation.

    Six for each parameter of a layer and token; six for each weight of the output layer and response token; for
    causal attention, six for each layer, head, dimension of a head, and square of a row's length.
    """
    lengths = [prompt + response for response in responses]
    layers = 6 * shape.layer_parameters * sum(lengths)
    output = 6 * shape.hidden_size * shape.vocab_size * sum(responses)
    width = shape.num_hidden_layers * shape.num_attention_heads * shape.head_dim
    return float(layers + output + 6 * width * sum(length**2 for length in lengths))
