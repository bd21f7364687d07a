"""Compile a model's layers and functions, once for all layers of a class: :class:`Compiler`."""

from __future__ import annotations

import contextlib
import functools
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator
from types import MethodType
from typing import Any, Literal

import torch

from hwrl.errors import EngineError, in_one_line
from hwrl.interfaces import Backend, Capability

_log = logging.getLogger("hwrl.train")

_GRAPHS = 64
"""Variants of one function, for example with and without gradients; torch stops compiling after 8."""


def wants_compilation(backend: Backend, *, setting: Literal["auto"] | bool) -> bool:
    """Return whether to compile: ``setting`` itself, or with ``auto``, if compiled training pays on the device.

    If it does not, the log has the reason.
    """
    if setting != "auto":
        return setting
    support = backend.supports(Capability.COMPILED_TRAINING)
    if support.state != "supported":
        _log.info("layers are not compiled: %s", support.reason)
    return support.state == "supported"


class Compiler:
    """Compiles functions with torch, and counts the compilations.

    A compiled function serves all sizes of its inputs. One graph for each size is no faster: of an H200's peak, a step
    got 0.432 with one for all, and 0.422 with one for each.

    torch compiles at the first call. If that fails and compilation is not ``required``, the function runs uncompiled
    from then on, and the log says so once, at ``level``. Otherwise the call raises EngineError. Run the backward pass
    inside :func:`explained_compilation`.
    """

    def __init__(self, *, required: bool, level: int = logging.WARNING) -> None:
        import torch._dynamo

        self._required, self._level = required, level
        # torch reads the gradient of each input as it traces, and warns. Users cannot act on it, so we filter it.
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
        config: Any = torch._dynamo.config
        config.recompile_limit = max(config.recompile_limit, _GRAPHS)
        self._functions: dict[Callable[..., Any], Callable[..., Any]] = {}
        self._counted = self._graphs()

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``function``, compiled; the same result for the same function."""
        if function not in self._functions:
            self._functions[function] = self._with_fallback(function)
        return self._functions[function]

    def _with_fallback(self, function: Callable[..., Any]) -> Callable[..., Any]:
        from torch._dynamo.exc import TorchDynamoException

        run: Callable[..., Any] = torch.compile(function, dynamic=True)
        name = str(getattr(function, "__qualname__", type(function).__qualname__))

        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal run
            try:
                return run(*args, **kwargs)
            except TorchDynamoException as exc:
                if run is function or self._required:
                    raise EngineError(
                        f"{name} cannot be compiled",
                        why=in_one_line(exc),
                        fix="train with train.compile=auto or false; for a missing compiler, install it",
                    ) from exc
                _log.log(self._level, "%s runs uncompiled, and slower: %s", name, in_one_line(exc))
                run = function
                return function(*args, **kwargs)

        return call

    def compile_layers(self, layers: Iterable[torch.nn.Module]) -> None:
        """Replace the ``forward`` of each of ``layers``. Layers of a class share its compiled code.

        Hooks of the layers stay outside of the compiled code.
        """
        for layer in layers:
            forward: Any = layer.forward
            shared = isinstance(forward, MethodType) and forward.__self__ is layer
            layer.forward = (
                functools.partial(self.compiled(forward.__func__), layer) if shared else self.compiled(forward)
            )

    def new_graphs(self) -> int:
        """Return the number of graphs that torch compiled in this process since the last call."""
        before, self._counted = self._counted, self._graphs()
        return self._counted - before

    @staticmethod
    def _graphs() -> int:
        from torch._dynamo.utils import counters

        return int(counters["stats"]["unique_graphs"])


@contextlib.contextmanager
def explained_compilation() -> Iterator[None]:
    """Turn an error of torch's compiler inside the block into EngineError: torch compiles a backward pass there."""
    from torch._dynamo.exc import TorchDynamoException

    try:
        yield
    except TorchDynamoException as exc:
        raise EngineError(
            "the backward pass cannot be compiled",
            why=in_one_line(exc),
            fix="set train.compile=false",
        ) from exc
