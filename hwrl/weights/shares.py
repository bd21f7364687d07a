"""The division of a version among several senders: :class:`Shares`."""

from __future__ import annotations

from collections.abc import Sequence

from hwrl.weights.layout import WeightLayout
from hwrl.weights.source import Gatherers


def sender_ranks(senders: int, ranks: int) -> tuple[int, ...]:
    """Return the sending ranks: rank 0 and others at equal distances, to have them on as many hosts as possible.

    >>> sender_ranks(2, 8), sender_ranks(3, 4)
    ((0, 4), (0, 1, 2))
    """
    return tuple(share * ranks // senders for share in range(senders))


def divide_buckets(layout: WeightLayout, senders: int) -> tuple[int, ...]:
    """Return the number of each bucket's share. A bucket joins the share with the fewest bytes so far.

    So at every point of the layout the shares differ by one bucket at most. All senders work at the same time, and none
    needs tensors far ahead of the others.
    """
    nbytes = [0] * senders
    shares = []
    for bucket in layout.buckets:
        share = nbytes.index(min(nbytes))
        nbytes[share] += bucket.nbytes
        shares.append(share)
    return tuple(shares)


class Shares:
    """The division of a layout's buckets among several senders, and the tensors for each share.

    ``ranks`` has the rank of each sender, by the number of its share. Share 0 also has the empty tensors, because they
    are in no bucket.
    """

    def __init__(self, layout: WeightLayout, ranks: Sequence[int]) -> None:
        self.ranks = tuple(ranks)
        self._layout = layout
        self._of_entry = _shares_of_entries(layout, divide_buckets(layout, len(ranks)))
        self.gatherers = Gatherers(
            self.ranks,
            {
                entry.name: tuple(self.ranks[share] for share in sorted(shares))
                for entry, shares in zip(layout.entries, self._of_entry, strict=True)
            },
        )

    def entries_of(self, share: int) -> tuple[int, ...]:
        """Return the numbers of the tensors needed by ``share``, in order."""
        return tuple(number for number, shares in enumerate(self._of_entry) if share in shares)

    def names_beside(self, share: int) -> frozenset[str]:
        """Return the names of the tensors needed only by other shares."""
        pairs = zip(self._layout.entries, self._of_entry, strict=True)
        return frozenset(entry.name for entry, shares in pairs if share not in shares)


def _shares_of_entries(layout: WeightLayout, of_bucket: Sequence[int]) -> list[set[int]]:
    shares: list[set[int]] = [set() for _ in layout.entries]
    for bucket, share in zip(layout.buckets, of_bucket, strict=True):
        for number in bucket.entries:
            shares[number].add(share)
    by_name = dict(zip((entry.name for entry in layout.entries), shares, strict=True))
    return [
        by_name[entry.alias_of] if entry.alias_of is not None else found or {0}
        for entry, found in zip(layout.entries, shares, strict=True)
    ]
