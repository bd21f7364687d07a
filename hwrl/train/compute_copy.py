"""A model in the dtype of its computation, beside the float32 model that is trained: :class:`ComputeCopy`."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch

from hwrl.errors import MemoryStateError


class ComputeCopy:
    """Runs a copy of ``masters`` with parameters of ``dtype``; adds its gradients to the float32 ones of ``masters``.

    The copy is cast from the masters before its first use after :meth:`mark_stale`, once for all passes until the
    next change. A gradient of the copy goes to its master's ``grad``, in float32, as soon as it is complete, and is
    dropped. So the gradients of many passes add up in float32, and never exist twice.

    Buffers are shared with ``masters``. So are frozen parameters: they become ``dtype`` in ``masters``, too, because
    nothing updates them. Tied parameters stay tied. Forward hooks of ``masters`` are copied at construction.
    """

    def __init__(self, masters: torch.nn.Module, *, dtype: torch.dtype) -> None:
        shared: dict[int, Any] = {id(buffer): buffer for buffer in masters.buffers()}
        self._masters: list[torch.Tensor] = []
        self._copies: list[torch.Tensor] = []
        for parameter in masters.parameters():
            shared[id(parameter)] = self._counterpart(parameter, dtype)
        self._model = copy.deepcopy(masters, shared)
        self._nbytes = [own.nbytes for own in self._copies]
        self.free()

    def _counterpart(self, parameter: torch.nn.Parameter, dtype: torch.dtype) -> torch.nn.Parameter:
        if not parameter.requires_grad:
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)
            return parameter
        own = torch.nn.Parameter(torch.empty_like(parameter, dtype=dtype))
        own.register_post_accumulate_grad_hook(functools.partial(_move_gradient, parameter))
        self._masters.append(parameter)
        self._copies.append(own)
        return own

    @property
    def model(self) -> Any:
        """The model to run, with the masters' newest weights. MemoryStateError while the masters are offloaded."""
        if not self._fresh:
            self._cast()
        return self._model

    @property
    def modules(self) -> Any:
        """The same model, to look at its modules; its weights may be old or freed."""
        return self._model

    @property
    def masters_offloaded(self) -> bool:
        """Whether the masters' memory on the device is freed."""
        return any(one.numel() and not one.untyped_storage().nbytes() for one in self._masters)

    def mark_stale(self) -> None:
        """Cast the masters again before the next use; call it after each change of them."""
        self._fresh = False

    def free(self) -> None:
        """Free the copy's memory on the device until the next use."""
        self._fresh = False
        for own in self._copies:
            own.untyped_storage().resize_(0)

    @torch.no_grad()
    def _cast(self) -> None:
        if self.masters_offloaded:
            raise MemoryStateError(
                "the model cannot be used",
                why="its parameters are offloaded",
                fix="use it inside `with engine.on_device(optimizer=...):`",
            )
        for own, nbytes in zip(self._copies, self._nbytes, strict=True):
            own.untyped_storage().resize_(nbytes)
        torch._foreach_copy_(self._copies, self._masters)
        self._fresh = True


def _move_gradient(master: torch.nn.Parameter, own: torch.Tensor) -> None:
    gradient, own.grad = own.grad, None
    assert gradient is not None, "the hook runs after accumulation"
    if master.grad is None:
        master.grad = gradient.to(master.dtype)
    else:
        master.grad.add_(gradient)
