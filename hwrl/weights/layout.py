"""The weight layout: the offset of every tensor in a version's bytes, and its buckets.

Sender and receivers agree on it once, by its hash; versions with the same layout bring no metadata.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from hwrl.errors import LayoutMismatchError, WeightsError

NamedTensor = tuple[str, torch.Tensor]
ALIGNMENT_NBYTES = 512
OWN_NBYTES = 1 << 20
_MAX_NBYTES = 1 << 50
_MAX_BUCKETS = 1 << 20
_FORMAT = 2
_KEYS = ("bucket_nbytes", "own_nbytes", "alignment")
_ALIGNMENTS = (512, 256, 128, 64, 32, 16)
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
    """One tensor. Its bytes begin at ``offset`` of the layout. A tied tensor shares the bytes of ``alias_of``."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    alias_of: str | None = None

    @functools.cached_property
    def nbytes(self) -> int:
        """The tensor's size."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Piece:
    """Bytes ``start`` to ``start + nbytes`` of tensor number ``entry``, at offset ``at`` of a bucket.

    ``whole`` says that they are all bytes of the tensor.
    """

    entry: int
    start: int
    nbytes: int
    at: int
    whole: bool


@dataclass(frozen=True)
class Bucket:
    """Bytes ``offset`` to ``offset + nbytes`` of the layout, which are transferred together."""

    offset: int
    nbytes: int
    pieces: tuple[Piece, ...]

    @functools.cached_property
    def entries(self) -> tuple[int, ...]:
        """The number of each piece's tensor."""
        return tuple(piece.entry for piece in self.pieces)


