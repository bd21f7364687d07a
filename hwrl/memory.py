"""Host memory that is kept, and device memory that can be given back: :class:`PinnedPool`, :class:`Offloader`."""

from __future__ import annotations

import torch

from hwrl.backend import Backend
from hwrl.registry import get_backend

_ALIGNMENT_NBYTES = 512


class PinnedPool:
    """Page-locked host memory by name, allocated once and reused.

    The pool owns its slabs; they are freed by :meth:`close` or on leaving the context, and must not be used after.

    >>> from hwrl.registry import get_backend
    >>> with PinnedPool(get_backend("cpu")) as pool:
    ...     first = pool.slab("parameters", 1000)
    ...     pool.slab("parameters", 10) is first, pool.nbytes
    (True, 1000)
    """

    def __init__(self, backend: Backend | None = None) -> None:
        self._backend = backend or get_backend()
        self._slabs: dict[str, torch.Tensor] = {}

    def slab(self, name: str, nbytes: int) -> torch.Tensor:
        """Return the slab ``name``, a 1-d uint8 tensor of at least ``nbytes``.

        A slab that is too small is replaced by a larger one, and its content is lost.
        """
        held = self._slabs.get(name)
        if held is not None and held.numel() >= nbytes:
            return held
        self._slabs.pop(name, None)
        slab = self._slabs[name] = self._backend.pinned_empty(nbytes)
        return slab

    @property
    def nbytes(self) -> int:
        """The bytes that the pool holds."""
        return sum(slab.numel() for slab in self._slabs.values())

    def close(self) -> None:
        """Free every slab."""
        self._slabs.clear()

    def __enter__(self) -> PinnedPool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
