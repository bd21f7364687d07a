"""Make every use of offloaded memory raise: :class:`Guards`."""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from hwrl.errors import MemoryStateError

_Hook = Callable[..., None]
_NO_NAME = ".hwrl"  # no parameter can have it: names have no dots


# fmt: off
_WITHOUT_VALUES = {
    "__get__", "__set__", "__delete__", "__hash__", "__len__", "alias", "data_ptr", "detach", "dim", "element_size",
    "get_device", "has_names", "is_complex", "is_contiguous", "is_floating_point", "is_inference", "is_pinned",
    "ndimension", "nelement", "numel", "register_hook", "register_post_accumulate_grad_hook", "requires_grad_", "size",
    "storage_offset", "stride", "untyped_storage",
}
# fmt: on
"""The functions of torch that read no values: an offloaded tensor allows them."""
lenders: set[int] = set()  # the ids of offloaders that lend: ``state_dict`` makes plain aliases of empty tensors then


class OffloadedTensor(torch.Tensor):
    """The class of a plain tensor while it is offloaded: reading its values raises, instead of ending the process."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.partition(".")[0]
        with torch._C.DisableTorchFunctionSubclass():
            if name not in _WITHOUT_VALUES and any(map(_is_freed, tree_leaves((args, kwargs)))):
                raise MemoryStateError(
                    f"the values of an offloaded tensor cannot be used by {name}",
                    why="they are on the host, and the tensor has no memory now",
                    fix="use it inside `with offloader.loaded():`",
                )
            result = func(*args, **(kwargs or {}))
            if not lenders and type(result) is torch.Tensor and _is_freed(result):
                result.__class__ = OffloadedTensor  # an alias, for example ``detach()`` or ``data``
                _aliases[id(result)] = result
            return result


class Offloaded(nn.Parameter):
    """The class of a plain ``Parameter`` while it is offloaded; see :class:`OffloadedTensor`.

    Compiled code ignores hooks from after its compilation, but checks the class of each parameter. The new class makes
    torch trace the code again, and the trace runs the hooks. With the old class back, the old code runs as before.
    """

    __torch_function__ = OffloadedTensor.__torch_function__


class OffloadedStorage(torch.UntypedStorage):
    """The class of a storage while it is offloaded. ``torch.save`` of an alias from before would write no bytes."""

    def data_ptr(self) -> int:
        """Raise MemoryStateError: ``torch.save`` calls it first, for any alias."""
        raise MemoryStateError(
            "the memory of an offloaded tensor cannot be used",
            why="its values are on the host, and a copy or a file of it would be empty",
            fix="use it inside `with offloader.loaded():`",
        )

    clone = share_memory_ = __reduce__ = data_ptr  # type: ignore[assignment] # raise, too


_aliases: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()  # by id


def _is_freed(value: object) -> bool:
    return isinstance(value, torch.Tensor) and (
        value.layout is torch.strided and value.numel() > 0 and _nbytes(value) == 0
    )


def _nbytes(tensor: torch.Tensor) -> int:
    try:
        return tensor.untyped_storage().nbytes()
    except (RuntimeError, NotImplementedError):  # a wrapper without a storage of its own
        return -1


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
        self._marked: list[tuple[torch.Tensor, type[torch.Tensor]]] = []
        self._tables: list[dict[str, nn.Parameter | None]] = []
        self.wrapper_class: str | None = None
        self._on = False  # a hook left behind by an error does nothing

    def install(self, tensors: Iterable[torch.Tensor], *, wrapper_class: str | None) -> None:
        """Refuse uses from now on, of the part's ``tensors``, too.

        With a ``wrapper_class``, refuse ``state_dict`` even while lending.
        """
        self.remove()
        self._on, self.wrapper_class = True, wrapper_class
        refuse, refuse_state = self._hooks()
        for optimizer in optimizers_in(self._optimizer):
            self._handles.append(optimizer.register_step_pre_hook(refuse))
            if self._name == "optimizer":
                self._handles.append(optimizer.register_state_dict_pre_hook(refuse_state))
                self._handles.append(optimizer.register_load_state_dict_pre_hook(refuse))
        for tensor in tensors:
            self._mark(tensor)
        if self._name == "parameters":
            for module in self._model.modules():
                self._handles.append(module.register_state_dict_pre_hook(refuse_state))
                self._handles.append(module.register_load_state_dict_pre_hook(refuse))
                self._handles.append(module.register_forward_pre_hook(refuse, prepend=True))
            for parameter in self._model.parameters():
                self._mark(parameter)
            self._tables = [module._parameters for module in self._model.modules() if module._parameters]
            for table in self._tables:
                _note_change(table)

    def remove(self) -> None:
        """Allow everything again. May be called at any time."""
        self._on = False
        for tensor, plain in self._marked:
            tensor.__class__ = plain
        for alias in list(_aliases.values()):
            if not _is_freed(alias):
                alias.__class__ = torch.Tensor
                _aliases.pop(id(alias), None)
        for table in self._tables:
            _note_change(table)
        for handle in self._handles:
            handle.remove()
        self._handles, self._marked, self._tables = [], [], []

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        self._raise("they are offloaded, so their module or optimizer cannot be copied or pickled")

    def _hooks(self) -> tuple[_Hook, _Hook]:
        if "torch._dynamo" not in sys.modules:  # nothing was compiled, and importing it takes a second
            return self._refuse, self._refuse_state
        reason = f"the {self._name} are offloaded, use them inside `with offloader.loaded():`"
        disabled = functools.partial(torch.compiler.disable, reason=reason)  # tracing the error path itself would warn
        return disabled(self._refuse), disabled(self._refuse_state)

    def _mark(self, tensor: torch.Tensor) -> None:
        marks: dict[type[torch.Tensor], type[torch.Tensor]] = {nn.Parameter: Offloaded, torch.Tensor: OffloadedTensor}
        if (mark := marks.get(plain := type(tensor))) is not None:
            self._marked.append((tensor, plain))
            tensor.__class__ = mark

    def _refuse(self, *args: object, **kwargs: object) -> None:
        if self._on:
            self._raise("they are offloaded")

    def _refuse_state(self, *args: object, **kwargs: object) -> None:
        if self._on and not self._lending.is_set():
            self._raise("they are offloaded")
        if self._on and self.wrapper_class is not None:
            self._raise(f"they are offloaded, and tensors of class {self.wrapper_class} cannot be lent")

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
