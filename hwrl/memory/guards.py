"""Make every use of offloaded memory raise: :class:`Guards`."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim import Optimizer

from hwrl.errors import MemoryStateError

_Hook = Callable[..., None]
_NO_NAME = ".hwrl"  # no parameter can have it: names have no dots


class Offloaded(nn.Parameter):
    """The class of a plain ``Parameter`` while it is offloaded.

    Compiled code ignores hooks from after its compilation, but checks the class of each parameter. The new class makes
    torch trace the code again, and the trace runs the hooks. With the old class back, the old code runs as before.
    """


def _note_change(parameters: dict[str, nn.Parameter | None]) -> None:
    """Change the version that Python keeps of a module's dict of parameters, but not its content.

    In torch 2.10 and 2.11, compiled code does not check the parameters in a dict of the same version. Remove with them.
    """
    parameters[_NO_NAME] = None
    del parameters[_NO_NAME]


class Guards:
    """Makes every use of one part raise, from :meth:`install` to :meth:`remove`.

    Uses are ``forward``, ``step``, ``state_dict`` and ``load_state_dict`` of the model or of its optimizers.
    ``state_dict`` is allowed while ``lending`` is set.
    """

    def __init__(self, name: str, model: nn.Module, optimizer: object, lending: threading.Event) -> None:
        self._name, self._model, self._optimizer, self._lending = name, model, optimizer, lending
        self._handles: list[Any] = []
        self._parameters: list[nn.Parameter] = []
        self._tables: list[dict[str, nn.Parameter | None]] = []
        self._wrapper_class: str | None = None
        self._on = False  # a hook left behind by an error does nothing

    def install(self, *, wrapper_class: str | None) -> None:
        """Refuse uses from now on. With a ``wrapper_class``, refuse ``state_dict`` even while lending."""
        self.remove()
        self._on, self._wrapper_class = True, wrapper_class
        refuse, refuse_state = self._hooks()
        for optimizer in optimizers_in(self._optimizer):
            self._guard_optimizer(optimizer, refuse, refuse_state)
        if self._name == "parameters":
            for module in self._model.modules():
                self._guard_module(module, refuse, refuse_state)
            for parameter in self._model.parameters():
                self._mark(parameter)
            self._tables = [module._parameters for module in self._model.modules() if module._parameters]
            for table in self._tables:
                _note_change(table)

    def remove(self) -> None:
        """Allow everything again. May be called at any time."""
        self._on = False
        for parameter in self._parameters:
            parameter.__class__ = nn.Parameter
        for table in self._tables:
            _note_change(table)
        for handle in self._handles:
            handle.remove()
        self._handles, self._parameters, self._tables = [], [], []

    def _guard_optimizer(self, optimizer: Optimizer, refuse: _Hook, refuse_state: _Hook) -> None:
        self._handles.append(optimizer.register_step_pre_hook(refuse))
        if self._name == "optimizer":
            self._handles.append(optimizer.register_state_dict_pre_hook(refuse_state))
            self._handles.append(optimizer.register_load_state_dict_pre_hook(refuse))

    def _guard_module(self, module: nn.Module, refuse: _Hook, refuse_state: _Hook) -> None:
        self._handles.append(module.register_state_dict_pre_hook(refuse_state))
        self._handles.append(module.register_load_state_dict_pre_hook(refuse))
        self._handles.append(module.register_forward_pre_hook(refuse, prepend=True))

    def _hooks(self) -> tuple[_Hook, _Hook]:
        if "torch._dynamo" not in sys.modules:  # nothing was compiled, and importing it takes a second
            return self._refuse, self._refuse_state
        reason = f"the {self._name} are offloaded, use them inside `with offloader.loaded():`"
        disabled = functools.partial(torch.compiler.disable, reason=reason)  # tracing the error path itself would warn
        return disabled(self._refuse), disabled(self._refuse_state)

    def _mark(self, parameter: nn.Parameter) -> None:
        if type(parameter) is nn.Parameter:
            self._parameters.append(parameter)
            parameter.__class__ = Offloaded

    def _refuse(self, *args: object, **kwargs: object) -> None:
        if self._on:
            self._raise("they are offloaded")

    def _refuse_state(self, *args: object, **kwargs: object) -> None:
        if self._on and not self._lending.is_set():
            self._raise("they are offloaded")
        if self._on and self._wrapper_class is not None:
            self._raise(f"they are offloaded, and tensors of class {self._wrapper_class} cannot be lent")

    def _raise(self, why: str) -> NoReturn:
        raise MemoryStateError(
            f"the {self._name} cannot be used", why=why, fix="use them inside `with offloader.loaded():`"
        )


def optimizers_in(optimizer: object) -> list[Optimizer]:
    """Return the optimizers of torch in ``optimizer``: itself, or those inside a wrapper, with the state and the hooks.

    A wrapper may be a subclass of ``Optimizer`` without its initialisation. Raises
    :class:`~hwrl.errors.MemoryStateError` if it finds none: then no use could be refused. None gives an empty list.
    """
    if optimizer is None:
        return []
    todo, seen = [optimizer], {id(optimizer): optimizer}
    while todo:
        wrapped = {id(one): one for one in _wrapped_optimizers(todo.pop()) if id(one) not in seen}
        todo += wrapped.values()
        seen |= wrapped
    found = [one for one in seen.values() if isinstance(one, Optimizer) and "_optimizer_step_pre_hooks" in vars(one)]
    if not found:
        kind = type(optimizer).__qualname__
        raise MemoryStateError(
            f"the optimizer of class {kind} cannot be offloaded",
            why="it neither is nor holds a torch.optim.Optimizer, so its use could not be refused",
            fix="give Offloader its torch.optim.Optimizer, or none",
        )
    return found


def _wrapped_optimizers(wrapper: object) -> Iterator[object]:
    for value in list(getattr(wrapper, "__dict__", {}).values()):
        for one in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(one, Optimizer) or (hasattr(one, "param_groups") and hasattr(one, "step")):
                yield one
