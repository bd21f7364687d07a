"""What a rollout engine is: the interface that the embedded engine and vLLM both fill."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from hwrl.rollout.groups import Ints, Response


@dataclass(frozen=True)
class Sampling:
    """How to generate. ``temperature`` 0 is greedy; then log-probabilities are those of temperature 1."""

    max_new_tokens: int
    temperature: float = 1.0


@dataclass(frozen=True)
class GenerationRequest:
    """One response to generate. ``request_id`` is the caller's and comes back with the response."""

    request_id: int
    prompt_ids: Ints
    sampling: Sampling


@dataclass(frozen=True)
class Completion:
    """A finished request."""

    request_id: int
    response: Response


class RolloutEngine(ABC):
    """Generates responses, step by step, so that weights can change between two tokens of a response.

    The caller's loop is ``submit``, ``step`` until nothing is pending, and ``load_weights`` between two steps at any
    time. Requests in flight go on with the new weights: each token carries the version that it came from. Not
    thread-safe: one thread owns the engine.
    """

    version: int = -1
    """The version of the weights that the next token will come from; -1 before the first ``load_weights``."""

    @abstractmethod
    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue ``requests``. Does not block; raises EngineError for one that can never be served."""

    @abstractmethod
    def step(self) -> list[Completion]:
        """Advance every running request by at least one token; return those that finished. Blocks for one step."""

    @abstractmethod
    def pending(self) -> int:
        """Return how many requests are queued or running."""

    @abstractmethod
    def capacity(self) -> int:
        """Return how many more requests would run at once, were they submitted now."""

    @abstractmethod
    def abort(self) -> int:
        """Drop every pending request; return how many they were."""

    @abstractmethod
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], *, version: int) -> None:
        """Copy ``weights`` (Hugging Face names) into the model; after it returns, ``version`` is served.

        The tensors are read before it returns and not kept. Unknown or missing names raise EngineError and leave
        the old version serving.
        """

    def close(self) -> None:
        """Release what the engine holds."""
        self.abort()
