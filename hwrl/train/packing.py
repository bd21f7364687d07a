"""Micro-batches: rows end to end in one row without padding between them, or padded rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hwrl.interfaces import Batch, LossInputs


@dataclass(frozen=True)
class Boundaries:
    """Where the sequences of a pack begin and end.

    ``cu_seqlens`` (sequences + 1, int32) has the start of each sequence, and last the pack's length. Repeated entries
    at its end are empty sequences. No sequence is longer than ``max_length``.
    """

    cu_seqlens: torch.Tensor
    max_length: int


@dataclass(frozen=True)
class PackShare:
    """Share ``index`` of the ``count`` equal shares of a pack's tokens. Each rank of a context group has one share."""

    index: int = 0
    count: int = 1

    def of(self, tokens: int) -> slice:
        """Return the share of ``tokens``, a multiple of :attr:`count`.

        >>> PackShare(1, 4).of(8)
        slice(2, 4, None)
        """
        size = tokens // self.count
        return slice(self.index * size, (self.index + 1) * size)


@dataclass(frozen=True)
class MicroBatch:
    """The tokens of one forward pass, all on one device; or this rank's share of them.

    ``input_ids`` and ``position_ids`` (rows × length, int64) are the model's inputs. A pack has one row, and the
    ``boundaries`` of the whole pack, also in a share of it.

    ``targets`` (int64) are the response tokens, and ``places`` (int64) the inputs that predict them, as indices into
    the flattened ``input_ids``. Both are padded to a rounded number: only the first ``trained_tokens`` count. All other
    tensors have one element for each of these tokens, without padding. ``rows`` and ``columns`` (int64, on the host)
    are the indices of the tokens in the batch. ``loss_rows`` (int64) has the row of each token, 0 … ``row_count`` - 1:
    these are the rows of the whole micro-batch. The rest is float32. ``weights`` alone has one element for each of the
    ``row_count`` rows, or is None.

    ``real_tokens`` counts the inputs without padding, and ``share_tokens`` the response tokens in each share.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    boundaries: Boundaries | None
    places: torch.Tensor
    targets: torch.Tensor
    rows: torch.Tensor
    columns: torch.Tensor
    loss_rows: torch.Tensor
    row_count: int
    behaviour_logprobs: torch.Tensor
    advantages: torch.Tensor
    proximal_logprobs: torch.Tensor | None
    reference_logprobs: torch.Tensor | None
    weights: torch.Tensor | None
    real_tokens: int
    share_tokens: tuple[int, ...]
    values: torch.Tensor | None = None
    returns: torch.Tensor | None = None

    @property
    def trained_tokens(self) -> int:
        """The number of response tokens."""
        return len(self.rows)

    def loss_inputs(self, logprobs: torch.Tensor, entropy: torch.Tensor, tokens: slice) -> LossInputs:
        """Return the inputs of a loss for the response tokens ``tokens``, with their scores."""
        proximal, reference = self.proximal_logprobs, self.reference_logprobs
        return LossInputs(
            logprobs=logprobs,
            entropy=entropy,
            behaviour=self.behaviour_logprobs[tokens],
            proximal=None if proximal is None else proximal[tokens],
            reference=None if reference is None else reference[tokens],
            advantages=self.advantages[tokens],
            rows=self.loss_rows[tokens],
            row_count=self.row_count,
        )


def plan_packs(lengths: Sequence[int], *, max_tokens: int, packs: int = 0) -> list[list[int]]:
    """Divide rows of ``lengths`` into packs of similar size; return their indices.

    No pack has more than ``max_tokens``; a longer row is a pack of its own. There are at least ``packs`` of them, and
    some may be empty. Rows of length 0 are left out.

    Rows of similar length share a pack, because attention kernels may pad them to the longest. So each pack is a
    stretch of the rows sorted by length. There are as few packs as possible, and the largest is as small as possible.
    """
    order = sorted((row for row, length in enumerate(lengths) if length), key=lambda row: -lengths[row])
    count = max(packs, len(_stretches(order, lengths, room=max_tokens)))
    smallest, room = max([0, *(min(lengths[row], max_tokens) for row in order)]), max_tokens
    while smallest < room:
        middle = (smallest + room) // 2
        if len(_stretches(order, lengths, room=middle)) <= count:
            room = middle
        else:
            smallest = middle + 1
    plan = _stretches(order, lengths, room=room)
    return plan + [[]] * (packs - len(plan))


def _stretches(order: list[int], lengths: Sequence[int], *, room: int) -> list[list[int]]:
    """Divide ``order`` into stretches of at most ``room`` tokens, or of one longer row."""
    plan: list[list[int]] = []
    left = 0
    for row in order:
        if lengths[row] > left:
            plan.append([])
            left = room
        plan[-1].append(row)
        left -= lengths[row]
    return plan


def rounded(count: int, *, bits: int) -> int:
    """Return ``count`` rounded up to a number with ``bits`` significant binary digits.

    It grows by at most one part in ``2 ** (bits - 1)``. There are few such numbers, so shapes made of them repeat.

    >>> [rounded(count, bits=3) for count in (5, 8, 9, 17, 1000)]
    [5, 8, 10, 20, 1024]
    """
    step = 1 << max(0, count.bit_length() - bits)
    return -(-count // step) * step


_TOKEN_STEP = 128
"""Packs of many tokens are padded to a multiple of this; at most one part in 32 is padding."""


def make_pack(batch: Batch, rows: torch.Tensor, *, device: torch.device, share: PackShare = PackShare()) -> MicroBatch:
    """Return the rows with the indices ``rows`` (int64) of ``batch``, end to end, on ``device``.

    The last token of a row is only a target. An empty pack has one token and no target. Padding belongs to the last
    row, behind its tokens: causal attention hides it. The result has only the inputs of ``share`` and the targets that
    they predict. Each share of a pack has at least one input.
    """
    lengths = (batch.lengths()[rows] - 1).clamp(min=0)
    row, column = _tokens_of_rows(lengths)
    total = max(1, len(row))
    size = min(rounded(total, bits=6), -(-total // _TOKEN_STEP) * _TOKEN_STEP)
    size = -(-size // share.count) * share.count
    filled = torch.zeros(2, 1, size, dtype=torch.long)
    filled[0, 0, : len(row)], filled[1, 0, : len(row)] = batch.tokens[rows[row], column], column
    boundaries = _boundaries([length for length in lengths.tolist() if length] or [1], size=size)
    return _micro_batch(batch, rows, (row, column, torch.arange(len(row))), filled, boundaries, device, share=share)


def _tokens_of_rows(lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return row and column of each of the tokens of rows with ``lengths``, row by row."""
    row = torch.arange(len(lengths)).repeat_interleave(lengths)
    starts = lengths.cumsum(0) - lengths
    return row, torch.arange(len(row)) - starts.repeat_interleave(lengths)


