"""The costs of a simulated run: lengths of responses, seconds of each activity, failures."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from hwrl.errors import ConfigError, manual
from hwrl.run import Config

_NORMAL = NormalDist()
_BLOCK = 1000
"""The number of groups whose lengths are drawn at once."""


@dataclass(frozen=True)
class Workload:
    """The costs of a run. Each one is measured in a real run (:func:`calibrate`), set by the user, or assumed.

    Lengths are log-normal and cut off at ``rollout.max_new_tokens``. A decoding step with ``r`` running responses takes
    ``full_step_s * (latency_share + (1 - latency_share) * r / rollout.max_running)`` seconds.
    """

    mean_tokens: float = 200.0
    """Mean tokens of a response, with long responses cut off."""
    sigma: float = 1.0
    """Standard deviation of the logarithm of a length: 0 for equal lengths, 1 for a long tail."""
    full_step_s: float = 0.04
    """Seconds of a decoding step with ``rollout.max_running`` responses."""
    latency_share: float = 0.5
    """Share of ``full_step_s`` that does not depend on the number of responses: 0 to 1."""
    reward_s: float = 0.0
    """Seconds from the last token of a group to its scores."""
    train_token_s: float = 1e-4
    """Seconds in which one trainer rank trains on one response token, forward and backward."""
    train_fixed_s: float = 0.0
    """Seconds of a training step that do not depend on its tokens."""
    train_sigma: float = 0.0
    """Standard deviation of the logarithm of a step's training time, at equal numbers of tokens."""
    batch_s: float = 0.0
    """Seconds from the moment at which the ledger has a batch until the trainer begins it: calls, data movement."""
    sync_fixed_s: float = 0.0
    """Seconds of a weight transfer that depend neither on its bytes nor on the replicas."""
    sync_replica_s: float = 0.0
    """Seconds that each replica adds to a weight transfer: votes, membership."""
    sync_nbytes: float = 0.0
    """Bytes of a weight transfer."""
    bandwidth: float = 50e9
    """Bytes per second of each sender."""
    update_s: float = 0.0
    """Seconds in which a replica pauses to take new weights."""
    overhead_s: float = 0.0
    """Seconds that the driver takes between two steps."""
    checkpoint_s: float = 0.0
    """Seconds for which a checkpoint blocks the trainer."""
    failed_ratio: float = 0.0
    """Share of the attempts at prompts that fail."""
    equal_ratio: float = 0.0
    """Share of groups with equal rewards. ``algorithm.filter_groups`` filters these groups."""
    mtbf_h: float = 50_000.0
    """Mean hours between two failures of one device (MTBF)."""
    hang_ratio: float = 0.1
    """Share of failures in which the process hangs. In the others it ends at once."""
    restart_s: float = 120.0
    """Seconds from the end of a process to its replacement: imports, model."""
    shared_train_ratio: float = 1.0
    """Cost of a trained token in the synchronous baseline on shared devices, relative to ``train_token_s``."""
    switch_s: float = 0.0
    """Seconds per step in which that baseline switches its devices between generation and training."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            limit = 1.0 if field.name in _SHARES else math.inf
            positive = field.name in _POSITIVE
            if not math.isfinite(value) or value < 0 or value > limit or (positive and value == 0):
                bound = "more than 0" if positive else "0 to 1" if limit == 1 else "0 or more"
                raise ConfigError(
                    f"the assumption {field.name}={value:g} is not possible",
                    why=f"it must be {bound}",
                    fix=f"see the table of assumptions, {manual('simulate.md')}",
                )


_SHARES = ("latency_share", "failed_ratio", "equal_ratio", "hang_ratio")
_POSITIVE = ("mean_tokens", "full_step_s", "bandwidth", "mtbf_h")
NAMES = tuple(field.name for field in dataclasses.fields(Workload))
"""The names of all assumptions."""


def assume(workload: Workload, words: Sequence[str]) -> Workload:
    """Return ``workload`` changed by ``words`` such as ``sigma=1.2``. Raises ConfigError."""
    values = {}
    for word in words:
        name, _, text = word.partition("=")
        try:
            values[name] = float(text)
        except ValueError:
            values[name] = math.nan
        if name not in NAMES or math.isnan(values[name]):
            raise ConfigError(
                f"{word!r} is not an assumption",
                why=f"an assumption has the form name=number, with one of the names {', '.join(NAMES)}",
                fix="write for example --assume sigma=1.2",
            )
    return dataclasses.replace(workload, **values)


@dataclass(frozen=True)
class Lengths:
    """Log-normal lengths, cut off at ``limit`` tokens. The logarithm has mean ``mu`` and deviation ``sigma``."""

    mu: float
    sigma: float
    limit: int

    @classmethod
    def with_mean(cls, mean: float, *, sigma: float, limit: int) -> Lengths:
        """Return the distribution with this mean after the cut-off. With a mean near ``limit`` it is narrow."""
        mean = min(max(mean, 1.0), limit * (1 - 1e-6))
        low, high = math.log(mean) - sigma * sigma - 1.0, math.log(limit) + 6 * sigma + 1.0
        for _ in range(80):
            middle = (low + high) / 2
            low, high = (middle, high) if cut_mean(middle, sigma, limit) < mean else (low, middle)
        return cls((low + high) / 2, sigma, limit)

    def draw(self, count: int, random: np.random.Generator) -> NDArray[np.float64]:
        """Draw ``count`` lengths: whole numbers from 1 to ``limit``, as float64."""
        logarithms = self.mu + self.sigma * random.standard_normal(count)
        lengths: NDArray[np.float64] = np.clip(np.rint(np.exp(np.minimum(logarithms, 50.0))), 1.0, self.limit)
        return lengths

    def groups(self, size: int, random: np.random.Generator) -> Iterator[NDArray[np.float64]]:
        """Yield the lengths of one group of ``size`` responses after another, endlessly. They are drawn in blocks."""
        while True:
            yield from self.draw(_BLOCK * size, random).reshape(_BLOCK, size)


def longest_response(config: Config) -> int:
    """Return the maximum number of tokens in a sample. All turns of a workflow count as one response."""
    return config.rollout.max_new_tokens if config.rollout.workflow is None else config.max_model_len


def cut_mean(mu: float, sigma: float, limit: float) -> float:
    """Return the mean of ``min(length, limit)``.

    >>> round(cut_mean(0.0, 0.0, 5.0), 6), round(cut_mean(9.0, 1.0, 5.0), 2)
    (1.0, 5.0)
    """
    if sigma == 0:
        return min(math.exp(mu), limit)
    place = (math.log(limit) - mu) / sigma
    below = math.exp(min(mu + sigma * sigma / 2, 700.0)) * _NORMAL.cdf(place - sigma)
    return below + limit * (1 - _NORMAL.cdf(place))
