"""The interface of a rollout engine: :class:`RolloutEngine` and its data."""

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
    """The settings of every rollout engine.

    ``model_directory`` has the model's configuration; the weights in it are not read, because the trainer sends them,
    in ``dtype``. The tokens ``eos_ids`` end a response. At most ``max_running`` requests run at once. A prompt and its
    response have at most ``max_length`` tokens. ``seed`` is for sampling. ``temperature`` is the one of later requests,
    so an engine can refuse it early. With ``lora`` the weights come in two parts, a base and an adapter. Only with
    ``may_sleep`` will :meth:`RolloutEngine.sleep` be called. The engine uses the first ``tensor_parallel`` devices of
    the process, and takes weights on the first.
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
    """How to generate. ``temperature`` 0 is greedy decoding, with the log-probabilities of temperature 1."""

    max_new_tokens: int
    temperature: float = 1.0


@dataclass(frozen=True)
class GenerationRequest:
    """One response to generate. The caller chooses ``request_id``, and gets it back with the response."""

    request_id: int
    prompt_ids: Ints
    sampling: Sampling


@dataclass(frozen=True)
class Completion:
    """A finished request."""

    request_id: int
    response: Response


MEMORY_TAGS = frozenset({"weights", "kv_cache"})
"""The parts of an engine's device memory: each can sleep and wake."""


class RolloutEngine(ABC):
    """Generates responses step by step, so weights can change between two tokens of a response.

    The caller's loop: ``submit``, then ``step`` until nothing is pending. ``load_weights`` may come between any two
    steps. Running requests continue with the new weights, and each token carries its version. Not thread-safe: one
    thread owns the engine.

    With ``settings.lora`` the engine gets its weights by :meth:`load_base`, once, and then by :meth:`load_adapter`,
    version by version. :attr:`version` and :attr:`base` always describe the weights in the engine.
    """

    version: int = -1
    """The weight version of the next token; -1 while the model is incomplete."""

    base: int | None = None
    """The identity of the base in the model; None without one, and always without ``settings.lora``."""

    @abstractmethod
    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue ``requests``. Does not block. Raises EngineError if a request can never be served."""

    @abstractmethod
    def step(self) -> list[Completion]:
        """Advance every running request by at least one token; return the finished ones. Blocks for one step."""

    @abstractmethod
    def pending(self) -> int:
        """Return the number of queued and running requests."""

    @abstractmethod
    def capacity(self) -> int:
        """Return the number of further requests that could start at once."""

    @abstractmethod
    def abort(self) -> int:
        """Drop every pending request; return their number."""

    @abstractmethod
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], *, version: int) -> None:
        """Copy ``weights`` (Hugging Face names) into the model; after it returns, ``version`` is served.

        The tensors are read before it returns and not kept. Unknown or missing names raise EngineError and leave
        the old version serving.
        """

    def load_base(self, weights: Iterable[tuple[str, torch.Tensor]], *, base: int) -> None:
        """Copy a base into the model; ``base`` is its identity. :attr:`version` is -1 until an adapter is loaded.

        Names and errors as in :meth:`load_weights`. After a failure in the middle :attr:`base` is None.
        """
        raise adapter_unsupported()

    def load_adapter(self, weights: Iterable[tuple[str, torch.Tensor]], *, version: int, base: int) -> None:
        """Copy ``weights``, a whole adapter, into the model; after it returns, ``version`` is served.

        Names are those of PEFT's checkpoints (``base_model.model.….lora_A.weight``), shapes follow ``settings.lora``.
        The tensors are read before it returns and not kept. Raises EngineError, and the old version stays, if names or
        shapes differ, or if the model does not hold ``base``, the adapter's base.
        """
        raise adapter_unsupported()

    def sleep(self, *, level: int) -> int:
        """Free device memory for other uses; return the freed bytes. Does nothing if a part sleeps already. Blocks.

        The attention cache is dropped. Level 1 keeps the weights in host memory, and :attr:`version` and :attr:`base`
        stay. Level 2 drops them: both are -1 and None until weights are loaded again, after ``wake(["weights"])``.
        Raises EngineError if requests are pending, UnsupportedError if the engine cannot sleep.
        """
        raise _without_sleep()

    def wake(self, tags: Collection[str] = MEMORY_TAGS) -> None:
        """Allocate device memory again for the sleeping parts among ``tags``, of MEMORY_TAGS. Blocks.

        Loading needs "weights" awake, ``step`` needs both. Raises UnsupportedError if the engine cannot sleep.
        """
        raise _without_sleep()

    def close(self) -> None:
        """Abort all requests and release the engine's resources."""
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
