"""FSDP2: shard a model over ranks, and gather its weights once a step where memory allows: :class:`ShardedModel`."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.distributed.tensor import DTensor

from hwrl.errors import ConfigError, EngineError
from hwrl.interfaces import Backend, Capability
from hwrl.train.loading import allocate, own_slice
from hwrl.train.state_memory import StateMemory
from hwrl.weights import WeightShard

if TYPE_CHECKING:
    from hwrl.comm import Group

_PartT = TypeVar("_PartT")

_SHARE = 4
"""Whole weights or gradients stay on the device if they need at most 1 / ``_SHARE`` of the free memory."""


def layers_of(model: Any) -> list[torch.nn.Module]:
    """Return the layers of ``model``, outer ones first; EngineError if transformers does not name their class."""
    kinds = set(model._no_split_modules or ())  # accelerate and others use it, too
    layers = [module for module in model.modules() if type(module).__name__ in kinds]
    if not layers:
        raise EngineError(
            f"a {type(model).__name__} cannot be trained layer by layer",
            why=f"none of its modules has a class of its _no_split_modules: {sorted(kinds)}",
            fix="name the class of its layers in _no_split_modules of the model's class",
        )
    return layers


def outermost(layers: Sequence[torch.nn.Module]) -> list[torch.nn.Module]:
    """Return the modules of ``layers`` that are inside no other one of them."""
    inner = {id(module) for layer in layers for module in layer.modules() if module is not layer}
    return [layer for layer in layers if id(layer) not in inner]


def whole_fits(memory: StateMemory, usable_nbytes: int) -> tuple[bool, bool]:
    """Return whether whole weights can stay between the passes of a step, and whether whole gradients can, too.

    A rank can still allocate ``usable_nbytes`` beside its parameters. Its own gradients and moments are not allocated
    yet, and need a part of these bytes.
    """
    room = (usable_nbytes - (0 if memory.on_host else memory.gradients + memory.moments)) / _SHARE
    return memory.whole_weights <= room, memory.whole_weights + memory.whole_gradients <= room


def _move_buffers(model: torch.nn.Module, device: torch.device) -> None:
    """Move buffers with values to ``device``. FSDP2 assigns ``data``; torch refuses that for out-of-tree devices."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if not buffer.is_meta:
                module.register_buffer(
                    name, buffer.to(device), persistent=name not in module._non_persistent_buffers_set
                )


def sum_if_needed(model: torch.nn.Module, backend: Backend) -> None:
    """Let FSDP2 sum and divide the gradients of the sharded ``model`` if the backend's groups cannot average."""
    from torch.distributed.fsdp import FSDPModule

    if not backend.supports(Capability.REDUCE_AVERAGE).usable:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(enable=True)


