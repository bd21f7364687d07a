"""The interface of rollout engines: :class:`RolloutEngine`, with its settings, requests and completions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hwrl.errors import UnsupportedError
from hwrl.interfaces.chat import ToolParser
from hwrl.interfaces.groups import Ints, Response
from hwrl.interfaces.lora import LoraSettings

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Sampling:
    """How to sample a response; ValueError for a value out of its range.

    Tokens come from the softmax of the logits, divided by ``temperature``. Three filters then drop tokens, in this
    order; each sees the renormalised result of the one before. ``min_p`` (0 to 1) drops tokens below this share of the
    largest probability. ``top_k`` keeps the ``top_k`` most probable tokens, and ties with the last of them; -1 keeps
    all. ``top_p`` (above 0, to 1) keeps the smallest set of most probable tokens with at least this total probability.
    A token's log-probability is the one in the filtered distribution. ``temperature`` is from 0.01 to 100; 0 is greedy,
    without filters, and its log-probabilities are those of temperature 1.

    The texts ``stop`` and the tokens ``stop_token_ids`` end a response, as the end tokens do, and stay in it. The
    response ends with the first token to complete a stop text; special tokens count with their text. ``seed`` (0 to
    2**63 - 1) makes the tokens depend on the prompt and the weights alone, not on other requests; None: the engine's
    seed.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={self.max_new_tokens} must be at least 1")
        if self.temperature != 0 and not 0.01 <= self.temperature <= 100:  # NaN, too
            raise ValueError(f"temperature={self.temperature} must be from 0.01 to 100, or 0, which is greedy")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must be above 0 and at most 1; 1 keeps all tokens")
        if not 1 <= self.top_k < 1 << 31 and self.top_k != -1:
            raise ValueError(f"top_k={self.top_k} must be a number of tokens below 2**31, or -1 for all")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p={self.min_p} must be from 0 to 1; 0 keeps all tokens")
        if isinstance(self.stop, str) or not all(self.stop):
            raise ValueError(f"stop={self.stop!r} must be a tuple of texts, none of them empty")
        if not all(0 <= token < 1 << 31 for token in self.stop_token_ids):
            raise ValueError(f"stop_token_ids={self.stop_token_ids} must be numbers from 0 to 2**31 - 1")
        if self.seed is not None and not 0 <= self.seed < 1 << 63:
            raise ValueError(f"seed={self.seed} must be from 0 to 2**63 - 1")

    @property
    def is_filtered(self) -> bool:
        """Whether a filter shapes the distribution."""
        return self.temperature != 0 and (self.top_p < 1 or self.top_k != -1 or self.min_p > 0)


@dataclass(frozen=True, kw_only=True)
class RolloutSettings:
    """The settings of every rollout engine.

    ``model_directory`` describes the model. The engine does not read its weights: they come from the trainer, in
    ``dtype``. The tokens ``eos_ids`` end a response. At most ``max_running`` requests run at once, each with at most
    ``max_length`` tokens of prompt and response. ``seed`` is for sampling. ``sampling`` announces the sampling of most
    requests, so an engine can refuse it at once. With ``lora`` the weights come in two parts: a base model, and an
    adapter of this form. ``free_cache_engine`` announces calls of :meth:`RolloutEngine.sleep`. The engine uses the
    process's first ``tensor_parallel`` devices, and takes weights on the first.
    """

    model_directory: Path
    dtype: torch.dtype
    eos_ids: Sequence[int]
    max_running: int
    max_length: int
    seed: int = 0
    sampling: Sampling = Sampling(1)
    lora: LoraSettings | None = None
    free_cache_engine: bool = False
    tensor_parallel: int = 1


@dataclass(frozen=True)
class GenerationRequest:
    """One response to generate. The caller chooses ``request_id``; it comes back with the response."""

    request_id: int
    prompt_ids: Ints
    sampling: Sampling


@dataclass(frozen=True)
class Completion:
    """A finished request."""

    request_id: int
    response: Response


@dataclass(frozen=True, kw_only=True)
class WeightOffer:
    """A proposed version of a weight link, for the receivers of an engine. Its transfer has begun.

    The link is called ``link``, in the store at the address ``store``; never log that, for it holds the store's key.
    ``proposal`` is the number of the proposal, and ``version`` its version. ``members`` are the receivers' numbers in
    the link; None for a receiver without a part in this proposal. ``timeout_s`` limits the wait for a stored version to
    be complete; ``limit_s`` limits the whole receive. With ``once`` the receivers free their memory for the link
    afterwards.
    """

    store: str = field(repr=False)
    link: str
    proposal: int
    version: int
    members: tuple[int | None, ...]
    timeout_s: float
    limit_s: float
    once: bool = False


MEMORY_TAGS = frozenset({"weights", "kv_cache"})
"""The parts of an engine's device memory, for :meth:`RolloutEngine.sleep` and :meth:`RolloutEngine.wake`."""


