"""What a train engine is: the interface of the FSDP2 engine and of plugins' engines."""

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
    """What every train engine is told.

    ``total_steps`` shapes the learning-rate schedule: linear warm-up over ``warmup_steps``, then linear decay to
    ``min_learning_rate_ratio``. A step is split into parts of at most ``micro_batch_tokens`` padded tokens.
    ``temperature`` is that of sampling, and so of the policy. Parameters and optimizer state are float32; ``dtype`` is
    what forward and backward passes compute in, and the dtype of the weights that leave the engine. With ``lora``
    the model is the frozen base of an adapter, which alone is trained; its first values depend on ``seed``. With
    ``param_offload`` and ``optimizer_offload`` parameters and optimizer state live in host memory, but for
    :meth:`TrainEngine.on_device`. With ``activation_checkpointing`` a layer keeps nothing but its inputs for the
    backward pass, and is computed twice.
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
    """The identity of the frozen base under the adapter that is trained; None if the whole model is trained."""

    @property
    def data_parallel_rank(self) -> int:
        """Which share of a batch this rank trains on. Ranks that hold parts of one copy of the model have the same."""
        return 0

    @property
    def data_parallel_size(self) -> int:
        """Into how many shares a batch is divided."""
        return 1

    @abstractmethod
    def on_device(self, *, optimizer: bool) -> AbstractContextManager[Moved]:
        """Have parameters (and the ``optimizer``'s state) on the device inside; offload again what was, errors or not.

        Nothing moves for an engine that offloads nothing, nor for what is there already. The context's value tells
        what moved; its ``offload`` after the end.
        """

    @abstractmethod
    def train_batch(self, batch: Batch, *, loss: TokenLoss) -> dict[str, float]:
        """Take one optimizer step on ``batch`` (this rank's rows); return figures averaged over all ranks' tokens.

        Raises EngineError, on all ranks and with the weights as they were, if the gradients are not finite.
        """

    @abstractmethod
    def logprobs(self, batch: Batch) -> torch.Tensor:
        """Return the current policy's log-probability of each token (rows × length, float32; 0 off the mask)."""

    @abstractmethod
    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every parameter and persistent buffer whole, under its Hugging Face name, on the first rank.

        With an adapter, those of the base, which never change.

        All ranks must exhaust it, since gathering is collective; the others yield nothing. A tensor that was yielded
        is the reader's to drop; it may be the engine's own memory, so that nothing is changed in the engine while the
        reader still needs it.
        """

    @abstractmethod
    def weights_metadata(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what :meth:`named_weights` yields, as tensors on the meta device; not collective."""

    def named_adapter(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the adapter's parameters like :meth:`named_weights`, under the names of PEFT's checkpoints."""
        yield from ()

    def adapter_metadata(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what :meth:`named_adapter` yields, as tensors on the meta device; not collective."""
        yield from ()

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return model, optimizer and the place in the schedule, for :class:`~hwrl.checkpoint.CheckpointManager`.

        With an adapter, the adapter alone.
        """

    @contextmanager
    def saved_state(self) -> Iterator[tuple[dict[str, Any], OffloadedState | None]]:
        """Give :meth:`state_dict` to be saved inside, and the offloader that has what is offloaded of it, if any."""
        with self.on_device(optimizer=True):
            yield self.state_dict(), None

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned, but for the optimizer's settings, which are this run's."""

    @abstractmethod
    def export(self, directory: Path) -> None:
        """Write the model to ``directory`` so that ``from_pretrained`` loads it; the first rank writes.

        An adapter is written alone, for ``PeftModel.from_pretrained``.
        """

    def close(self) -> None:  # noqa: B027 - most engines start nothing
        """End what the engine started beside itself, such as process groups; the engine is not used afterwards."""
