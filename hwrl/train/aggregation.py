"""From losses of tokens to one number: a weight for each row."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from hwrl.train.choices import AggregationMode


def row_weights(
    lengths: npt.ArrayLike, mini_batches: Sequence[Sequence[int]], *, mode: AggregationMode, constant: float
) -> npt.NDArray[np.float32]:
    """Return the factor for the losses of each row's tokens (float32, rows).

    Train engines take the mean over the tokens of a mini-batch. With the factors, this mean is: the mean over all
    tokens (``token-mean``); the mean over rows of a row's sum (``seq-mean-token-sum``) or of a row's mean
    (``seq-mean-token-mean``); or the mean over rows of a row's sum, divided by ``constant``
    (``seq-mean-token-sum-norm``: Dr. GRPO, arXiv:2503.20783 §3.1). ``lengths`` has the number of trained tokens of each
    row, and ``mini_batches`` the row indices of each mini-batch. Rows without a trained token do not count.
    """
    trained = np.asarray(lengths, dtype=np.float64)
    if mode == "token-mean":
        return np.ones(len(trained), dtype=np.float32)
    weights = np.zeros(len(trained))
    for rows in map(list, mini_batches):
        tokens, count = trained[rows].sum(), max(1, np.count_nonzero(trained[rows]))
        weights[rows] = tokens / count
    if mode == "seq-mean-token-mean":
        weights /= trained.clip(min=1)
    if mode == "seq-mean-token-sum-norm":
        weights /= constant
    return weights.astype(np.float32)
