"""Checksums that run at the memory's speed on any device."""

from __future__ import annotations

import bisect
import itertools

import torch

from hwrl.weights.layout import WeightLayout

_WORDS = 4096
_ROW_NBYTES = 8 * _WORDS  # 32 KiB: long enough to sum at the memory's speed, short enough to say where damage is
_ODD = 0x1E3779B97F4A7C15  # any large odd number: a product with it loses no bit modulo 2**64


class Checksums:
    """One 64-bit sum for each 32 KiB of each slab of a layout, on the device: ``values``, a 1-d int64 tensor.

    Any change within one 64-bit word, and any displaced row, is always found; reordered words inside 32 KiB are not.
    Computing is one kernel for a slab, mostly, and allocates nothing.
    """

    def __init__(self, layout: WeightLayout, *, device: torch.device, values: torch.Tensor | None = None) -> None:
        rows = [-(-slab.nbytes // _ROW_NBYTES) for slab in layout.slabs]
        self.slabs = len(rows)
        self._places: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._begins = list(itertools.accumulate(rows, initial=0))
        self.values = torch.zeros(self._begins[-1], dtype=torch.int64, device=device) if values is None else values

    @staticmethod
    def nbytes(layout: WeightLayout) -> int:
        """Return the bytes that ``values`` takes for ``layout``."""
        return 8 * sum(-(-slab.nbytes // _ROW_NBYTES) for slab in layout.slabs)

    def add(self, index: int, raw: torch.Tensor) -> None:
        """Compute slab ``index``'s sums from its bytes (1-d uint8, 8-byte aligned); does not wait for the device."""
        whole = raw.numel() // _ROW_NBYTES
        if index not in self._places:
            mine = self.values[self._begins[index] : self._begins[index + 1]]
            self._places[index] = mine[:whole], mine[whole:]
        of_rows, of_rest = self._places[index]
        if whole:
            rows = raw[: whole * _ROW_NBYTES] if of_rest.numel() else raw
            torch.sum(rows.view(torch.int64).view(whole, _WORDS), 1, out=of_rows)
        if of_rest.numel():
            rest = raw[whole * _ROW_NBYTES :]
            words = rest[: rest.numel() // 8 * 8].view(torch.int64)
            torch.sum(words.view(1, -1), 1, out=of_rest)
            if rest.numel() % 8:
                word = torch.zeros(8, dtype=torch.uint8, device=rest.device)
                word[: rest.numel() % 8] = rest[words.numel() * 8 :]
                of_rest += word.view(torch.int64) * _ODD

    def vote(self, theirs: torch.Tensor) -> str:
        """Compare with the sender's sums: "whole", or "corrupt" and which slabs; waits for the device."""
        if torch.equal(self.values, theirs):
            return "whole"
        rows: list[int] = (self.values != theirs).nonzero().view(-1).tolist()
        wrong = sorted({bisect.bisect_right(self._begins, row) - 1 for row in rows})
        return f"corrupt: slabs {wrong[:8]} of {self.slabs}"
