"""What a train engine is: the interface that the FSDP2 engine and Megatron-core both fill."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch

from hwrl.memory import Moved, Offloader
from hwrl.train.batch import Batch
from hwrl.train.losses import PolicyLoss


class TrainEngine(ABC):
    """Holds the training model and its optimizer, on one rank or several.

    On several ranks every method is collective: all ranks call it, in the same order, each with its own rows.
    """

    @abstractmethod
    def on_device(self, *, optimizer: bool) -> AbstractContextManager[Moved]:
        """Have parameters (and the ``optimizer``'s state) on the device inside; offload again what was, errors or not.

        Nothing moves for an engine that offloads nothing, nor for what is there already. The context's value tells
        what moved; its ``offload`` after the end.
        """

    @abstractmethod
    def train_batch(self, batch: Batch, *, loss: PolicyLoss) -> dict[str, float]:
        """Take one optimizer step on ``batch`` (this rank's rows); return figures averaged over all ranks' tokens.

        Raises EngineError, on all ranks and with the weights as they were, if the gradients are not finite.
        """

    @abstractmethod
    def logprobs(self, batch: Batch) -> torch.Tensor:
        """Return the current policy's log-probability of each token (rows × length, float32; 0 off the mask)."""

    @abstractmethod
    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every parameter and persistent buffer whole, under its Hugging Face name, on the first rank.

        All ranks must exhaust it, since gathering is collective; the others yield nothing. A tensor that was yielded
        is the reader's to drop; it may be the engine's own memory, so that nothing is changed in the engine while the
        reader still needs it.
        """

    @abstractmethod
    def weights_metadata(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what :meth:`named_weights` yields, as tensors on the meta device; not collective."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return model, optimizer and scheduler as a state dict for :class:`~hwrl.checkpoint.CheckpointManager`."""

    @contextmanager
    def saved_state(self) -> Iterator[tuple[dict[str, Any], Offloader | None]]:
        """Give :meth:`state_dict` to be saved inside, and the offloader that has what is offloaded of it, if any."""
        with self.on_device(optimizer=True):
            yield self.state_dict(), None

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned, but for the optimizer's settings, which are this run's."""

    @abstractmethod
    def export(self, directory: Path) -> None:
        """Write the model to ``directory`` so that ``from_pretrained`` loads it; the first rank writes."""
