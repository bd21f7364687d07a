"""The rows of a training step to measure, and the floating-point operations in it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hwrl.errors import ConfigError

if TYPE_CHECKING:
    from hwrl.interfaces import Batch
    from hwrl_bench.models import ModelShape

_SIGMA, _SHORTEST = 0.8, 16


@dataclass(frozen=True)
class RaggedRows:
    """``rows`` rows of a prompt and a response. Each prompt has ``prompt`` tokens.

    The lengths of the responses are random and lognormal, as in practice: most are short. Their mean is ``mean``. Then
    they are clipped to 16 tokens or more, and to ``longest`` tokens of a row or fewer. Raises ConfigError if such a row
    has no room for a response.
    """

    rows: int
    mean: int = 1024
    longest: int = 4096
    prompt: int = 128

    def __post_init__(self) -> None:
        if self.longest <= self.prompt:
            raise ConfigError(
                f"rows of at most {self.longest} tokens have no response",
                why=f"the prompt has {self.prompt} tokens",
                fix=f"use --longest {self.prompt + _SHORTEST} or more",
            )

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
    """Return the lengths of the responses in rows of ``length`` tokens; together at most the tokens of ``rows``.

    Their number is a multiple of ``multiple``, the rows in one pass, and at least one pass: all passes are full.
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
