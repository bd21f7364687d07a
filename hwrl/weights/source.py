"""The weights to send: :class:`WeightSource`."""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from hwrl.comm import Group
from hwrl.errors import WeightsError
from hwrl.weights.gather import gather_weights
from hwrl.weights.layout import NamedTensor


@dataclass(frozen=True)
class WeightSource:
    """Named tensors for a transfer to read as often as it needs; ``a + b`` reads both.

    ``metadata`` yields the names with tensors of the right dtype and shape; meta tensors are enough. Aliases of one
    meta tensor mean tied weights. ``read`` yields the tensors themselves, in the same order. With
    ``holds_tensors`` all tensors stay alive between two reads; False: they are made during a read.
    """

    metadata: Callable[[], Iterator[NamedTensor]]
    read: Callable[[], Iterator[NamedTensor]]
    holds_tensors: bool = False

    @classmethod
    def of(cls, weights: WeightSource | Iterable[NamedTensor]) -> WeightSource:
        """Return ``weights`` as a source.

        An iterator can be read only once, so it is read here to its end, and its tensors are held. Any other iterable
        is read again for each attempt.
        """
        if isinstance(weights, WeightSource):
            return weights
        named = list(weights) if isinstance(weights, Iterator) else weights
        return cls(lambda: iter(named), lambda: iter(named), isinstance(named, Sequence | ItemsView))

    @classmethod
    def from_module(
        cls, module: torch.nn.Module, *, group: Group | None = None, dtype: torch.dtype | None = None
    ) -> WeightSource:
        """Return the parameters and persistent buffers of ``module``, under the names of its ``state_dict``.

        ``group`` holds the ranks that share the module, sharded by FSDP2 or replicated; None means this rank alone.
        Its first rank reads whole tensors. The others must iterate the source as often: they send their shards and
        yield nothing (:class:`SharedReads` counts the reads). ``dtype`` casts floating-point tensors. Tied tensors
        stay tied. Raises WeightsError if the module is sharded and ``group`` is missing.
        """
        weights = _ModuleWeights(module, group, dtype)
        return cls(weights.metadata, weights.read, holds_tensors=group is None and dtype is None)

    def __iter__(self) -> Iterator[NamedTensor]:
        return self.read()

    def __add__(self, other: WeightSource) -> WeightSource:
        return WeightSource(
            lambda: _chained(self.metadata, other.metadata),
            lambda: _chained(self.read, other.read),
            self.holds_tensors and other.holds_tensors,
        )


class _ModuleWeights:
    def __init__(self, module: torch.nn.Module, group: Group | None, dtype: torch.dtype | None) -> None:
        self._module, self._group, self._dtype = module, group, dtype

    def metadata(self) -> Iterator[NamedTensor]:
        """Yield the tensors if they are sent as they are, so that a flat storage is found; otherwise meta tensors."""
        tensors, tied_to = self._tensors()
        described = {}
        for name, tensor in tensors.items():
            described[name] = tensor if self._is_sent_as_is(tensor) else self._meta(tensor)
            yield name, described[name]
        for name, first in tied_to.items():
            yield name, described[first]

    @torch.no_grad()
    def read(self) -> Iterator[NamedTensor]:
        tensors, tied_to = self._tensors()
        held = {}
        for name, whole in gather_weights(tensors.items(), self._group, dtype=self._dtype):
            if name in tied_to.values():
                held[name] = whole
            yield name, whole
        if self._group is None or self._group.rank == 0:
            yield from ((name, held[first]) for name, first in tied_to.items())

    def _tensors(self) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        """Return each tensor under its first name, and the first name of each further name.

        All ranks must find the same ties, so this compares objects: an empty shard has no address to compare.
        """
        names: dict[int, str] = {}
        tensors, tied_to = {}, {}
        for name, tensor in self._module.state_dict(keep_vars=True).items():
            if not isinstance(tensor, torch.Tensor):
                continue  # a module's extra state
            if id(tensor) in names:
                tied_to[name] = names[id(tensor)]
                continue
            names[id(tensor)] = name
            tensors[name] = self._without_mesh(name, tensor.detach())
        return tensors, tied_to

    def _without_mesh(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if self._group is not None or not isinstance(tensor, DTensor):
            return tensor
        ranks = tensor.device_mesh.size()
        if ranks > 1:
            raise WeightsError(
                f"tensor {name!r} cannot be read whole",
                why=f"the module is sharded over {ranks} ranks",
                fix="give WeightSource.from_module the group of these ranks",
            )
        return tensor.to_local()

    def _is_sent_as_is(self, tensor: torch.Tensor) -> bool:
        return not isinstance(tensor, DTensor) and (self._dtype in (None, tensor.dtype))

    def _meta(self, tensor: torch.Tensor) -> torch.Tensor:
        dtype = self._dtype if self._dtype is not None and tensor.is_floating_point() else tensor.dtype
        return torch.empty(tensor.shape, dtype=dtype, device="meta")


def _chained(*reads: Callable[[], Iterator[NamedTensor]]) -> Iterator[NamedTensor]:
    for read in reads:
        yield from read()