class RolloutEngine(ABC):
    """Generates responses step by step, so weights can change between two tokens of a response.

    The caller submits requests and calls ``step`` until none is pending; it may call ``load_weights`` between any two
    steps. Running requests continue with the new weights, and each token records its weight version. Not thread-safe:
    one thread owns the engine.

    With ``settings.lora``, the caller loads the base model once, with :meth:`load_base`, and then one adapter per
    version, with :meth:`load_adapter`. ``version`` and ``base`` always describe the weights in the model.
    """

    version: int = -1
    """The weight version of the next token; -1 while the model has no complete weights."""

    base: int | None = None
    """The identity of the loaded base model; None before :meth:`load_base`, and always without ``settings.lora``."""

    receivers: int = 0
    """How many receivers of weights the engine has, one for each worker; 0: the caller receives versions for it."""

    @abstractmethod
    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue ``requests``. Does not block; raises EngineError for a request that can never run."""

    @abstractmethod
    def step(self) -> list[Completion]:
        """Return the requests that finished since the last call. Blocks until a running request has a new token.

        Call it in a loop: an engine may work between the calls, but need not. Without a pending request it returns at
        once. While requests are pending, a run counts each return as progress; a replica without progress is hung.
        """

    @abstractmethod
    def pending(self) -> int:
        """Return the number of requests that :meth:`step` has not returned yet."""

    @abstractmethod
    def capacity(self) -> int:
        """Return the number of further requests to start at once; 0 or less if requests already wait."""

    @abstractmethod
    def abort(self) -> int:
        """Drop every pending request; return their number."""

    @abstractmethod
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], *, version: int) -> None:
        """Copy ``weights`` (Hugging Face names) into the model; later tokens come from ``version``.

        Reads the tensors before it returns, and keeps none. Unknown or missing names raise EngineError, and the old
        version stays.
        """

    def check_weights(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Raise EngineError unless ``tensors``, on the meta device, are those of a whole model for this engine."""
        raise _without_receivers()

    def receive_weights(self, offer: WeightOffer) -> int | None:
        """Receive ``offer`` straight into the model's weights, with all :attr:`receivers`. Blocks until it is decided.

        The version before is lost at the call: :attr:`version` is -1, and with ``settings.lora`` :attr:`base` is None.
        When all receivers hold one version, later tokens come from it; with ``settings.lora`` it is the new base.
        Returns the number of the proposal in the engine now: the offered one or, with stored versions, perhaps an
        earlier one. Returns None if the transfer did not commit, or if another offer must complete the version; then
        the engine has no version. The caller has checked the tensors with :meth:`check_weights`. Raises EngineError if
        the engine itself failed.
        """
        raise _without_receivers()

    def load_base(self, weights: Iterable[tuple[str, torch.Tensor]], *, base: int) -> None:
        """Copy the base model with identity ``base`` into the model. :attr:`version` is -1 until :meth:`load_adapter`.

        Names and errors are as in :meth:`load_weights`. After an error in the middle, :attr:`base` is None.
        """
        raise adapter_unsupported()

    def load_adapter(self, weights: Iterable[tuple[str, torch.Tensor]], *, version: int, base: int) -> None:
        """Copy ``weights``, a whole adapter, into the model; later tokens come from ``version``.

        Names are as in PEFT's checkpoints (``base_model.model.….lora_A.weight``); the form is ``settings.lora``. Reads
        the tensors before it returns, and keeps none. Raises EngineError, and the old version stays, if the model does
        not hold ``base``, the adapter's base model, or if names or shapes do not fit the adapter.
        """
        raise adapter_unsupported()

    def sleep(self, *, level: int) -> int:
        """Free device memory for other users, and return the freed bytes; 0 if any part sleeps already. Blocks.

        Drops the attention cache. Level 1 keeps the weights in host memory; :attr:`version` and :attr:`base` stay.
        Level 2 drops the weights; :attr:`version` is -1 and :attr:`base` None until the caller loads weights again,
        after ``wake(["weights"])``. Raises EngineError if requests are pending or ``level`` is another number,
        UnsupportedError if the engine cannot sleep.
        """
        raise _without_sleep()

    def wake(self, tags: Collection[str] = MEMORY_TAGS) -> None:
        """Allocate device memory again for ``tags``, of MEMORY_TAGS; skip parts that are awake. Blocks.

        Loading weights needs "weights" awake, and ``step`` needs both tags. Raises EngineError for other tags,
        UnsupportedError if the engine cannot sleep.
        """
        raise _without_sleep()

    def tool_parser(self, name: str, *, tokenizer: Any) -> ToolParser:
        """Return the engine's own parser of tool calls with this ``name``; ``tokenizer`` is the model's.

        Raises UnsupportedError if it has none of that name.
        """
        raise UnsupportedError(
            f"this engine has no parser of tool calls with the name {name!r}",
            why="it has no parsers",
            fix="in a run, set rollout.tool_parser=hermes, the built-in one",
        )

    def close(self) -> None:
        """Release the engine's resources."""
        self.abort()


def adapter_unsupported() -> UnsupportedError:
    """Return the error of an engine that has no adapter."""
    return UnsupportedError(
        "this engine serves no adapter",
        why="it was made without settings.lora, or knows no LoRA",
        fix="load_weights with the whole model; in a run, model.lora_rank=0",
    )


def _without_receivers() -> UnsupportedError:
    return UnsupportedError(
        "this engine does not receive weights",
        why="it has no receivers",
        fix="receive whole versions, and load_weights; in a run, weights.keep_old_version=true",
    )


def _without_sleep() -> UnsupportedError:
    return UnsupportedError(
        "this engine cannot sleep",
        why="it has no way to give its device memory back",
        fix="in a run, set rollout.free_cache_engine=false",
    )
