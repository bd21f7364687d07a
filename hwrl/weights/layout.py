"""Where every tensor lies in the stream of bytes that carries a model: planned once, agreed once, then never sent."""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from hwrl.errors import LayoutMismatchError

ALIGNMENT_NBYTES = 512
# A tensor this large travels in slabs of its own, so that the sender need not copy it into one first.
_OWN_SLAB_NBYTES = 4 << 20
_MAX_NBYTES = 1 << 50
_MAX_SLABS = 1 << 20
_FORMAT = 1
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and str(dtype).startswith(("torch.float", "torch.bfloat", "torch.complex"))
} | {
    name: getattr(torch, name)
    for name in ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
}


@dataclass(frozen=True)
class Entry:
    """One tensor: its bytes begin at ``offset`` of the layout. A tied tensor shares the bytes of ``alias_of``."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    alias_of: str | None = None

    @property
    def nbytes(self) -> int:
        """The tensor's size."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Piece:
    """Bytes ``start`` to ``start + nbytes`` of tensor number ``entry``, at ``at`` in their slab."""

    entry: int
    start: int
    nbytes: int
    at: int


@dataclass(frozen=True)
class Slab:
    """Bytes ``offset`` to ``offset + nbytes`` of the layout: what one broadcast carries."""

    offset: int
    nbytes: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class WeightLayout:
    """Names, dtypes, shapes and offsets of a model's tensors, and their division into slabs.

    Every tensor begins at a multiple of 512 bytes. Tensors of one storage, offset, shape and stride (tied weights)
    take their bytes once. A tensor larger than a slab is divided by bytes. Immutable; equal layouts have equal hashes.

    >>> layout = WeightLayout.plan([("w", torch.zeros(300)), ("scale", torch.tensor(1.0))])
    >>> [(entry.name, entry.offset) for entry in layout.entries], layout.nbytes, layout.payload_nbytes
    ([('w', 0), ('scale', 1536)], 1540, 1204)
    >>> WeightLayout.from_json(layout.to_json()) == layout
    True
    """

    entries: tuple[Entry, ...]
    slab_nbytes: int
    slabs: tuple[Slab, ...]

    @classmethod
    def plan(cls, named: Iterable[tuple[str, torch.Tensor]], *, slab_nbytes: int = 16 << 20) -> WeightLayout:
        """Plan the layout of ``named`` tensors, in that order; reads no values and keeps no tensor."""
        tensors = list(named)  # all alive at once: a freed tensor's address would look like a tie
        ties = find_ties(tensors)
        rows = [(name, tensor.dtype, tuple(tensor.shape), ties.get(name)) for name, tensor in tensors]
        return _build(rows, slab_nbytes)

    @classmethod
    def from_json(cls, text: str | bytes) -> WeightLayout:
        """Read what :meth:`to_json` wrote; raises LayoutMismatchError for anything else, however malformed."""
        try:
            found = json.loads(text)
        except (ValueError, RecursionError) as exc:
            raise _malformed(f"it is no JSON ({type(exc).__name__})") from exc
        if not isinstance(found, dict) or found.keys() != {"format", "slab_nbytes", "tensors"}:
            raise _malformed("it has other keys than format, slab_nbytes and tensors")
        if found["format"] != _FORMAT:
            raise _malformed(f"its format is {found['format']!r}, and this hwrl reads format {_FORMAT}")
        if not isinstance(found["tensors"], list):
            raise _malformed("tensors is no list")
        return _build([_row(item) for item in found["tensors"]], found["slab_nbytes"])

    def to_json(self) -> str:
        """Return the layout as canonical JSON: equal layouts give equal text."""
        tensors = [[e.name, str(e.dtype).removeprefix("torch."), list(e.shape), e.alias_of] for e in self.entries]
        return json.dumps(
            {"format": _FORMAT, "slab_nbytes": self.slab_nbytes, "tensors": tensors}, separators=(",", ":")
        )

    @functools.cached_property
    def hash(self) -> str:
        """The SHA-256 of :meth:`to_json`, in hexadecimal."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    @functools.cached_property
    def nbytes(self) -> int:
        """The size of a flat buffer that holds the whole layout, gaps between tensors included."""
        return self.slabs[-1].offset + self.slabs[-1].nbytes if self.slabs else 0

    @functools.cached_property
    def payload_nbytes(self) -> int:
        """The bytes of the tensors themselves, tied ones once."""
        return sum(entry.nbytes for entry in self.entries if entry.alias_of is None)

    def views(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return every tensor as a view of ``flat``, a 1-d uint8 tensor of :attr:`nbytes` at an aligned address."""
        return {
            entry.name: view_bytes(flat[entry.offset : entry.offset + entry.nbytes], entry) for entry in self.entries
        }

    def check(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Raise LayoutMismatchError, naming the first difference, unless ``named`` are the planned tensors in order."""
        tensors = list(named)
        ties = find_ties(tensors)
        for entry, (name, tensor) in zip(self.entries, tensors, strict=False):
            _check_entry(entry, name, tensor, ties.get(name))
        if len(tensors) != len(self.entries):
            raise _changed(f"{len(self.entries)} tensors were planned and {len(tensors)} came")


def view_bytes(raw: torch.Tensor, entry: Entry) -> torch.Tensor:
    """Return ``raw``, the bytes of ``entry``, as its dtype and shape."""
    return raw.view(entry.dtype).view(entry.shape)


def find_ties(named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """Return, for each tensor that is the same memory as an earlier one, that one's name."""
    first: dict[tuple[Any, ...], str] = {}
    ties = {}
    for name, tensor in named:
        address = tensor.data_ptr()
        if address == 0 or tensor.numel() == 0:
            continue
        key = (tensor.device, address, tensor.dtype, tensor.shape, tensor.stride())
        if key in first:
            ties[name] = first[key]
        else:
            first[key] = name
    return ties


_Row = tuple[str, torch.dtype, tuple[int, ...], str | None]


def _build(rows: list[_Row], slab_nbytes: Any) -> WeightLayout:
    if not _is_count(slab_nbytes) or slab_nbytes == 0 or slab_nbytes % ALIGNMENT_NBYTES:
        raise _malformed(f"slab_nbytes is {slab_nbytes!r}, no positive multiple of {ALIGNMENT_NBYTES}")
    planner = _Planner(slab_nbytes)
    for row in rows:
        planner.add(*row)
    return planner.finish()


class _Planner:
    """Gives each tensor its offset, and closes a slab whenever the next tensor does not belong into it."""

    def __init__(self, slab_nbytes: int) -> None:
        self._slab_nbytes = slab_nbytes
        self._own_nbytes = min(_OWN_SLAB_NBYTES, slab_nbytes // 4)
        self._entries: dict[str, Entry] = {}
        self._slabs: list[Slab] = []
        self._pieces: list[Piece] = []
        self._begin = self._end = 0

    def add(self, name: str, dtype: torch.dtype, shape: tuple[int, ...], alias_of: str | None) -> None:
        if name in self._entries:
            raise _malformed(f"two tensors are called {name!r}")
        if str(dtype).removeprefix("torch.") not in _DTYPES:
            raise _malformed(f"tensor {name!r} has dtype {dtype}, which cannot be sent")
        if alias_of is not None:
            self._entries[name] = self._alias(name, dtype, shape, alias_of)
            return
        entry = Entry(name, dtype, shape, self._end + -self._end % ALIGNMENT_NBYTES)
        if entry.nbytes == 0:
            entry = replace(entry, offset=0)  # the end may be beyond the buffer, and not aligned there
        self._place(entry, len(self._entries))
        self._entries[name] = entry

    def finish(self) -> WeightLayout:
        self._close()
        return WeightLayout(tuple(self._entries.values()), self._slab_nbytes, tuple(self._slabs))

    def _alias(self, name: str, dtype: torch.dtype, shape: tuple[int, ...], alias_of: str) -> Entry:
        target = self._entries.get(alias_of)
        if target is None or target.alias_of is not None or (target.dtype, target.shape) != (dtype, shape):
            raise _malformed(f"tensor {name!r} is tied to {alias_of!r}, which is no earlier tensor of its kind")
        return Entry(name, dtype, shape, target.offset, alias_of)

    def _place(self, entry: Entry, index: int) -> None:
        if entry.offset + entry.nbytes > min(_MAX_NBYTES, _MAX_SLABS * self._slab_nbytes):
            raise _malformed(f"tensor {entry.name!r} ends beyond {_MAX_SLABS:,} slabs or {_MAX_NBYTES:,} bytes")
        alone = entry.nbytes >= self._own_nbytes
        if alone or entry.offset + entry.nbytes > self._begin + self._slab_nbytes:
            self._close()
            self._begin = entry.offset
        for start in range(0, entry.nbytes, self._slab_nbytes):
            nbytes = min(self._slab_nbytes, entry.nbytes - start)
            self._pieces.append(Piece(index, start, nbytes, entry.offset + start - self._begin))
            self._end = entry.offset + start + nbytes
            if alone:
                self._close()

    def _close(self) -> None:
        if self._pieces:
            self._slabs.append(Slab(self._begin, self._end - self._begin, tuple(self._pieces)))
        self._pieces = []
        self._begin = self._end + -self._end % ALIGNMENT_NBYTES


def _row(item: Any) -> _Row:
    if not isinstance(item, list) or len(item) != 4:
        raise _malformed(f"{_shown(item)} is not name, dtype, shape and tie")
    name, dtype, shape, alias_of = item
    if not isinstance(name, str) or not (alias_of is None or isinstance(alias_of, str)):
        raise _malformed(f"{_shown(item)} has a name that is no text")
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise _malformed(f"tensor {name!r} has dtype {_shown(dtype)}, which this torch cannot send")
    if not isinstance(shape, list) or len(shape) > 64 or not all(_is_count(length) for length in shape):
        raise _malformed(f"tensor {name!r} has shape {_shown(shape)}")
    if math.prod(length for length in shape if length) > _MAX_NBYTES:  # an empty tensor's strides must fit too
        raise _malformed(f"tensor {name!r} has shape {_shown(shape)}")
    return name, _DTYPES[dtype], tuple(shape), alias_of


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_NBYTES


def _shown(value: Any) -> str:
    return repr(value)[:80]


def _check_entry(entry: Entry, name: str, tensor: torch.Tensor, tie: str | None) -> None:
    if name != entry.name:
        raise _changed(f"tensor {entry.name!r} was planned here and {name!r} came")
    if tensor.dtype != entry.dtype or tuple(tensor.shape) != entry.shape:
        planned = f"{entry.dtype} {list(entry.shape)}"
        raise _changed(f"tensor {name!r} was planned as {planned} and came as {tensor.dtype} {list(tensor.shape)}")
    if entry.alias_of is not None and tie != entry.alias_of:
        raise _changed(f"tensor {name!r} was tied to {entry.alias_of!r} and no longer is")


def _changed(why: str) -> LayoutMismatchError:
    return LayoutMismatchError(
        "the tensors are not those of the agreed layout",
        why=why,
        fix="publish the same tensors in the same order, or make a new WeightSender for the new ones",
    )


def _malformed(why: str) -> LayoutMismatchError:
    return LayoutMismatchError("this is no weight layout", why=why, fix="use the same hwrl on both sides")
