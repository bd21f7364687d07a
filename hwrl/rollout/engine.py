"""What a rollout engine is: the interface that the embedded engine and vLLM both fill."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from hwrl.errors import EngineError
from hwrl.rollout.groups import Ints, Response


@dataclass(frozen=True, kw_only=True)
class RolloutSettings:
    """What every rollout engine is told.

    ``model_directory`` describes the model; its weights are not read, they come from the trainer, in ``dtype``. The
    tokens ``eos_ids`` end a response. At most ``max_running`` requests run at once, each of at most ``max_length``
    tokens, prompt and response together. ``seed`` is that of sampling.
    """

    model_directory: Path
    dtype: torch.dtype
    eos_ids: Sequence[int]
    max_running: int
    max_length: int
    seed: int = 0


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


def require_fit(request: GenerationRequest, *, max_length: int) -> None:
    """Raise EngineError unless ``request`` has a prompt, and at most ``max_length`` tokens with its response."""
    wanted = len(request.prompt_ids) + request.sampling.max_new_tokens
    if not len(request.prompt_ids) or wanted > max_length:
        raise EngineError(
            f"request {request.request_id} does not fit the engine",
            why=f"its prompt has {len(request.prompt_ids)} tokens (at least 1 is needed) and its response may have "
            f"{request.sampling.max_new_tokens}; together at most {max_length} fit",
            fix="shorten the prompt, raise data.max_prompt_tokens or lower rollout.max_new_tokens",
        )


def require_weights(version: int, *, pending: int) -> None:
    """Raise EngineError if an engine that serves ``version`` has no weights for its ``pending`` requests."""
    if pending and version < 0:
        raise EngineError(
            f"{pending} requests are pending, but the engine has no weights",
            why="its model holds arbitrary values until the first weights arrive",
            fix="call load_weights before the first step",
        )


def require_same_model(own: Mapping[str, torch.Tensor], given: Mapping[str, torch.Tensor]) -> None:
    """Raise EngineError unless ``given`` holds every tensor of the state dict ``own``, tied ones once, and no other."""
    tied = {_place(tensor) for name, tensor in own.items() if name in given}
    missing = sorted(name for name, tensor in own.items() if name not in given and _place(tensor) not in tied)
    unknown = sorted(given.keys() - own.keys())
    reshaped = sorted(name for name in given.keys() & own.keys() if given[name].shape != own[name].shape)
    if missing or unknown or reshaped:
        raise EngineError(
            "the weights do not belong to this model",
            why=f"missing: {missing[:3]}, unknown: {unknown[:3]}, of another shape: {reshaped[:3]}",
            fix="send the weights of the same model, under their Hugging Face names",
        )


def _place(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset())  # a meta tensor has no address
