"""Context parallelism: several ranks share each pack, and so its activations: :class:`ContextGroup`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_to_all_single_autograd

from hwrl.errors import ConfigError
from hwrl.models import load_model_config
from hwrl.train.packing import PackShare

if TYPE_CHECKING:
    from hwrl.comm import Group
    from hwrl.interfaces import Backend, LossInputs


class HeadExchange:
    """Lets ``size`` ranks exchange tokens for heads, and back: a rank has some tokens, but attends to all of a pack.

    ``exchange`` sends the part ``tensor[rank]`` to each rank, and returns the parts from each rank, in rank order, as a
    new tensor. It must be differentiable. After Jacobs et al. 2023, https://arxiv.org/abs/2309.14509.
    """

    def __init__(self, size: int, exchange: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.size, self._exchange = size, exchange

    def to_heads(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Take this rank's tokens (tokens × heads × size); return the pack's tokens for this rank's heads.

        The ranks must have the same number of tokens, and share the query's heads equally. Heads of ``key`` and
        ``value`` go to each rank with a query head for them.
        """
        repeats = 1
        while repeats * key.shape[1] % self.size:  # a compiler cannot trace gcd
            repeats += 1
        if repeats > 1:
            key, value = (each.repeat_interleave(repeats, 1) for each in (key, value))
        shapes = [(each.shape[1] // self.size, each.shape[2]) for each in (query, key, value)]
        parts = [
            each.reshape(-1, self.size, heads * size)
            for each, (heads, size) in zip((query, key, value), shapes, strict=True)
        ]
        received = self._exchange(torch.cat(parts, 2).transpose(0, 1).contiguous()).flatten(0, 1)
        whole = received.split([heads * size for heads, size in shapes], 1)
        q, k, v = (
            each.contiguous().view(-1, *shape)  # the copy waits for the exchange
            for each, shape in zip(whole, shapes, strict=True)
        )
        return q, k, v

    def to_tokens(self, attended: torch.Tensor) -> torch.Tensor:
        """Take the pack's tokens for this rank's heads (tokens × heads × size); return its own tokens for all heads."""
        parts = self._exchange(attended.contiguous().unflatten(0, (self.size, -1)))  # one for each rank's heads
        return parts.transpose(0, 1).flatten(1, 2)


class ContextGroup(HeadExchange):
    """This rank's group of ``size`` neighbouring ranks of torch's default group, with a share of each pack per rank.

    A rank computes its own tokens, for all heads, except in attention. (torch's ``context_parallel`` divides rows of
    equal length, and knows no packs.) All methods are collective in the group. Making one is collective in the default
    group; it ends with that group.
    """

    def __init__(self, size: int, *, backend: Backend, timeout_s: float) -> None:
        timeout: timedelta = backend.library_timeout(timeout_s)
        self._group, _ = dist.new_subgroups(size, timeout=timeout)  # on the default group's library
        name: Any = self._group.group_name  # a compiler takes a text for a constant
        super().__init__(size, lambda parts: all_to_all_single_autograd(parts, None, None, name))
        self._device = backend.device()
        self.share = PackShare(self._group.rank(), size)

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum of the ranks' ``tensor`` on the host. Blocks."""
        return self._reduced(tensor, dist.ReduceOp.SUM)

    def whole_inputs(self, inputs: LossInputs, counts: Sequence[int]) -> tuple[LossInputs, slice]:
        """Return the loss's inputs for all tokens of a pack, and the slice of this rank's own, ``inputs``.

        ``counts`` are the response tokens in each share. The other ranks' tensors carry no gradient. Blocks.
        """
        start = sum(counts[: self.share.index])
        own = slice(start, start + counts[self.share.index])
        whole: dict[str, Any] = {}
        for field in fields(inputs):
            if isinstance(value := getattr(inputs, field.name), torch.Tensor):
                every = self._gathered(value.detach(), counts)
                whole[field.name] = torch.cat([every[:start], value, every[own.stop :]])
        return replace(inputs, **whole), own

    def _gathered(self, values: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """Return the ranks' ``values``, in rank order; rank number ``n`` has ``counts[n]`` of them."""
        padded = values.new_zeros(max(counts))
        padded[: len(values)] = values
        every = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(every, padded, group=self._group)
        return torch.cat([part[:count] for part, count in zip(every, counts, strict=True)])

    def largest(self, number: float) -> float:
        """Return the largest of the ranks' ``number``. Blocks."""
        return float(self._reduced(torch.tensor([number]), dist.ReduceOp.MAX))

    def _reduced(self, tensor: torch.Tensor, op: dist.ReduceOp.RedOpType) -> torch.Tensor:
        reduced = tensor.to(self._device, copy=True)
        dist.all_reduce(reduced, op=op, group=self._group)
        return reduced.cpu()


def make_context_group(size: int, *, directory: Path, group: Group | None, backend: Backend) -> ContextGroup | None:
    """Return the group of this rank; None for ``size`` 1. Collective in ``group``, the default group.

    Raises ConfigError if ``size`` does not divide the ranks, or the heads of the model in ``directory``.
    """
    ranks = 1 if group is None else group.size
    if ranks % size:
        raise ConfigError(
            f"train.context_parallel={size} is not possible on {ranks} rank(s)",
            why="each pack is shared by that number of ranks",
            fix=f"set train.ranks to {size} or a multiple of it",
        )
    require_shared_heads(directory, size)
    return None if group is None or size == 1 else ContextGroup(size, backend=backend, timeout_s=group.timeout_s)


def require_shared_heads(directory: Path, size: int) -> None:
    """Raise ConfigError unless ``size`` ranks can share the heads of the model in ``directory`` equally."""
    if size == 1:
        return
    heads = int(load_model_config(directory).get_text_config().num_attention_heads)
    if heads % size:
        raise ConfigError(
            f"train.context_parallel={size} is not possible with the model in {directory}",
            why=f"the ranks share its {heads} attention heads equally",
            fix=f"set train.context_parallel to a number that divides {heads}",
        )
