"""The interface of a train engine: :class:`TrainEngine` and its settings."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from hwrl.interfaces.batch import Batch
from hwrl.interfaces.lora import LoraSettings
from hwrl.interfaces.memory import Moved, OffloadedState

if TYPE_CHECKING:
    import torch


class TokenLoss(Protocol):
    """A policy loss, token by token; :class:`~hwrl.train.PolicyLoss` is one."""

    def __call__(
        self,
        logprobs: torch.Tensor,
        *,
        behaviour: torch.Tensor,
        proximal: torch.Tensor | None,
        advantages: torch.Tensor,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the loss of each token, and metrics of each token (detached), all of ``logprobs``'s shape.

        ``logprobs`` carries the gradient. ``behaviour`` and ``proximal`` are constants of the same shape;
        ``advantages`` broadcasts to it.
        """


def _float32() -> torch.dtype:
    import torch

    return torch.float32


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """The settings of every train engine.

    ``total_steps`` shapes the learning-rate schedule: linear warm-up over ``warmup_steps``, then linear decay to
    ``min_learning_rate_ratio``. A step is split into micro-batches of at most ``micro_batch_tokens`` padded tokens.
    ``temperature`` is the one of sampling, and so of the policy. Parameters and optimizer state are float32. Forward
    and backward passes compute in ``dtype``, and weights leave the engine in it. With ``lora`` only an adapter is
    trained, on a frozen base; its first values depend on ``seed``. With ``param_offload`` and ``optimizer_offload``
    parameters and optimizer state are in host memory outside of :meth:`TrainEngine.on_device`. With
    ``activation_checkpointing`` a layer keeps only its inputs for the backward pass, and is computed twice.
    """

    model_directory: Path
    learning_rate: float
    total_steps: int
    warmup_steps: int = 0
    min_learning_rate_ratio: float = 1.0
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    micro_batch_tokens: int = 16384
    temperature: float = 1.0
    dtype: torch.dtype = field(default_factory=_float32)
    param_offload: bool = False
    optimizer_offload: bool = False
    activation_checkpointing: bool = False
    lora: LoraSettings | None = None
    seed: int = 0

    def learning_rate_at(self, step: int) -> float:
        """Return the learning rate of optimizer step ``step``, counted from 0."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        decay = max(1, self.total_steps - self.warmup_steps)
        lost = (1 - self.min_learning_rate_ratio) * (step - self.warmup_steps) / decay
        return self.learning_rate * max(self.min_learning_rate_ratio, 1 - lost)


class TrainEngine(ABC):
    """Holds the training model and its optimizer, on one rank or several.

    On several ranks every method is collective: all ranks call it, in the same order, each with the rows of its share.
    """

    base: int | None = None
    """The identity of the adapter's frozen base; None if the whole model is trained."""

    @property
    def data_parallel_rank(self) -> int:
        """The number of this rank's share of a batch. Ranks with parts of one copy of the model have the same share."""
        return 0

    @property
    def data_parallel_size(self) -> int:
        """The number of shares of a batch."""
        return 1

    @abstractmethod
    def on_device(self, *, optimizer: bool) -> AbstractContextManager[Moved]:
        """Keep parameters (and the ``optimizer``'s state) on the device inside the context.

        On exit, also by an error, whatever was offloaded before is offloaded again. Nothing moves if it is on the
        device already. The context's value counts the transfers; its ``offload`` is filled on exit.
        """

    @abstractmethod
    def train_batch(self, batch: Batch, *, loss: TokenLoss) -> dict[str, float]:
        """Take one optimizer step on ``batch`` (this rank's rows); return metrics averaged over all ranks' tokens.

        Raises EngineError on all ranks, and changes no weights, if the gradients are not finite.
        """

    @abstractmethod
    def logprobs(self, batch: Batch) -> torch.Tensor:
        """Return the current policy's log-probability of each token (rows × length, float32; 0 off the mask)."""

    @abstractmethod
    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every parameter and persistent buffer whole, under its Hugging Face name, on the first rank.

        With an adapter these are the tensors of the base, and never change. Gathering is collective: all ranks must
        exhaust the iterator, and the others yield nothing. A yielded tensor may be the engine's own memory: do not
        change the engine while the reader needs it.
        """

    @abstractmethod
    def weights_metadata(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of :meth:`named_weights` on the meta device; not collective."""

    def named_adapter(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the adapter's parameters like :meth:`named_weights`, under the names of PEFT's checkpoints."""
        yield from ()

    def adapter_metadata(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of :meth:`named_adapter` on the meta device; not collective."""
        yield from ()

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return model, optimizer and schedule position, for :class:`~hwrl.checkpoint.CheckpointManager`.

        With an adapter the base is left out.
        """

    @contextmanager
    def saved_state(self) -> Iterator[tuple[dict[str, Any], OffloadedState | None]]:
        """Yield :meth:`state_dict` for a save inside the context, and the offloader of its tensors, if any."""
        with self.on_device(optimizer=True):
            yield self.state_dict(), None

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a :meth:`state_dict`. The optimizer's settings stay those of this run."""

    @abstractmethod
    def export(self, directory: Path) -> None:
        """Write the model to ``directory``, for transformers' ``from_pretrained``; the first rank writes.

        An adapter is written without its base, for ``PeftModel.from_pretrained``.
        """

    def close(self) -> None:  # noqa: B027 - most engines start nothing
        """End process groups and other things that the engine started; do not use the engine afterwards."""
