"""The interface of train engines: :class:`TrainEngine`, with its :class:`EngineSettings`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hwrl.errors import ConfigError
from hwrl.interfaces.batch import Batch
from hwrl.interfaces.lora import LoraSettings
from hwrl.interfaces.losses import TokenLoss
from hwrl.interfaces.memory import Moved, OffloadedState

if TYPE_CHECKING:
    import torch


def _float32() -> torch.dtype:
    import torch

    return torch.float32


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """The settings of every train engine.

    ``total_steps`` shapes the learning-rate schedule: linear warm-up over ``warmup_steps``, then linear decay to
    ``min_learning_rate_ratio``. A micro-batch has at most ``micro_batch_tokens`` tokens. ``temperature`` is the
    sampling temperature, and so part of the policy. Parameters and optimizer state are float32; ``dtype`` is the dtype
    of forward and backward passes, and of published weights. With ``lora`` the engine freezes the model and trains an
    adapter on it; the adapter's initial values depend on ``seed``. ``context_parallel`` ranks share each micro-batch.
    With ``param_offload`` and ``optimizer_offload``, parameters and optimizer state are in host memory outside
    :meth:`TrainEngine.on_device`. With ``activation_checkpointing`` a layer keeps only its inputs for the backward
    pass, and runs forward twice; ``auto`` does this for as many layers as needed to fit the device's memory.
    ``compile`` compiles the layers; ``auto`` does this if it is faster on the device. With ``fused_kernels``, layers
    without compilation use the backend's fused operations. ``shard_ranks`` is the number of ranks with one sharded copy
    of the model (FSDP2 engine); None: all. With ``host_step`` parameters, gradients and optimizer state live in host
    memory, and the optimizer steps there. No row has more than ``max_length`` tokens (None: what the model's
    configuration names).
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
    activation_checkpointing: Literal["auto"] | bool = "auto"
    compile: Literal["auto"] | bool = "auto"
    fused_kernels: bool = True
    shard_ranks: int | None = None
    host_step: bool = False
    lora: LoraSettings | None = None
    seed: int = 0
    context_parallel: int = 1
    max_length: int | None = None

    def learning_rate_at(self, step: int) -> float:
        """Return the learning rate of optimizer step ``step``, counted from 0."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        decay = max(1, self.total_steps - self.warmup_steps)
        lost = (1 - self.min_learning_rate_ratio) * (step - self.warmup_steps) / decay
        return self.learning_rate * max(self.min_learning_rate_ratio, 1 - lost)


class TrainEngine(ABC):
    """Holds the training model and its optimizer, on one rank or several.

    On several ranks every method is collective: all ranks call it, in the same order, each with its share of the rows.
    """

    base: int | None = None
    """The identity of the frozen base model under the adapter; None if the engine trains the whole model."""
    updates: int | None = None
    """The number of updates of the weights that have begun; None if the engine does not count them.

    After an error in :meth:`train_batch`, hwrl saves the finished steps only if no update had begun.
    """

    @property
    def data_parallel_rank(self) -> int:
        """The index of this rank's share of a batch. Ranks that share one have the same index."""
        return 0

    @property
    def data_parallel_size(self) -> int:
        """The number of shares of a batch."""
        return 1

    @abstractmethod
    def on_device(self, *, optimizer: bool) -> AbstractContextManager[Moved]:
        """Load parameters (with ``optimizer``, its state, too) to the device for the block; offload again at its end.

        It offloads after an error, too. A part on the device before the block stays there. The context's value reports
        the transfers; its ``offload`` is complete after the block.
        """

    @abstractmethod
    def train_batch(self, batch: Batch, *, loss: TokenLoss) -> dict[str, float]:
        """Take one optimizer step on ``batch`` (this rank's rows); return metrics averaged over all ranks' tokens.

        The loss is the same average, of each token's loss times its row's weight.

        Raises NonFiniteGradientError on all ranks, with unchanged weights, optimizer state and schedule, if the
        gradients are not finite.
        """

    @abstractmethod
    def logprobs(self, batch: Batch) -> torch.Tensor:
        """Return the policy's log-probability of each token (rows × length, float32; 0 where the mask is false)."""

    def reference_logprobs(self, batch: Batch) -> torch.Tensor:
        """Return the reference model's log-probability of each token, like :meth:`logprobs`.

        The reference is the model at the start of training; it never changes. Raises ConfigError if the engine has
        none.
        """
        raise ConfigError(
            f"{type(self).__name__} has no reference model",
            why="it implements no reference_logprobs, or was built without a reference",
            fix="set algorithm.kl_coeff=0 and a loss without needs_reference, or train.engine=fsdp",
        )

    @abstractmethod
    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every parameter and persistent buffer, under the names and in the parts of the model's files.

        With an adapter, yield the base model's; they never change.

        Gathering is collective: all ranks must exhaust the iterator. A tensor is whole on the ranks that send it, by
        default on the first rank; the other ranks do not yield it. The reader may drop a tensor at any time. The tensor
        may share the engine's memory, so the engine must not change until the reader has dropped it.
        """

    @abstractmethod
    def weights_metadata(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of :meth:`named_weights` on the meta device; not collective."""

    def named_adapter(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the adapter's parameters like :meth:`named_weights`, under the names in PEFT's checkpoints."""
        yield from ()

    def adapter_metadata(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of :meth:`named_adapter` on the meta device; not collective."""
        yield from ()

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return model, optimizer and schedule position, for :class:`~hwrl.checkpoint.CheckpointManager`.

        With an adapter, the model's part is the adapter alone.
        """

    @contextmanager
    def saved_state(self) -> Iterator[tuple[dict[str, Any], OffloadedState | None]]:
        """Yield :meth:`state_dict` to save inside the block, and the owner of its offloaded part, or None."""
        with self.on_device(optimizer=True):
            yield self.state_dict(), None

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a :meth:`state_dict`. The optimizer's settings stay those of this run."""

    @abstractmethod
    def export(self, directory: Path) -> None:
        """Write the model to ``directory`` for ``from_pretrained``; the first rank writes.

        An adapter is written alone, for ``PeftModel.from_pretrained``.
        """

    def close(self) -> None:  # noqa: B027 - most engines start nothing
        """End process groups and other things started by the engine. The engine is unusable afterwards."""