def _boundaries(lengths: list[int], *, size: int) -> Boundaries:
    lengths[-1] += size - sum(lengths)
    ends = torch.tensor([0, *lengths]).cumsum(0)
    return Boundaries(ends.to(torch.int32), rounded(max(lengths), bits=5))


def make_rows(batch: Batch, rows: torch.Tensor, *, device: torch.device) -> MicroBatch:
    """Return the rows with the indices ``rows`` (int64) of ``batch``, padded on the right, on ``device``.

    The padding is behind the tokens, so causal attention hides it. Without rows there is one token and no target.
    """
    lengths = (batch.lengths()[rows] - 1).clamp(min=0)
    length = int(max([1, *lengths]))
    filled = batch.tokens[rows, :length] if len(rows) else torch.zeros(1, 1, dtype=torch.long)
    position_ids = torch.arange(filled.shape[1]).expand_as(filled)
    row, column = _tokens_of_rows(lengths)
    inputs = row, column, row * length + column
    return _micro_batch(batch, rows, inputs, torch.stack([filled, position_ids]), None, device)


def _micro_batch(
    batch: Batch,
    all_rows: torch.Tensor,
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    filled: torch.Tensor,
    boundaries: Boundaries | None,
    device: torch.device,
    share: PackShare = PackShare(),
) -> MicroBatch:
    """Return the micro-batch of the batch's ``all_rows``, or its ``share``, on ``device``.

    ``inputs`` are the row (an index into ``all_rows``), column and place of each input token. ``filled`` (2 × rows ×
    length) has the token and the position of each place.
    """
    trained = batch.mask[all_rows[inputs[0]], inputs[1] + 1]
    shares = [PackShare(index, share.count).of(filled.shape[2]) for index in range(share.count)]
    mine = shares[share.index] if share.count > 1 else slice(0, None)
    own = trained[mine]
    loss_rows, columns, place = (each[mine][own] for each in inputs)
    rows, columns = all_rows[loss_rows], columns + 1
    wanted = torch.zeros(2, rounded(len(rows), bits=5), dtype=torch.long)
    wanted[0, : len(rows)], wanted[1, : len(rows)] = place - mine.start, batch.tokens[rows, columns]
    places, targets = wanted.to(device)
    proximal, reference, values, returns = (
        None if column is None else column[rows, columns].to(device)
        for column in (batch.proximal_logprobs, batch.reference_logprobs, batch.values, batch.returns)
    )
    advantages = batch.advantages[rows] if batch.advantages.ndim == 1 else batch.advantages[rows, columns]
    return MicroBatch(
        input_ids=filled[0][:, mine].to(device),
        position_ids=filled[1][:, mine].to(device),
        boundaries=boundaries and Boundaries(boundaries.cu_seqlens.to(device), boundaries.max_length),
        places=places,
        targets=targets,
        rows=rows,
        columns=columns,
        loss_rows=loss_rows.to(device),
        row_count=len(all_rows),
        behaviour_logprobs=batch.behaviour_logprobs[rows, columns].to(device),
        advantages=advantages.to(device),
        proximal_logprobs=proximal,
        reference_logprobs=reference,
        weights=None if batch.weights is None else batch.weights[all_rows].to(device),
        real_tokens=len(inputs[0][mine]),
        share_tokens=tuple(int(trained[part].sum()) for part in shares) if share.count > 1 else (len(rows),),
        values=values,
        returns=returns,
    )
