"""The optimizer's state on the host between steps: :class:`OffloadCallback`."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from hwrl.memory import Offloader


class OffloadCallback(TrainerCallback):  # type: ignore[misc] # transformers is not followed by the type checker
    """Keeps the optimizer's state in host memory while the trainer generates and computes gradients.

    The state is on the device for the optimizer's step only, and for a save by transformers itself. Give one callback
    to any trainer of transformers or TRL: ``callbacks=[OffloadCallback()]``. Parameters stay on the device, because the
    trainer reads them at any time. Each process moves its own state. The callback blocks as
    :class:`~hwrl.memory.Offloader` does, and raises its errors.
    """

    def __init__(self) -> None:
        self.offloader: Offloader | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Make the offloader. transformers has made the optimizer before this call."""
        self.offloader = Offloader(parts["model"], parts["optimizer"])

    def on_step_begin(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Move the state to the host, unless it is there. A resume or a save leaves it on the device."""
        self._require().offload(params=False)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Bring the state to the device."""
        self._require().load(params=False)

    def on_step_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Move the state to the host, unless transformers is about to save it."""
        if not control.should_save:
            self._require().offload(params=False)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Bring the state to the device if transformers is about to save it."""
        if control.should_save:
            self._require().load(params=False)

    def on_evaluate(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Bring the state to the device with ``save_strategy="best"``: transformers decides to save after this call."""
        if self.offloader is not None and args.save_strategy == "best":
            self.offloader.load(params=False)

    def on_train_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Bring the state to the device, and free the host memory."""
        self._require().close()
        self.offloader = None

    def _require(self) -> Offloader:
        assert self.offloader is not None, "transformers calls on_train_begin first"
        return self.offloader
