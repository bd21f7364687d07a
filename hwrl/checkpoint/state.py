"""One rank's state in a save: :class:`CapturedState`, its :class:`ItemPlan`, and the :class:`CapturedStateReader`."""

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
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from hwrl.checkpoint.layout import StatePath
from hwrl.checkpoint.planners import SafeSavePlanner, duplicate_names_as
from hwrl.checkpoint.shards import LocalKey, LocalShards, Offset, local_tensors
from hwrl.checkpoint.split import split_item
from hwrl.checkpoint.staging import StagingMemory
from hwrl.errors import CheckpointSaveError, MemoryStateError
from hwrl.interfaces import LentState, LentTensor, OffloadedState
from hwrl.memory import HostCopies
from hwrl.memory.slabs import alone


@dataclass(frozen=True)
class CapturedState:
    """One rank's state, kept until it is written. In a background save, training may change the original meanwhile.

    Each local tensor is in one of three mappings:

    - ``on_host``: copies in the staging memory on the host. They are written from there.
    - ``via_buffers``: tensors that are read through ``staging.buffers`` when they are written. They are copies on the
      device or, in a foreground save, the caller's own tensors.
    - ``offloaded``: tensors with empty storage. Their content is in ``offloader_copies``, lent by the offloader.

    ``values`` has all non-tensor values, as bytes.

    When a tensor in ``via_buffers`` has been written, it is removed from there, so that its memory can be freed.
    ``close`` empties ``via_buffers`` and gives the offloader's copies back. The other fields keep their content;
    ``planner`` refers to the caller's tensors.
    """

    planner: SafeSavePlanner
    values: Mapping[str, torch.Tensor | io.BytesIO]
    on_host: Mapping[LocalKey, torch.Tensor]
    via_buffers: dict[LocalKey, torch.Tensor]
    offloaded: Mapping[LocalKey, torch.Tensor]
    offloader_copies: LentState
    staging: StagingMemory
    staged_nbytes: int
    cloned_nbytes: int

    @property
    def lent_nbytes(self) -> int:
        """The size of the tensors in the offloader's copies. This rank may read only some of them."""
        return _nbytes(self.offloaded)

    def close(self) -> None:
        """Release the tensors and the offloader's copies. May be called more than once."""
        self.offloader_copies.give_back()
        self.via_buffers.clear()
        self.staging.note_copies_freed()


def capture_state(
    state: Mapping[str, Any], staging: StagingMemory, *, copy: bool, offloader: OffloadedState | None
) -> CapturedState:
    """Capture ``state``. With ``copy``, the caller may change its contents as soon as this returns.

    The caller must not change the shape of a tensor or the ``pieces`` of a LocalShards until the plan is made. Without
    ``copy``, the tensors are not copied, and the caller must not change them at all until they are written.

    Raises CheckpointSaveError for two values with the same name, for a sparse tensor, and for a value that could be
    loaded only by executing a pickle. Raises MemoryStateError for an offloaded tensor without a copy in ``offloader``.
    """
    planner = SafeSavePlanner()
    with duplicate_names_as(CheckpointSaveError):
        planner.set_up_planner(dict(state))
    tensors = local_tensors(planner.state_dict)
    for (name, _), tensor in tensors:
        _require_dense(name, tensor)
    offloaded = {key: tensor for key, tensor in tensors if _is_offloaded(tensor)}
    resident = {key: tensor for key, tensor in tensors if key not in offloaded}
    with contextlib.ExitStack() as undo:
        undo.callback(staging.note_copies_freed)
        if copy:
            with staging.copying(resident) as (on_host, on_device):
                copies = _borrow(offloader, offloaded, undo)
                values = _plain_values(planner)  # encoded while the copies are being made
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
        via_buffers=buffered,
        offloaded=offloaded,
        offloader_copies=copies,
        staging=staging,
        staged_nbytes=_nbytes(on_host),
        cloned_nbytes=_nbytes(buffered) if copy else 0,
    )


def _borrow(
    offloader: OffloadedState | None, offloaded: Mapping[LocalKey, torch.Tensor], undo: contextlib.ExitStack
) -> LentState:
    """Borrow all copies of the offloader. Raise MemoryStateError if one of ``offloaded`` has no copy there."""
    copies: LentState = HostCopies([]) if offloader is None else offloader.lend_all()
    undo.callback(copies.give_back)
    for (name, _), tensor in offloaded.items():
        if not copies.holds(tensor):
            raise _offloaded_error(name)
    return copies


def _plain_values(planner: SafeSavePlanner) -> dict[str, torch.Tensor | io.BytesIO]:
    """Return the non-tensor values as bytes, by name."""
    return {
        name: planner.resolve_data(WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO))
        for name, value in planner.state_dict.items()
        if not isinstance(value, torch.Tensor)
    }


# -- the plan -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ItemPlan:
    """The items of one rank. Large tensors are split into several items, and the items of offloaded tensors come first.

    ``state_paths`` maps each name to its path in the nested state. ``origins`` maps each item to its local tensor, and
    to the item's offset in this tensor.
    """

    items: list[WriteItem]
    state_paths: Mapping[str, StatePath]
    origins: Mapping[tuple[str, Offset], tuple[LocalKey, Offset]]

    def origin_of(self, item: WriteItem) -> tuple[LocalKey, Offset]:
        """Return the key of the local tensor with ``item``, and the offset of ``item`` in it."""
        return self.origins[_item_key(item)]


