"""What one rank saves, and where it is read while training goes on: :class:`SaveSource`."""

from __future__ import annotations

import contextlib
import io
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from hwrl.checkpoint.format.layout import Keys, SafeSavePlanner, distinct_names
from hwrl.checkpoint.format.shards import LocalShards, Offset, Part, local_parts
from hwrl.checkpoint.format.split import divide
from hwrl.checkpoint.saving.staging import Staging
from hwrl.errors import CheckpointSaveError, MemoryStateError
from hwrl.interfaces import LentState, LentTensor, OffloadedState
from hwrl.memory import HostCopies
from hwrl.memory.slabs import alone


class SaveSource:
    """What there is to save of ``state``, and the plan for it, in which no item is large.

    A tensor that ``offloader`` holds on the host is read there. It is lent until it is written, so that an offload
    waits for what is not written yet, and for no more. What is lent stands first in the plan. What lies on the device
    is read through the staging's ring, one item at a time, and let go of when it is written.

    Timeline: ``hold``; then a thread plans, and says with ``choose`` what will be read; then any threads read;
    ``close`` gives back what is still lent.
    """

    plan: SavePlan
    """What :meth:`make_plan` returned."""

    def __init__(self, state: Mapping[str, Any], *, offloader: OffloadedState | None = None) -> None:
        self._planner = SafeSavePlanner()
        with distinct_names(CheckpointSaveError):
            self._planner.set_up_planner(dict(state))
        self._offloader = offloader
        self._in_pieces = {name for name, value in self._planner.state_dict.items() if isinstance(value, LocalShards)}
        self._here: dict[Part, torch.Tensor] = {}
        self._away: dict[Part, torch.Tensor] = {}
        for part, tensor in local_parts(self._planner.state_dict):
            _check_dense(part[0], tensor)
            (self._away if _is_away(tensor) else self._here)[part] = tensor
        self._copies: LentState = HostCopies([])
        self._lent: dict[Part, LentTensor] = {}
        self._on_host: dict[Part, torch.Tensor] = {}
        self._values: dict[str, torch.Tensor | io.BytesIO] = {}
        self._begins: dict[tuple[str, Offset], tuple[Part, Offset]] = {}
        self._keys: dict[str, Keys] = {}
        self._unread: Counter[Part] = Counter()
        self._lock = threading.Lock()
        self._staging: Staging | None = None
        self.staged_nbytes = self.cloned_nbytes = 0
        self.lent_nbytes = _nbytes(self._away)

    def hold(self, staging: Staging, *, copy: bool) -> None:
        """Borrow what is offloaded, make bytes of what is no tensor, and with ``copy`` stage all else.

        Nothing but shapes and dtypes is asked of the state after this, if it was staged.
        """
        self._staging = staging
        if copy:
            with staging.copying(self._here) as (on_host, on_device):
                self._hold_values()
            self._on_host, self._here = dict(on_host), dict(on_device)
            self.staged_nbytes, self.cloned_nbytes = _nbytes(self._on_host), _nbytes(self._here)
        else:
            self._hold_values()
            staging.settle()
        staging.open_ring(self._here)

    def _hold_values(self) -> None:
        if self._offloader is not None:
            self._copies = self._offloader.lend_all()
        for part, tensor in self._away.items():
            if not self._copies.holds(tensor):
                raise no_memory(part[0])
        for name, value in self._planner.state_dict.items():
            if not isinstance(value, torch.Tensor):
                item = WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO)
                self._values[name] = self._planner.resolve_data(item)

    def make_plan(self) -> SavePlan:
        """Return this rank's plan; lend for itself each tensor that is read from the offloader's copies."""
        for part, tensor in self._away.items():
            lent = self._copies.lend(tensor)
            assert lent is not None, "it is among them"
            self._lent[part] = lent
        self._copies.give_back()
        plan = self._planner.create_local_plan()
        self._keys = plan.planner_data
        items = [item for whole in plan.items for item in self._divide(whole)]
        self.plan = replace(plan, items=sorted(items, key=lambda item: self._place(item)[0] not in self._lent))
        return self.plan

    def _divide(self, whole: WriteItem) -> Iterator[WriteItem]:
        name, offset = whole.index.fqn, tuple(whole.index.offset or ())
        part = (name, offset if name in self._in_pieces else None)
        for begin, item in divide(whole):
            self._begins[name, tuple(item.index.offset or ())] = (part, begin)
            yield item

    def choose(self, items: Iterable[WriteItem]) -> None:
        """Say which items of the plan are read, each once; let go of everything else."""
        self._unread = Counter(self._place(item)[0] for item in items)
        for part in (self._lent.keys() | self._here.keys()) - self._unread.keys():
            self._let_go(part)

    def keys(self, item: WriteItem) -> Keys:
        """Return where the nested state has what ``item`` is of."""
        return self._keys[item.index.fqn]

    @contextlib.contextmanager
    def reading(self, item: WriteItem) -> Iterator[torch.Tensor | io.BytesIO]:
        """Yield the bytes of ``item``, or a tensor on the host; what was lent for it is given back after the block."""
        if item.type is WriteItemType.BYTE_IO:
            yield self._values[item.index.fqn]
            return
        part, begin = self._place(item)
        assert item.tensor_data is not None, "not bytes"
        with self._reading(part, begin, item.tensor_data.chunk.sizes) as tensor:
            yield tensor
        with self._lock:
            self._unread[part] -= 1
            if not self._unread[part]:
                self._let_go(part)

    @contextlib.contextmanager
    def _reading(self, part: Part, begin: Offset, sizes: torch.Size) -> Iterator[torch.Tensor]:
        cut = tuple(slice(start, start + size) for start, size in zip(begin, sizes, strict=True))
        if part in self._here:
            assert self._staging is not None, "held"
            with self._staging.ring.reading(self._here[part][cut]) as tensor:
                yield tensor
            return
        whole = self._lent[part].tensor if part in self._lent else self._on_host[part]
        yield alone(whole[cut].contiguous())

    def _let_go(self, part: Part) -> None:
        self._here.pop(part, None)
        if part in self._lent:
            self._lent[part].give_back()

    def close(self) -> None:
        """Let go of all that is left. May be called again."""
        self._copies.give_back()
        for part in [*self._lent, *self._here]:
            self._let_go(part)
        if self._staging is not None:
            self._staging.freed()

    def _place(self, item: WriteItem) -> tuple[Part, Offset]:
        return self._begins[item.index.fqn, tuple(item.index.offset or ())]


def require_memory(state: Mapping[str, Any]) -> None:
    """Raise MemoryStateError if a tensor of a flat state is offloaded."""
    for (name, _), tensor in local_parts(state):
        if _is_away(tensor):
            raise no_memory(name)


def no_memory(name: str) -> MemoryStateError:
    """Return the error about a tensor of the state that is offloaded."""
    return MemoryStateError(
        f"{name!r} has no memory",
        why="it is offloaded",
        fix="give save its `offloader=`, or save and resume inside `with offloader.loaded():`",
    )


def _check_dense(name: str, tensor: torch.Tensor) -> None:
    if tensor.layout is not torch.strided:
        raise CheckpointSaveError(
            f"state {name!r} cannot be saved",
            why=f"it is a {tensor.layout} tensor",
            fix="save it as to_dense(), or the tensors that make it up",
        )


def _is_away(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.untyped_storage().nbytes() == 0 and tensor.numel() > 0


def _nbytes(tensors: Mapping[Part, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())
