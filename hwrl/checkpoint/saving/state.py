"""One rank's state in a save: :class:`CapturedState`, the plan of its items, and their :class:`StateReader`."""

from __future__ import annotations

import contextlib
import io
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from hwrl.checkpoint.format.layout import Keys
from hwrl.checkpoint.format.planners import SafeSavePlanner, distinct_names
from hwrl.checkpoint.format.shards import LocalShards, Offset, PartKey, local_parts
from hwrl.checkpoint.format.split import split_item
from hwrl.checkpoint.saving.staging import StagingMemory
from hwrl.errors import CheckpointSaveError, MemoryStateError
from hwrl.interfaces import LentState, LentTensor, OffloadedState
from hwrl.memory import HostCopies
from hwrl.memory.slabs import alone


@dataclass(frozen=True)
class CapturedState:
    """One rank's state, held for threads to write it while training goes on.

    Each tensor of the rank is in one of three places. ``on_host`` are the staged copies. ``buffered`` are read through
    the staging's buffers: copies on the device, or in a foreground save the state's own tensors. ``offloaded`` have no
    memory; ``offloader_copies``, lent by the offloader, hold their content. ``values`` are all other values, as bytes.

    A tensor leaves ``buffered`` when it is written, and its memory is freed. ``close`` gives back the rest.
    """

    planner: SafeSavePlanner
    values: Mapping[str, torch.Tensor | io.BytesIO]
    on_host: Mapping[PartKey, torch.Tensor]
    buffered: dict[PartKey, torch.Tensor]
    offloaded: Mapping[PartKey, torch.Tensor]
    offloader_copies: LentState
    staging: StagingMemory
    staged_nbytes: int
    cloned_nbytes: int

    @property
    def lent_nbytes(self) -> int:
        """The bytes to read from the offloader's copies."""
        return _nbytes(self.offloaded)

    def close(self) -> None:
        """Release the tensors and the offloader's copies. May be called again."""
        self.offloader_copies.give_back()
        self.buffered.clear()
        self.staging.note_copies_freed()


def capture_state(
    state: Mapping[str, Any], staging: StagingMemory, *, copy: bool, offloader: OffloadedState | None
) -> CapturedState:
    """Hold ``state``; with ``copy``, the caller may change it as soon as this returns.

    Raises CheckpointSaveError for two values of one name, sparse tensors, and values that only a pickle could hold, and
    MemoryStateError for an offloaded tensor without a copy in ``offloader``.
    """
    planner = SafeSavePlanner()
    with distinct_names(CheckpointSaveError):
        planner.set_up_planner(dict(state))
    parts = local_parts(planner.state_dict)
    for (name, _), tensor in parts:
        _require_dense(name, tensor)
    offloaded = {key: tensor for key, tensor in parts if _is_offloaded(tensor)}
    resident = {key: tensor for key, tensor in parts if key not in offloaded}
    with contextlib.ExitStack() as undo:
        undo.callback(staging.note_copies_freed)
        if copy:
            with staging.copying(resident) as (on_host, on_device):
                copies = _borrow(offloader, offloaded, undo)
                values = _plain_values(planner)  # while the copies are made
            buffered = dict(on_device)
        else:
            copies = _borrow(offloader, offloaded, undo)
            values = _plain_values(planner)
            staging.synchronize()
            on_host, buffered = {}, resident
        staging.open_buffers(buffered)
        undo.pop_all()
    return CapturedState(
        planner=planner,
        values=values,
        on_host=dict(on_host),
        buffered=buffered,
        offloaded=offloaded,
        offloader_copies=copies,
        staging=staging,
        staged_nbytes=_nbytes(on_host),
        cloned_nbytes=_nbytes(buffered) if copy else 0,
    )


def _borrow(
    offloader: OffloadedState | None, offloaded: Mapping[PartKey, torch.Tensor], undo: contextlib.ExitStack
) -> LentState:
    """Borrow all of the offloader's copies; raise if a tensor has none."""
    copies: LentState = HostCopies([]) if offloader is None else offloader.lend_all()
    undo.callback(copies.give_back)
    for (name, _), tensor in offloaded.items():
        if not copies.holds(tensor):
            raise _offloaded_error(name)
    return copies


def _plain_values(planner: SafeSavePlanner) -> dict[str, torch.Tensor | io.BytesIO]:
    """Return the values that are no tensors, as bytes."""
    return {
        name: planner.resolve_data(WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO))
        for name, value in planner.state_dict.items()
        if not isinstance(value, torch.Tensor)
    }


# -- the plan -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ItemPlan:
    """The items of one rank, none of them large, offloaded tensors first.

    ``keys`` maps each name to its place in the nested state. ``origins`` maps each item to its part of the
    state, and to its offset there.
    """

    items: list[WriteItem]
    keys: Mapping[str, Keys]
    origins: Mapping[tuple[str, Offset], tuple[PartKey, Offset]]

    def origin_of(self, item: WriteItem) -> tuple[PartKey, Offset]:
        """Return the part of the state with ``item``, and the offset of ``item`` in it."""
        return self.origins[_item_key(item)]