def plan_items(captured: CapturedState, *, max_item_nbytes: int) -> ItemPlan:
    """Return the plan for a captured state. Tensors of more than ``max_item_nbytes`` are split."""
    planner = captured.planner
    plan = planner.create_local_plan()
    items: list[WriteItem] = []
    origins: dict[tuple[str, Offset], tuple[LocalKey, Offset]] = {}
    for whole in plan.items:
        if _is_empty_shard(whole):
            continue
        name = whole.index.fqn
        is_rectangle = isinstance(planner.state_dict[name], LocalShards)
        key = (name, tuple(whole.index.offset or ()) if is_rectangle else None)
        for begin, item in split_item(whole, max_nbytes=max_item_nbytes):
            items.append(item)
            origins[_item_key(item)] = key, begin
    items.sort(key=lambda item: origins[_item_key(item)][0] not in captured.offloaded)
    return ItemPlan(items, plan.planner_data, origins)


def _is_empty_shard(item: WriteItem) -> bool:
    """Return whether ``item`` is an empty shard of a tensor that has elements.

    It must be left out: another rank may have a non-empty shard with the same name and offset.
    """
    data = item.tensor_data
    return data is not None and 0 in data.chunk.sizes and 0 not in data.size


def _item_key(item: WriteItem) -> tuple[str, Offset]:
    return item.index.fqn, tuple(item.index.offset or ())


# -- reading --------------------------------------------------------------------------------------------------------


class CapturedStateReader:
    """Reads the content of ``items`` from a captured state in memory. Any thread may read; each item is read once.

    From each offloaded tensor with an item here, the offloader's copy is borrowed until its last item has been read. So
    an offload waits for these copies only. A tensor in ``via_buffers`` is dropped when its last item has been read, or
    at once if another rank writes it.
    """

    def __init__(self, captured: CapturedState, plan: ItemPlan, items: Sequence[WriteItem]) -> None:
        self._captured, self._plan = captured, plan
        self._unread = Counter(plan.origin_of(item)[0] for item in items)
        self._lock = threading.Lock()
        self._lent: dict[LocalKey, LentTensor] = {}
        for key in captured.offloaded.keys() & self._unread.keys():
            copy = captured.offloader_copies.lend(captured.offloaded[key])
            assert copy is not None, "capture_state has checked that the offloader has a copy"
            self._lent[key] = copy
        captured.offloader_copies.give_back()
        for key in captured.via_buffers.keys() - self._unread.keys():
            del captured.via_buffers[key]

    @contextlib.contextmanager
    def reading(self, item: WriteItem) -> Iterator[torch.Tensor | io.BytesIO]:
        """Yield the content of ``item``: a tensor on the host, or the bytes of a non-tensor value."""
        if item.type is WriteItemType.BYTE_IO:
            yield self._captured.values[item.index.fqn]
            return
        key, begin = self._plan.origin_of(item)
        assert item.tensor_data is not None, "it is a tensor"
        cut = tuple(slice(at, at + size) for at, size in zip(begin, item.tensor_data.chunk.sizes, strict=True))
        with self._on_host(key, cut) as tensor:
            yield tensor
        with self._lock:
            self._unread[key] -= 1
            if not self._unread[key]:
                self._release(key)

    @contextlib.contextmanager
    def _on_host(self, key: LocalKey, cut: tuple[slice, ...]) -> Iterator[torch.Tensor]:
        if key in self._captured.via_buffers:
            with self._captured.staging.buffers.reading(self._captured.via_buffers[key][cut]) as tensor:
                yield tensor
            return
        whole = self._lent[key].tensor if key in self._lent else self._captured.on_host[key]
        yield alone(whole[cut].contiguous())

    def _release(self, key: LocalKey) -> None:
        self._captured.via_buffers.pop(key, None)
        if key in self._lent:
            self._lent[key].give_back()

    def close(self) -> None:
        """Give back all copies that are still lent. May be called more than once."""
        for copy in self._lent.values():
            copy.give_back()


# -- tensors that cannot be saved -----------------------------------------------------------------------------------


def require_storage(state: Mapping[str, Any]) -> None:
    """Raise MemoryStateError if a tensor of a flat state is offloaded, so that its storage is empty."""
    for (name, _), tensor in local_tensors(state):
        if _is_offloaded(tensor):
            raise _offloaded_error(name)


def _offloaded_error(name: str) -> MemoryStateError:
    return MemoryStateError(
        f"{name!r} has no storage",
        why="the tensor is offloaded",
        fix="save with the `offloader=` that holds it; or save and resume inside `with offloader.loaded():`",
    )


def _require_dense(name: str, tensor: torch.Tensor) -> None:
    if tensor.layout is not torch.strided:
        raise CheckpointSaveError(
            f"state {name!r} cannot be saved",
            why=f"it is a {tensor.layout} tensor",
            fix="save its to_dense(), or save the tensors that it consists of",
        )
    if is_traceable_wrapper_subclass(tensor):
        raise CheckpointSaveError(
            f"state {name!r} cannot be saved",
            why=f"its elements are in other tensors of a {type(tensor).__name__}",
            fix="save the tensors that it consists of; of an unsharded optimizer, the manager's optimizer= does",
        )


def _is_offloaded(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.untyped_storage().nbytes() == 0 and tensor.numel() > 0


def _nbytes(tensors: Mapping[LocalKey, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())