class ShardedModel:
    """Shards ``model`` over the ranks of ``group``, layer by layer, and allocates its shards with arbitrary values.

    With ``shard_ranks``, that many neighbouring ranks hold one copy of the model, and the next ones another copy.
    ``memory`` describes the model on these ranks. If it is ``on_host``, parameters and gradients are in host memory,
    and the optimizer's state with them; the passes run on the device. Parameters on the meta device never exist whole.

    Ranks gather the weights of a layer when they run it. If :attr:`keeps_weights`, :meth:`passes` gathers them once for
    all passes of a step. If :attr:`keeps_gradients`, it reduces the gradients once. Whole weights need the bytes of the
    whole model in ``dtype`` on each rank, and whole gradients those of the whole model in float32. ``usable_nbytes``
    returns the bytes that this rank can still allocate.
    """

    def __init__(
        self,
        model: Any,
        layers: Sequence[Any],
        *,
        group: Group,
        backend: Backend,
        dtype: torch.dtype,
        usable_nbytes: Callable[[], int],
        memory: StateMemory,
        shard_ranks: int | None = None,
    ) -> None:
        from torch.distributed.fsdp import fully_shard

        self.model, self._itemsize, self._usable_nbytes = model, dtype.itemsize, usable_nbytes
        self.shard_ranks = shard_ranks or group.size
        if group.size % self.shard_ranks:
            raise ConfigError(
                f"train.shard_ranks={shard_ranks} is not possible on {group.size} ranks",
                why="each copy of the model needs that number of ranks",
                fix="set train.ranks to a multiple of it, or train.shard_ranks to null",
            )
        self.copies = group.size // self.shard_ranks
        self._in_first_copy = group.rank < self.shard_ranks
        self._memory, self._device = memory, backend.device()
        options = self._options(backend, dtype)
        _move_buffers(model, backend.device())
        for layer in reversed(layers):  # inner ones first
            fully_shard(layer, **options)
        fully_shard(model, **options)
        sum_if_needed(model, backend)
        allocate(model, device=torch.device("cpu") if memory.on_host else backend.device())
        self.keeps_weights = self.keeps_gradients = self._has_whole_gradients = False
        self._keep(group, backend)

    def _options(self, backend: Backend, dtype: torch.dtype) -> dict[str, Any]:
        """Return the arguments of ``fully_shard``."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

        sizes: tuple[int, ...] = (self.shard_ranks,) if self.copies == 1 else (self.copies, self.shard_ranks)
        names = ("copy", "shard")[-len(sizes) :]
        options: dict[str, Any] = {
            "mesh": init_device_mesh(backend.info.device_type, sizes, mesh_dim_names=names),
            "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32),
        }
        if self._memory.on_host:
            # torch pins by itself, and only with an accelerator; a backend whose device is the host has none to pin for
            pinned = torch.accelerator.is_available() and backend.supports(Capability.PINNED_MEMORY).usable
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=pinned)
        return options

    def _keep(self, group: Group, backend: Backend) -> None:
        """Decide what stays whole, the same on all ranks. Gradients and moments come later; they need room, too."""
        fits = (False, False)
        if backend.supports(Capability.MEMORY_STATS).usable:
            fits = whole_fits(self._memory, self._usable_nbytes())
        missing = torch.tensor([not each for each in fits], dtype=torch.float32, device=backend.device())
        group.all_reduce(missing, op="max")
        weights_miss, both_miss = missing.tolist()
        self.keeps_weights, self.keeps_gradients = not weights_miss, not both_miss
        if self.keeps_weights:
            self.model.set_reshard_after_forward(False)

    @property
    def owed_nbytes(self) -> int:
        """The bytes that a step will still allocate on this rank for whole weights and whole gradients it keeps."""
        owed = 0
        if self.keeps_weights:
            sharded = (one for one in self.model.parameters() if isinstance(one, DTensor))
            owed += sum(one.numel() for one in sharded) * self._itemsize
        if self.keeps_gradients and not self._has_whole_gradients:
            owed += self._memory.whole_gradients
        return owed

    def shards(self, named: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, WeightShard]]:
        """Yield this rank's part of each parameter in ``named``, on the device.

        The parts of the first copy of the model make the whole; on the ranks of other copies, they are empty.
        """
        for name, tensor in named:
            own, dim, _ = own_slice(tensor)
            part = own if self._in_first_copy else own[:0]
            yield name, WeightShard(part.to(self._device), tuple(tensor.shape), dim, range(self.shard_ranks))

    def passes(self, parts: Iterable[_PartT]) -> Generator[_PartT]:
        """Yield ``parts``, one for each pass; the caller runs a pass, forward and perhaps backward, before the next.

        All ranks must have the same number of parts. A caller that stops early must close the generator. This drops
        the whole gradients of earlier passes.
        """
        rest = list(parts)
        self._has_whole_gradients = False
        try:
            for number, part in enumerate(rest, 1):
                last = number == len(rest)
                self.model.set_reshard_after_backward(last or not self.keeps_weights)
                self.model.set_requires_gradient_sync(last or not self.keeps_gradients)
                yield part
                self._has_whole_gradients = True
        except BaseException:
            self._abandon()
            raise
        finally:
            if self.keeps_weights:  # without a backward pass they are still whole
                self.reshard()

    def _abandon(self) -> None:
        """Forget the failed pass, and free gradients that wait for their reduction; torch has no public way."""
        from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

        if hasattr(self.model, "reset_iter_state"):  # from torch 2.13 on; it waits for collectives, too
            self.model.reset_iter_state()
        for module in self._modules():
            state = module._get_fsdp_state()
            state._training_state = TrainingState.IDLE
            state._state_ctx.post_backward_final_callback_queued = False
            state._state_ctx.iter_forward_root = None
            groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
            for group in filter(None, groups):
                group._training_state = TrainingState.IDLE
                group.reshard()
                for one in group.fsdp_params:
                    one.unsharded_accumulated_grad = None
                    if hasattr(one, "_unsharded_param"):  # from the first pass on
                        one._unsharded_param.grad = None

    def reshard(self) -> None:
        """Free the whole weights, if there are any. A forward pass without a backward pass leaves them."""
        for module in self._modules():
            module.reshard()

    def _modules(self) -> list[Any]:
        from torch.distributed.fsdp import FSDPModule

        return [module for module in self.model.modules() if isinstance(module, FSDPModule)]
