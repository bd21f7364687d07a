"""The names of a model's tensors in its files, and the view of each in the model's parameters.

transformers may hold several tensors of a checkpoint in one parameter, such as the projections of all experts.
:class:`SavedNames` finds them by running transformers' own conversion for saving on meta tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers.core_model_loading import revert_weight_conversion

from hwrl.errors import UnsupportedError
from hwrl.lora import adapter_name, base_name


@dataclass(frozen=True)
class _Part:
    """A saved tensor: a view of a contiguous parameter, in elements."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class SavedNames:
    """The saved tensors of each parameter and persistent buffer of one model, under the names in its files.

    Make it with :meth:`of`. It holds no tensor. Immutable.
    """

    _shapes: Mapping[str, tuple[int, ...]]
    _parts: Mapping[str, tuple[_Part, ...]]
    """Only of tensors with another name or shape in a file."""

    @classmethod
    def of(cls, model: Any) -> SavedNames:
        """Return the saved names of ``model``, a transformers model on any device, also on the meta device.

        An adapter in the model (:func:`~hwrl.lora.add_adapter`) is left out: the base has its names without it.
        Raises UnsupportedError if a saved tensor is no view of one parameter: the architecture computes values when
        it is loaded, or joins several saved tensors of different parameters.
        """
        own = {
            base_name(name): torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            for name, tensor in model.state_dict().items()
            if isinstance(tensor, torch.Tensor) and adapter_name(name) is None
        }
        parts = _traced(model, own)
        as_it_is = {name for name, (first, *rest) in parts.items() if not rest and first == _whole(name, own[name])}
        return cls(
            {name: tuple(tensor.shape) for name, tensor in own.items()},
            {name: found for name, found in parts.items() if name not in as_it_is},
        )

    def parts(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the saved tensors of the parameter ``name``, as views of ``tensor``, with their saved names.

        ``tensor`` is contiguous, has the parameter's shape and any dtype and device, also the meta device. Together the
        views hold each element once, in the order of their first elements; parts of one parameter that are contiguous
        then lie one behind the other. A view of a transposed parameter is not contiguous. Read the views to save or
        send the parameter; write them to load it. A parameter that is saved as it is yields ``tensor`` itself. Raises
        KeyError if the model has no such parameter or buffer, and ValueError for another shape or layout.
        """
        shape = self._shapes[name]
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} has the shape {list(shape)}, and the tensor {list(tensor.shape)}")
        if name not in self._parts:
            yield name, tensor
            return
        if not tensor.is_contiguous():
            raise ValueError(f"{name} has several saved tensors, and only a contiguous tensor can be divided into them")
        begin = tensor.storage_offset()
        for part in self._parts[name]:
            yield part.name, tensor.as_strided(part.shape, part.stride, begin + part.offset)

    def all_parts(self, named: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield :meth:`parts` of each of the ``named`` parameters and buffers, one after the other."""
        for name, tensor in named:
            yield from self.parts(name, tensor)


def saved_weights(model: Any) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return views of the parameters and persistent buffers of ``model``, on any device: the base's and an adapter's.

    The base's are the tensors of the model's files (:class:`SavedNames`); the adapter's have PEFT's names.
    """
    own = model.state_dict()
    base = ((base_name(name), tensor) for name, tensor in own.items() if not adapter_name(name))
    adapter = {named: tensor for name, tensor in own.items() if (named := adapter_name(name))}
    return dict(SavedNames.of(model).all_parts(base)), adapter


def _whole(name: str, tensor: torch.Tensor) -> _Part:
    return _Part(name, tuple(tensor.shape), tensor.stride(), 0)


def _traced(model: Any, own: Mapping[str, torch.Tensor]) -> dict[str, tuple[_Part, ...]]:
    """Convert the meta tensors ``own`` as transformers saves them; return the saved parts of each."""
    saved = _converted(model, own)
    owner = {tensor.untyped_storage()._cdata: name for name, tensor in own.items()}
    parts: dict[str, list[_Part]] = {name: [] for name in own}
    for name, view in saved.items():
        source = owner.get(view.untyped_storage()._cdata)
        if source is None or view.dtype != own[source].dtype:
            raise _unsupported(model, f"{name} in a file is no view of one parameter of the model")
        parts[source].append(_Part(name, tuple(view.shape), view.stride(), int(view.storage_offset())))
    for name, found in parts.items():
        places = {(part.shape, part.stride, part.offset) for part in found}
        if len(places) < len(found) or sum(saved[part.name].numel() for part in found) != own[name].numel():
            raise _unsupported(model, f"the tensors in a file do not hold each element of {name} once")
    return {name: tuple(sorted(found, key=lambda part: part.offset)) for name, found in parts.items()}


def _converted(model: Any, own: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return ``own`` as transformers saves it.

    The names depend on the model's class only, not on the files that it was loaded from, so that all processes agree.
    """
    loaded_with = vars(model).pop("_weight_conversions", None)
    try:
        with _KeepViews():
            return dict(revert_weight_conversion(model, dict(own)))
    except Exception as exc:
        raise _unsupported(model, f"transformers cannot convert its parameters one by one ({exc})") from exc
    finally:
        if loaded_with is not None:
            model._weight_conversions = loaded_with


class _KeepViews(TorchFunctionMode):
    """A context where ``contiguous()`` returns a view as it is; transformers' conversions end with it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.contiguous:
            return args[0]
        return func(*args, **(kwargs or {}))


def _unsupported(model: Any, why: str) -> UnsupportedError:
    return UnsupportedError(
        f"the architecture {type(model).__name__} cannot be sent or loaded tensor by tensor",
        why=why,
        fix="take an architecture whose files hold its parameters, or parts of them",
    )
