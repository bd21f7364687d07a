"""Read a model by parts from its safetensors files, and write one as a stream: :class:`ModelFiles`."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from hwrl.errors import DataError, UnsupportedError
from hwrl.models import require_loadable, require_no_adapter, require_present, translated_errors
from hwrl.safetensors_files import TensorFiles, write_tensors
from hwrl.saved_names import SavedNames


class ModelFiles:
    """The parameters and persistent buffers of ``model``, in the safetensors files of ``directory``.

    ``model`` comes from :func:`~hwrl.models.build_meta_model`, without an adapter. Opening reads the headers of the
    files. It raises DataError, with the same words in each process, if they lack a tensor of the model, hold an unknown
    one or one of another shape. ``why_whole`` is None, or a reason why the files cannot be read by parts: then
    :func:`~hwrl.models.load_model` must load the model whole, and nothing else here works.
    """

    def __init__(self, directory: Path, model: Any) -> None:
        self._directory = directory
        self._tied: dict[str, list[str]] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        require_no_adapter(directory)
        with translated_errors(directory):
            files = TensorFiles.of(directory)
        self.why_whole = self._open(files, model)

    def _open(self, files: TensorFiles | None, model: Any) -> str | None:
        if files is None:
            return "it has no safetensors files"
        self._files = files
        same_tensor: dict[int, list[str]] = {}
        for name, tensor in model.state_dict(keep_vars=True).items():
            same_tensor.setdefault(id(tensor), []).append(name)
            self._shapes[name] = tuple(tensor.shape)
        self._tied = {name: names for names in same_tensor.values() for name in names}
        try:
            self._saved = SavedNames.of(model)
        except UnsupportedError as exc:
            return exc.why
        return self._why_whole(model)

    def _why_whole(self, model: Any) -> str | None:
        """Compare the headers with the model; see the class."""
        shapes, dtypes = self._files.shapes, self._files.dtypes
        wanted = {saved: tuple(part.shape) for name in self._shapes for saved, part in self._parts(name)}
        missing = sorted(name for name, tied in self._tied.items() if not any(map(self._has, tied)))
        parts = [[saved for saved, _ in self._parts(name)] for name in missing]
        incomplete = [saved for names in parts if any(map(shapes.__contains__, names)) for saved in names]
        require_present(self._directory, [saved for saved in incomplete if saved not in shapes])
        fits = all(wanted.get(saved) == shape for saved, shape in shapes.items())
        if (missing or not fits) and not require_loadable(self._directory, model, self._without_ties()):
            return "its names are not the model's, and without accelerate they cannot be compared before"
        if missing:
            return f"transformers renames or converts tensors for {missing[0]}"
        strange = sorted(saved for saved in wanted if saved in shapes and dtypes[saved] is None)
        return f"the dtype of {strange[0]} needs a conversion" if strange else None

    def _without_ties(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes in the files without second copies of tied tensors: transformers compares their values."""
        second = {
            saved
            for tied in self._tied.values()
            for name in [one for one in tied if self._has(one)][1:]
            for saved, _ in self._parts(name)
        }
        return {saved: shape for saved, shape in self._files.shapes.items() if saved not in second}

    def _parts(self, name: str) -> Iterable[tuple[str, torch.Tensor]]:
        return self._saved.parts(name, torch.empty(self._shapes[name], device="meta"))

    def _has(self, name: str) -> bool:
        """Return whether the files have all parts of ``name`` in the right shape."""
        return all(self._files.shapes.get(saved) == tuple(part.shape) for saved, part in self._parts(name))

    # -- reading ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def read(self, name: str, out: torch.Tensor, *, dim: int = 0, start: int = 0) -> None:
        """Fill ``out`` with a slice of the parameter or buffer ``name``: from ``start`` on along ``dim``.

        ``out``, on any device, has the shape of the slice; the values are cast to its dtype. Only the slice is read
        from the files, and no more of it is on the host than one tensor of the files. Raises DataError if tensors
        that the model ties differ in the files.
        """
        first, *others = [one for one in self._tied[name] if self._has(one)]
        self._fill(first, out, dim, start)
        for other in others:
            again = torch.empty_like(out)
            self._fill(other, again, dim, start)
            if not torch.equal(out, again):
                raise DataError(
                    f"the tensors in {self._directory} do not fit the model in its config.json",
                    why=f"the model ties {first} to {other} (tie_word_embeddings=true), and the files hold two tensors "
                    "that differ",
                    fix="download or save the model again; or correct its config.json",
                )

    def read_saved(self, name: str, index: Sequence[slice] = ()) -> torch.Tensor:
        """Return a slice of the tensor that the files call ``name``; see :meth:`TensorFiles.read`."""
        return self._files.read(name, index)

    def close(self) -> None:
        """Give back the memory of the files. A later read opens them again."""
        self._files.close()

    def _fill(self, name: str, out: torch.Tensor, dim: int, start: int) -> None:
        if not out.numel():
            return
        if not out.dim():
            out.copy_(self._files.read(name))
            return
        shape, parts = self._shapes[name], list(self._parts(name))
        places = [_PartPlace.of(part, shape) for _, part in parts]
        if not all(places):  # the parts are interleaved
            whole = torch.empty(shape, dtype=out.dtype)
            for saved, part in self._saved.parts(name, whole):
                part.copy_(self._files.read(saved))
            out.copy_(whole.narrow(dim, start, out.shape[dim]))
            return
        for (saved, _), box in zip(parts, places, strict=True):
            assert box is not None, "checked above"
            self._fill_part(saved, box, out, dim, start)

    def _fill_part(self, saved: str, box: _PartPlace, out: torch.Tensor, dim: int, start: int) -> None:
        index = box.overlap(dim, start, start + out.shape[dim])
        if index is None:
            return
        source, target = index
        values = self._files.read(saved, source)
        place = box.arranged(out[target])
        place.copy_(values.to(out.device).reshape(place.shape))  # copied as it is in the file, and cast on the device


