"""What a rollout engine is: the interface of the embedded engine and of plugins' engines."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hwrl.errors import UnsupportedError
from hwrl.interfaces.groups import Ints, Response
from hwrl.interfaces.lora import LoraSettings

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class RolloutSettings:
    """What every rollout engine is told.

    ``model_directory`` describes the model; its weights are not read, they come from the trainer, in ``dtype``. The
    tokens ``eos_ids`` end a response. At most ``max_running`` requests run at once, each of at most ``max_length``
    tokens, prompt and response together. ``seed`` is that of sampling, and ``temperature`` that of the requests to
    come, so that an engine can refuse it at once. With ``lora`` the weights come in two parts, a base and an adapter of
    that form. ``may_sleep`` says whether :meth:`RolloutEngine.sleep` will be called. The engine uses the first
    ``tensor_parallel`` devices that the process sees, and takes weights on the first.
    """

    model_directory: Path
    dtype: torch.dtype
    eos_ids: Sequence[int]
    max_running: int
    max_length: int
    seed: int = 0
    temperature: float = 1.0
    lora: LoraSettings | None = None
    may_sleep: bool = False
    tensor_parallel: int = 1


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


MEMORY_TAGS = frozenset({"weights", "kv_cache"})
"""What of an engine's device memory sleeps and wakes."""


class RolloutEngine(ABC):
    """Generates responses, step by step, so that weights can change between two tokens of a response.

    The caller's loop is ``submit``, ``step`` until nothing is pending, and ``load_weights`` between two steps at any
    time. Requests in flight go on with the new weights: each token carries the version that it came from. Not
    thread-safe: one thread owns the engine.

    An engine that was made with ``settings.lora`` gets its weights by :meth:`load_base`, once, and then
    :meth:`load_adapter`, version by version. Both attributes say what the engine really holds, whatever put it there.
    """

    version: int = -1
    """The version of the weights that the next token will come from; -1 while the model is not whole."""

    base: int | None = None
    """The identity of the base whose weights the model holds; None without, and always without ``settings.lora``."""

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

    def load_base(self, weights: Iterable[tuple[str, torch.Tensor]], *, base: int) -> None:
        """Copy the base that ``base`` identifies into the model; :attr:`version` is -1 until an adapter is loaded.

        Names and errors are those of :meth:`load_weights`. If it fails in the middle, :attr:`base` is None.
        """
        raise adapter_unsupported()

    def load_adapter(self, weights: Iterable[tuple[str, torch.Tensor]], *, version: int, base: int) -> None:
        """Copy ``weights``, a whole adapter, into the model; after it returns, ``version`` is served.

        Names are those of PEFT's checkpoints (``base_model.model.….lora_A.weight``); the form is ``settings.lora``. The
        tensors are read before it returns and not kept. EngineError, with the old version serving, if the model does
        not hold the ``base`` that the adapter was trained on, or if names or shapes are not those of the adapter.
        """
        raise adapter_unsupported()

    def sleep(self, *, level: int) -> int:
        """Free device memory, for others to use, and return how many bytes; nothing and 0 if any of it sleeps. Blocks.

        The attention cache is dropped. Level 1 keeps the weights in host memory, and :attr:`version` and :attr:`base`
        stay. Level 2 keeps none: they are -1 and None until weights are loaded again, after ``wake(["weights"])``.
        Raises EngineError if requests are pending, UnsupportedError if the engine cannot sleep.
        """
        raise _without_sleep()

    def wake(self, tags: Collection[str] = MEMORY_TAGS) -> None:
        """Take device memory again for ``tags``, of MEMORY_TAGS; nothing for those that are awake. Blocks.

        Weights are loaded only while "weights" is awake, and ``step`` needs both. UnsupportedError if the engine
        cannot sleep.
        """
        raise _without_sleep()

    def close(self) -> None:
        """Release what the engine holds."""
        self.abort()


def adapter_unsupported() -> UnsupportedError:
    """Return the error of an engine that has no adapter."""
    return UnsupportedError(
        "this engine serves no adapter",
        why="it was made without settings.lora, or knows no LoRA",
        fix="load_weights with the whole model; in a run, model.lora_rank=0",
    )


def _without_sleep() -> UnsupportedError:
    return UnsupportedError(
        "this engine cannot sleep",
        why="it has no way to give its device memory back",
        fix="in a run, set rollout.free_cache_engine=false",
    )