@dataclass(frozen=True)
class WeightLayout:
    """Names, dtypes, shapes and offsets of a model's tensors, and their division into buckets.

    There are two kinds of layouts:

    - For separate tensors. A tensor of ``own_nbytes`` or more shares no bucket, so it can be sent from where it is.
      ``own_nbytes`` never exceeds a bucket's size. Smaller tensors share buckets.
    - Flat, for tensors that are contiguous in one storage. They share buckets whatever their size, and each bucket can
      be sent in place. These buckets are twice as large.

    Tensors in a shared bucket begin at multiples of ``alignment`` bytes. A tensor larger than a bucket is divided by
    bytes. Tied tensors (same storage, offset, shape and stride) are counted once. A large tensor does not close the
    shared bucket before it, so buckets are sorted by their last tensor. Immutable; equal layouts have equal hashes.

    >>> layout = WeightLayout.plan([("w", torch.zeros(300)), ("scale", torch.tensor(1.0))])
    >>> [(entry.name, entry.offset) for entry in layout.entries], layout.nbytes, layout.payload_nbytes
    ([('w', 0), ('scale', 1536)], 1540, 1204)
    >>> WeightLayout.from_json(layout.to_json()) == layout
    True
    """

    entries: tuple[Entry, ...]
    bucket_nbytes: int
    own_nbytes: int
    alignment: int
    buckets: tuple[Bucket, ...]

    @classmethod
    def plan(
        cls,
        named: Iterable[NamedTensor],
        *,
        bucket_nbytes: int = 16 << 20,
        own_nbytes: int = OWN_NBYTES,
        flat: bool = False,
    ) -> WeightLayout:
        """Plan the layout of the ``named`` tensors, in their order. Values are not read, so meta tensors are enough.

        ``flat`` plans a flat layout for meta tensors. Allocate its storage later, and get the tensors by :meth:`views`.
        """
        tensors = [
            checked_pair(pair) for pair in named
        ]  # keep all alive: the address of a freed tensor could be used again and look like a tie
        ties = find_ties(tensors)
        rows = [(name, tensor.dtype, tuple(tensor.shape), ties.get(name)) for name, tensor in tensors]
        flat_alignment = _flat_alignment([tensor for name, tensor in tensors if name not in ties])
        if flat or flat_alignment is not None:
            # Buckets sent in place cost no ring memory, so they can be twice as large. But the receiver may need a ring
            # with slots of this size.
            return _build(rows, 2 * bucket_nbytes, _MAX_NBYTES, flat_alignment or ALIGNMENT_NBYTES)
        return _build(rows, bucket_nbytes, min(own_nbytes, bucket_nbytes), ALIGNMENT_NBYTES)

    @classmethod
    def from_json(cls, text: str | bytes) -> WeightLayout:
        """Read the text of :meth:`to_json`. Raises LayoutMismatchError for any other text."""
        try:
            found = json.loads(text)
        except (ValueError, RecursionError) as exc:
            raise _malformed(
                f"it is not JSON ({type(exc).__name__})" if text else "the store does not have it"
            ) from exc
        if not isinstance(found, dict) or found.keys() != {"format", *_KEYS, "tensors"}:
            raise _malformed(f"its keys are not format, {', '.join(_KEYS)} and tensors")
        if found["format"] != _FORMAT:
            raise _malformed(f"its format is {found['format']!r}, and this hwrl reads format {_FORMAT}")
        if not isinstance(found["tensors"], list):
            raise _malformed("tensors is not a list")
        return _build([_row(item) for item in found["tensors"]], *(found[key] for key in _KEYS))

    def to_json(self) -> str:
        """Return the layout as canonical JSON, so that equal layouts give equal text."""
        tensors = [[e.name, str(e.dtype).removeprefix("torch."), list(e.shape), e.alias_of] for e in self.entries]
        sizes = {key: getattr(self, key) for key in _KEYS}
        return json.dumps({"format": _FORMAT, **sizes, "tensors": tensors}, separators=(",", ":"))

    @functools.cached_property
    def hash(self) -> str:
        """The SHA-256 of :meth:`to_json`, in hexadecimal."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    @functools.cached_property
    def nbytes(self) -> int:
        """The size of a flat buffer for the whole layout, including gaps between tensors."""
        return self.buckets[-1].offset + self.buckets[-1].nbytes if self.buckets else 0

    @functools.cached_property
    def largest_bucket_nbytes(self) -> int:
        """The size of the largest bucket; 0 without buckets."""
        return max((bucket.nbytes for bucket in self.buckets), default=0)

    @functools.cached_property
    def payload_nbytes(self) -> int:
        """The bytes of the tensors themselves, counting tied tensors once."""
        return sum(entry.nbytes for entry in self.entries if entry.alias_of is None)

    def views(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return every tensor as a view of ``flat``, a 1-d uint8 tensor of :attr:`nbytes` at an aligned address."""
        return {
            entry.name: view_bytes(flat[entry.offset : entry.offset + entry.nbytes], entry) for entry in self.entries
        }


JOINT_READ = (
    "make the sender on every rank with the group of these ranks, WeightSender(store, group=group), and call "
    "publish(version, model) on every rank (docs/weights.md)"
)
"""How weights that are divided among ranks are sent."""


def checked_pair(pair: Any) -> NamedTensor:
    """Return ``pair`` if it is a name and a tensor with memory of its own; a DTensor of one rank as its local tensor.

    Raises WeightsError, with the name, for anything else.
    """
    if not isinstance(pair, tuple | list) or len(pair) != 2 or not isinstance(pair[0], str):
        raise WeightsError(
            "these weights have no names",
            why=f"each must be a name and a tensor, and one is {_shown_kind(pair)}",
            fix="publish the module, a mapping of names to tensors, or module.named_parameters()",
        )
    name, tensor = pair
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
        raise WeightsError(
            f"{name!r} cannot be sent",
            why=f"it is {_shown_kind(tensor)}, and not a dense tensor",
            fix="leave it out; a module's own extra state is left out if you publish the module",
        )
    if not hasattr(tensor, "__tensor_flatten__"):  # most tensors
        return name, tensor
    if isinstance(tensor, DTensor):
        if tensor.device_mesh.size() == 1:
            return name, tensor.to_local()
        why, fix = f"it is a DTensor: {tensor.device_mesh.size()} ranks share it", JOINT_READ
    else:
        why, fix = f"it is a {type(tensor).__name__}, which has no memory of its own", "publish its plain tensors"
    raise WeightsError(f"tensor {name!r} cannot be sent", why=why, fix=fix)


