"""A compact set of prompt numbers, for runs of millions of prompts."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

_CHUNK = 1 << 10
"""The array of bits grows by at least this many bytes."""


class NumberSet:
    """A set of numbers from 0 up. It has one bit for each number up to the largest: 125 kB for a million.

    >>> numbers = NumberSet([7, 1, 3, 2, 2])
    >>> numbers.add_range(20, 40)
    >>> len(numbers), 3 in numbers, 4 in numbers, numbers.ranges()
    (25, True, False, [[1, 3], [7, 7], [20, 40]])
    """

    def __init__(self, numbers: Iterable[int] = ()) -> None:
        self._bits, self._count = bytearray(), 0
        for number in numbers:
            self.add(number)

    def add(self, number: int) -> None:
        """Add ``number``, 0 or more."""
        if number in self:
            return
        self._grow(number)
        self._bits[number >> 3] |= 1 << (number & 7)
        self._count += 1

    def add_range(self, first: int, last: int) -> None:
        """Add the numbers from ``first`` to ``last``, none of which is in the set: whole bytes at once."""
        self._grow(last)
        begin, end = -(-first // 8), (last + 1) // 8
        if begin < end:
            self._bits[begin:end] = b"\xff" * (end - begin)
            self._count += 8 * (end - begin)
        for number in (*range(first, min(8 * begin, last + 1)), *range(max(8 * end, first), last + 1)):
            self.add(number)

    def _grow(self, number: int) -> None:
        missing = (number >> 3) + 1 - len(self._bits)
        if missing > 0:
            self._bits.extend(bytes(max(missing, _CHUNK)))

    def __contains__(self, number: int) -> bool:
        index = number >> 3
        return index < len(self._bits) and bool(self._bits[index] >> (number & 7) & 1)

    def __len__(self) -> int:
        return self._count

    def ranges(self) -> list[list[int]]:
        """Return the numbers as ascending ranges, each a pair of its first and last number."""
        bits = np.unpackbits(np.frombuffer(bytes(self._bits), dtype=np.uint8), bitorder="little").astype(np.int8)
        edges = np.flatnonzero(np.diff(bits, prepend=0, append=0)).reshape(-1, 2)
        edges[:, 1] -= 1
        ranges: list[list[int]] = edges.tolist()
        return ranges