def plan_items(captured: CapturedState, *, max_item_nbytes: int) -> ItemPlan:
    """Return the plan of a captured state. Tensors of more than ``max_item_nbytes`` are split."""
    planner = captured.planner
    plan = planner.create_local_plan()
    items: list[WriteItem] = []
    origins: dict[tuple[str, Offset], tuple[PartKey, Offset]] = {}
    for whole in plan.items:
        if _is_empty_part(whole):
            continue
        name = whole.index.fqn
        is_sharded = isinstance(planner.state_dict[name], LocalShards)
        part = (name, tuple(whole.index.offset or ()) if is_sharded else None)
        for begin, item in split_item(whole, max_nbytes=max_item_nbytes):
            items.append(item)
            origins[_item_key(item)] = part, begin
    items.sort(key=lambda item: origins[_item_key(item)][0] not in captured.offloaded)
    return ItemPlan(items, plan.planner_data, origins)


def _is_empty_part(item: WriteItem) -> bool:
    """Return whether ``item`` is an empty part of a tensor that has elements.

    It has nothing to save, but may have the name and the offset of a part that has.
    """
    data = item.tensor_data
    return data is not None and 0 in data.chunk.sizes and 0 not in data.size


def _item_key(item: WriteItem) -> tuple[str, Offset]:
    return item.index.fqn, tuple(item.index.offset or ())


# -- reading --------------------------------------------------------------------------------------------------------


class StateReader:
    """Reads ``items`` of a plan, each once, from any threads.

    Each offloaded tensor is borrowed separately, until its last item is read: an offload waits for it and for nothing
    else. A tensor on the device is dropped when its last item is read. Parts of the state without an item are released
    at once: another rank writes them.
    """

    def __init__(self, captured: CapturedState, plan: ItemPlan, items: Sequence[WriteItem]) -> None:
        self._captured, self._plan = captured, plan
        self._unread = Counter(plan.origin_of(item)[0] for item in items)
        self._lock = threading.Lock()
        self._lent: dict[PartKey, LentTensor] = {}
        for part in captured.offloaded.keys() & self._unread.keys():
            copy = captured.offloader_copies.lend(captured.offloaded[part])
            assert copy is not None, "it was there when the state was captured"
            self._lent[part] = copy
        captured.offloader_copies.give_back()
        for part in captured.buffered.keys() - self._unread.keys():
            del captured.buffered[part]

    @contextlib.contextmanager
    def reading(self, item: WriteItem) -> Iterator[torch.Tensor | io.BytesIO]:
        """Yield the content of ``item``: a tensor on the host, or bytes."""
        if item.type is WriteItemType.BYTE_IO:
            yield self._captured.values[item.index.fqn]
            return
        part, begin = self._plan.origin_of(item)
        assert item.tensor_data is not None, "it is a tensor"
        cut = tuple(slice(at, at + size) for at, size in zip(begin, item.tensor_data.chunk.sizes, strict=True))
        with self._on_host(part, cut) as tensor:
            yield tensor
        with self._lock:
            self._unread[part] -= 1
            if not self._unread[part]:
                self._release(part)

    @contextlib.contextmanager
    def _on_host(self, part: PartKey, cut: tuple[slice, ...]) -> Iterator[torch.Tensor]:
        if part in self._captured.buffered:
            with self._captured.staging.buffers.reading(self._captured.buffered[part][cut]) as tensor:
                yield tensor
            return
        whole = self._lent[part].tensor if part in self._lent else self._captured.on_host[part]
        yield alone(whole[cut].contiguous())

    def _release(self, part: PartKey) -> None:
        self._captured.buffered.pop(part, None)
        if part in self._lent:
            self._lent[part].give_back()

    def close(self) -> None:
        """Give back all copies still lent. May be called again."""
        for copy in self._lent.values():
            copy.give_back()


# -- tensors without memory -----------------------------------------------------------------------------------------


def require_memory(state: Mapping[str, Any]) -> None:
    """Raise MemoryStateError if a tensor of a flat state is offloaded."""
    for (name, _), tensor in local_parts(state):
        if _is_offloaded(tensor):
            raise _offloaded_error(name)


def _offloaded_error(name: str) -> MemoryStateError:
    return MemoryStateError(
        f"{name!r} has no memory",
        why="it is offloaded",
        fix="give save its `offloader=`, or save and resume inside `with offloader.loaded():`",
    )


def _require_dense(name: str, tensor: torch.Tensor) -> None:
    if tensor.layout is not torch.strided:
        raise CheckpointSaveError(
            f"state {name!r} cannot be saved",
            why=f"it is a {tensor.layout} tensor",
            fix="save it as to_dense(), or the tensors that make it up",
        )


def _is_offloaded(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.untyped_storage().nbytes() == 0 and tensor.numel() > 0


def _nbytes(tensors: Mapping[PartKey, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())