def _shown_kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a {value.layout} tensor of shape {list(value.shape)}"
    return f"a {type(value).__name__}"


def view_bytes(raw: torch.Tensor, entry: Entry) -> torch.Tensor:
    """Return ``raw``, the bytes of ``entry``, as a tensor of its dtype and shape."""
    return raw.view(entry.dtype).view(entry.shape)


def memory_key(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the address of ``tensor``, and whether it conjugates or negates what is there."""
    return tensor.data_ptr(), tensor.is_conj(), tensor.is_neg()


def find_ties(named: Iterable[NamedTensor]) -> dict[str, str]:
    """Return, for each tensor with the same memory and elements as an earlier one, the earlier one's name.

    A meta tensor has no memory, so two names are tied if they have the same tensor object.
    """
    first: dict[tuple[Any, ...], str] = {}
    ties = {}
    for name, tensor in named:
        address = (id(tensor),) if tensor.is_meta else memory_key(tensor)
        if address[0] == 0 or tensor.numel() == 0:
            continue
        key = (tensor.device, address, tensor.dtype, tensor.shape, tensor.stride())
        if key in first:
            ties[name] = first[key]
        else:
            first[key] = name
    return ties


_Row = tuple[str, torch.dtype, tuple[int, ...], str | None]


def _build(rows: list[_Row], bucket_nbytes: Any, own_nbytes: Any, alignment: Any) -> WeightLayout:
    if not _is_count(bucket_nbytes) or bucket_nbytes == 0 or bucket_nbytes % ALIGNMENT_NBYTES:
        raise _malformed(f"bucket_nbytes is {bucket_nbytes!r}, not a positive multiple of {ALIGNMENT_NBYTES}")
    if not _is_count(own_nbytes):
        raise _malformed(f"own_nbytes is {own_nbytes!r}")
    if alignment not in _ALIGNMENTS:
        raise _malformed(f"alignment is {alignment!r}, not one of {_ALIGNMENTS}")
    planner = _Planner(bucket_nbytes, own_nbytes, alignment)
    for row in rows:
        planner.add(*row)
    return planner.finish()


class _Planner:
    """Gives each tensor its offset. A bucket gets its own when it is closed; one with small tensors stays open."""

    def __init__(self, bucket_nbytes: int, own_nbytes: int, alignment: int) -> None:
        self._bucket_nbytes, self._own_nbytes, self._alignment = bucket_nbytes, own_nbytes, alignment
        self._entries: dict[str, Entry] = {}
        self._offsets: dict[int, int] = {}  # by the entry's number
        self._buckets: list[Bucket] = []
        self._open: list[Piece] = []
        self._end = 0

    def add(self, name: str, dtype: torch.dtype, shape: tuple[int, ...], alias_of: str | None) -> None:
        if name in self._entries:
            raise _malformed(f"two tensors are called {name!r}")
        if str(dtype).removeprefix("torch.") not in _DTYPES:
            raise _malformed(f"tensor {name!r} has dtype {dtype}, which cannot be sent")
        entry = Entry(name, dtype, shape, 0, alias_of)
        if alias_of is not None:
            self._check_alias(entry)
        else:
            self._place(entry, len(self._entries))
        self._entries[name] = entry

    def finish(self) -> WeightLayout:
        self._close(self._open)
        placed: dict[str, Entry] = {}
        for index, entry in enumerate(self._entries.values()):
            offset = self._offsets.get(index, 0) if entry.alias_of is None else placed[entry.alias_of].offset
            placed[entry.name] = replace(entry, offset=offset)
        sizes = (self._bucket_nbytes, self._own_nbytes, self._alignment)
        return WeightLayout(tuple(placed.values()), *sizes, tuple(self._buckets))

    def _check_alias(self, entry: Entry) -> None:
        target = self._entries.get(entry.alias_of or "")
        if target is None or target.alias_of is not None or (target.dtype, target.shape) != (entry.dtype, entry.shape):
            raise _malformed(
                f"tensor {entry.name!r} is tied to {entry.alias_of!r}, which is not an earlier tensor of its kind"
            )

    def _place(self, entry: Entry, index: int) -> None:
        if self._end + self._open_end() + entry.nbytes > min(_MAX_NBYTES, _MAX_BUCKETS * self._bucket_nbytes):
            raise _malformed(f"tensor {entry.name!r} ends beyond {_MAX_BUCKETS:,} buckets or {_MAX_NBYTES:,} bytes")
        own = entry.nbytes >= self._own_nbytes
        if not own and self._aligned(self._open_end()) + entry.nbytes > self._bucket_nbytes:
            self._close(self._open)
        pieces: list[Piece] = [] if own else self._open
        for start in range(0, entry.nbytes, self._bucket_nbytes):
            nbytes = min(self._bucket_nbytes, entry.nbytes - start)
            at = self._aligned(pieces[-1].at + pieces[-1].nbytes) if pieces else 0
            pieces.append(Piece(index, start, nbytes, at, whole=nbytes == entry.nbytes))
            if own or nbytes == self._bucket_nbytes:
                self._close(pieces)

    def _open_end(self) -> int:
        return self._open[-1].at + self._open[-1].nbytes if self._open else 0

    def _aligned(self, offset: int) -> int:
        return offset + -offset % self._alignment

    def _close(self, pieces: list[Piece]) -> None:
        """Make a bucket of ``pieces`` and empty the list."""
        if not pieces:
            return
        begin = self._aligned(self._end)
        self._end = begin + pieces[-1].at + pieces[-1].nbytes
        self._offsets |= {piece.entry: begin + piece.at for piece in pieces if piece.start == 0}
        self._buckets.append(Bucket(begin, self._end - begin, tuple(pieces)))
        pieces.clear()


def _flat_alignment(tensors: Sequence[torch.Tensor]) -> int | None:
    """Return the alignment of ``tensors`` if they are contiguous in one storage, else None."""
    whole = [tensor for tensor in tensors if tensor.numel()]
    if len(whole) < 2 or whole[0].device.type == "meta" or not all(tensor.is_contiguous() for tensor in whole):
        return None
    base = whole[0].data_ptr()
    if base % _ALIGNMENTS[-1] or len({tensor.untyped_storage().data_ptr() for tensor in whole}) > 1:
        return None
    return next((alignment for alignment in _ALIGNMENTS if _are_contiguous_at(whole, base, alignment)), None)


def _are_contiguous_at(tensors: Sequence[torch.Tensor], base: int, alignment: int) -> bool:
    offset = 0
    for tensor in tensors:
        offset += -offset % alignment
        if tensor.data_ptr() != base + offset:
            return False
        offset += tensor.nbytes
    return True


def _row(item: Any) -> _Row:
    if not isinstance(item, list) or len(item) != 4:
        raise _malformed(f"{_shown(item)} is not name, dtype, shape and tie")
    name, dtype, shape, alias_of = item
    if not isinstance(name, str) or not (alias_of is None or isinstance(alias_of, str)):
        raise _malformed(f"{_shown(item)} has a name that is not a string")
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise _malformed(f"tensor {name!r} has dtype {_shown(dtype)}, which this torch cannot send")
    counts = isinstance(shape, list) and len(shape) <= 64 and all(_is_count(length) for length in shape)
    # The strides of an empty tensor must fit, too.
    if not counts or math.prod(length for length in shape if length) > _MAX_NBYTES:
        raise _malformed(f"tensor {name!r} has shape {_shown(shape)}")
    return name, _DTYPES[dtype], tuple(shape), alias_of


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_NBYTES


def _shown(value: Any) -> str:
    return repr(value)[:80]


def _malformed(why: str) -> LayoutMismatchError:
    return LayoutMismatchError("this is not a weight layout", why=why, fix="use the same hwrl on both sides")