class _PartPlace:
    """Where a tensor of the files lies in a contiguous parameter: a range of each dimension, perhaps transposed."""

    def __init__(self, begins: list[int], sizes: list[int], dims: list[int | None]) -> None:
        self._begins, self._sizes, self._dims = begins, sizes, dims

    @classmethod
    def of(cls, view: torch.Tensor, shape: tuple[int, ...]) -> _PartPlace | None:
        """Return the box of ``view``, a view of a contiguous tensor of ``shape``; None if it is no box."""
        strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
        begins = [
            view.storage_offset() // stride % size if size else 0 for stride, size in zip(strides, shape, strict=True)
        ]
        sizes = [1] * len(shape)
        dims: list[int | None] = []
        for size, stride in zip(view.shape, view.stride(), strict=True):
            found = [dim for dim in range(len(shape)) if size > 1 and shape[dim] > 1 and strides[dim] == stride]
            dims.append(found[0] if found else None)
            if found:
                sizes[found[0]] = size
            elif size != 1:
                return None
        fits = all(begin + size <= whole for begin, size, whole in zip(begins, sizes, shape, strict=True))
        return cls(begins, sizes, dims) if fits else None

    def overlap(self, dim: int, start: int, stop: int) -> tuple[list[slice], tuple[slice, ...]] | None:
        """Return the index into the file's tensor, and that into the slice ``start`` to ``stop`` along ``dim``.

        None if they do not meet.
        """
        first = max(self._begins[dim], start)
        last = min(self._begins[dim] + self._sizes[dim], stop)
        if first >= last:
            return None
        target = [slice(begin, begin + size) for begin, size in zip(self._begins, self._sizes, strict=True)]
        target[dim] = slice(first - start, last - start)
        own = slice(first - self._begins[dim], last - self._begins[dim])
        source = [own if found == dim else slice(None) for found in self._dims]
        return source, tuple(target)

    def arranged(self, piece: torch.Tensor) -> torch.Tensor:
        """Return ``piece``, of the parameter, as the file's tensor arranges its dimensions; a view."""
        moving = [dim for dim in self._dims if dim is not None]
        fixed = [dim for dim in range(piece.dim()) if dim not in moving]
        return piece.permute(*moving, *fixed)


def write_model(
    directory: Path,
    model: Any,
    described: Iterable[tuple[str, torch.Tensor]],
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    dtype: torch.dtype,
) -> None:
    """Write the configuration of ``model`` and ``tensors`` to ``directory``, for ``from_pretrained``.

    ``tensors`` have their names in files, and ``described`` are the same on the meta device, in the same order
    (:func:`~hwrl.safetensors_files.write_tensors`). ``dtype`` is the one in the configuration.
    """
    write_tensors(directory, described, tensors)
    config = copy.deepcopy(model.config)
    config.dtype = dtype
    config.architectures = [type(model).__name__.removeprefix("FSDP")]  # FSDP2 makes a class of its own
    config.save_pretrained(directory)
    if model.generation_config is not None:
        model.generation_config.save_pretrained(directory)
