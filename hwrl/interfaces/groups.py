"""The data from rollout to training: responses, trajectories of responses, and prompt groups of trajectories."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from hwrl.interfaces.tracing import Span

Ints: TypeAlias = "npt.NDArray[np.int32]"
Floats: TypeAlias = "npt.NDArray[np.float32]"
Bools: TypeAlias = "npt.NDArray[np.bool_]"


@dataclass(frozen=True)
class Response:
    """One generated response: each token's id, log-probability under the behaviour policy, and weight version.

    The three arrays have one element per generated token, including the end-of-sequence token. ``truncated`` is true if
    the length limit ended the response. ``stop`` is the stop text or stop token of :class:`Sampling` at its end; None
    if something else ended it.
    """

    token_ids: Ints
    logprobs: Floats
    versions: Ints
    truncated: bool
    stop: str | int | None = None

    def __post_init__(self) -> None:
        if not len(self.token_ids) == len(self.logprobs) == len(self.versions):
            raise ValueError("a response needs one log-probability and one version for each token")


@dataclass(frozen=True)
class Segment:
    """A stretch of a trajectory with one author. Only the policy's segments are trained.

    The policy wrote it if it has ``logprobs`` and ``versions`` (one each per token, as in :class:`Response`); else a
    user, a tool or a chat template did. ``rewards`` has one reward per token of the policy, or is None.
    """

    token_ids: Ints
    logprobs: Floats | None = None
    versions: Ints | None = None
    rewards: Floats | None = None

    def __post_init__(self) -> None:
        if (self.logprobs is None) != (self.versions is None):
            raise ValueError("a segment has both log-probabilities and versions, or neither")
        if self.rewards is not None and self.logprobs is None:
            raise ValueError("only the policy's tokens have rewards")
        columns = (self.logprobs, self.versions, self.rewards)
        if any(column is not None and len(column) != len(self.token_ids) for column in columns):
            raise ValueError("a segment's columns have one element for each token")

    @property
    def by_policy(self) -> bool:
        """Whether the policy wrote it."""
        return self.logprobs is not None

    @classmethod
    def of_response(cls, response: Response, *, reward: float | None = None) -> Segment:
        """Return the policy's segment with ``response``; see :meth:`rewarded` for ``reward``."""
        segment = cls(response.token_ids, response.logprobs, response.versions)
        return segment if reward is None else segment.rewarded(reward)

    def rewarded(self, reward: float) -> Segment:
        """Return this segment of the policy with ``reward`` at its last token; ValueError if it has no token."""
        import numpy as np

        if not len(self.token_ids):
            raise ValueError(f"a turn without tokens cannot have the reward {reward}")
        rewards = np.zeros(len(self.token_ids), dtype=np.float32)
        rewards[-1] = reward
        return replace(self, rewards=rewards)


@dataclass(frozen=True)
class Trajectory:
    """A row of tokens as the policy saw it: a prompt, then segments of the policy and of others in any order.

    ``reward`` is the reward of the whole trajectory; if it is None, the run's reward function computes it. ``metrics``
    has other numbers by name. ``truncated`` is true if a limit ended the trajectory, not the policy.
    """

    segments: Sequence[Segment]
    reward: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    truncated: bool = False

    def __post_init__(self) -> None:
        if not any(segment.by_policy and len(segment.token_ids) for segment in self.segments):
            raise ValueError("a trajectory needs a token of the policy")
        if self.segments[0].by_policy or not len(self.segments[0].token_ids):
            raise ValueError("a trajectory begins with a prompt of at least one token")

    @classmethod
    def single_turn(cls, prompt_ids: Ints, response: Response) -> Trajectory:
        """Return the trajectory of one response to ``prompt_ids``."""
        return cls((Segment(prompt_ids), Segment.of_response(response)), truncated=response.truncated)

    @property
    def trained_segments(self) -> Sequence[Segment]:
        """The segments up to the policy's last one that has tokens."""
        last = max(index for index, part in enumerate(self.segments) if part.by_policy and len(part.token_ids))
        return self.segments[: last + 1]

    @property
    def response_ids(self) -> Ints:
        """The tokens after the prompt, of all authors."""
        import numpy as np

        return np.concatenate([segment.token_ids for segment in self.segments[1:]])


@dataclass(frozen=True)
class PromptGroup:
    """A prompt's trajectories with their rewards, ready for training.

    ``sequence_number`` is the prompt's place in the stream. ``lease_id`` is the rollout's lease of the prompt
    (:mod:`hwrl.rollout`). ``incarnation`` counts the earlier starts of the trainer. A restart goes back to a
    checkpoint's version, so equal versions of different incarnations are different weights. One incarnation made all
    weights of a group.

    Each trajectory is a row: the common prompt ``prompt_ids``, then its own tokens. If the prompts differ,
    ``prompt_ids`` is empty, and a row's own tokens begin with its prompt. The arrays of tokens concatenate the own
    tokens of all rows; ``lengths`` (int32, one per row) separates them. ``loss_mask`` is true for the policy's tokens;
    others have log-probability 0 and version -1. ``rewards`` has one number per row. ``token_rewards`` has one per
    token, or is None. ``samples`` (int32) has the sample number of each row. A sample is one run of the workflow, and
    may give several rows. ``spans`` is the trace of the prompt in its replica; empty if it is not traced.
    """

    sequence_number: int
    lease_id: int
    incarnation: int
    prompt_ids: Ints
    token_ids: Ints
    logprobs: Floats
    versions: Ints
    loss_mask: Bools
    lengths: Ints
    samples: Ints
    rewards: Floats
    truncated: Bools
    token_rewards: Floats | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    spans: tuple[Span, ...] = ()

    @property
    def size(self) -> int:
        """Number of rows."""
        return len(self.lengths)

    @property
    def oldest_version(self) -> int:
        """The smallest weight version among the policy's tokens."""
        return int(self.versions[self.loss_mask].min())

    @property
    def newest_version(self) -> int:
        """The largest weight version among the policy's tokens."""
        return int(self.versions.max())

    @property
    def policy_lengths(self) -> Ints:
        """The number of the policy's tokens in each row (int32)."""
        import numpy as np

        counts = np.concatenate([[0], self.loss_mask.cumsum()])
        ends = self.lengths.cumsum()
        lengths: Ints = (counts[ends] - counts[ends - self.lengths]).astype(np.int32)
        return lengths

    @property
    def rewards_differ(self) -> bool:
        """Whether the rows differ in ``rewards``, or in the sum of their ``token_rewards``."""
        if self.rewards.min() < self.rewards.max():
            return True
        if self.token_rewards is None:
            return False
        sums = [float(self.token_rewards[row].sum()) for row in self.responses()]
        return min(sums) < max(sums)

    def responses(self) -> list[slice]:
        """Return each row's slice of the arrays of tokens."""
        lengths = [int(length) for length in self.lengths]
        return [slice(end - length, end) for end, length in zip(accumulate(lengths), lengths, strict=True)]

    @classmethod
    def of_samples(
        cls,
        samples: Sequence[Sequence[Trajectory]],
        *,
        sequence_number: int,
        lease_id: int,
        incarnation: int,
        rewards: Sequence[float],
        metrics: dict[str, float],
        spans: tuple[Span, ...] = (),
    ) -> PromptGroup:
        """Return the group of all trajectories of ``samples``; ``rewards`` has one number per trajectory, in order.

        Tokens after the policy's last one are left out: they cannot be trained.
        """
        import numpy as np

        rows = [trajectory for sample in samples for trajectory in sample]
        prompt_ids = _common_prompt(rows)
        own = [row.trained_segments[prompt_ids is not None :] for row in rows]
        parts = [part for segments in own for part in segments]
        has_rewards = any(part.rewards is not None for part in parts)
        return cls(
            sequence_number=sequence_number,
            lease_id=lease_id,
            incarnation=incarnation,
            prompt_ids=np.empty(0, dtype=np.int32) if prompt_ids is None else prompt_ids,
            token_ids=np.concatenate([part.token_ids for part in parts]),
            logprobs=np.concatenate([_filled(part, part.logprobs, 0, np.float32) for part in parts]),
            versions=np.concatenate([_filled(part, part.versions, -1, np.int32) for part in parts]),
            loss_mask=np.concatenate([np.full(len(part.token_ids), part.by_policy) for part in parts]),
            lengths=np.array([sum(len(part.token_ids) for part in segments) for segments in own], dtype=np.int32),
            samples=np.repeat(np.arange(len(samples), dtype=np.int32), [len(sample) for sample in samples]),
            rewards=np.array(rewards, dtype=np.float32),
            truncated=np.array([row.truncated for row in rows]),
            token_rewards=np.concatenate([_filled(part, part.rewards, 0, np.float32) for part in parts])
            if has_rewards
            else None,
            metrics=metrics,
            spans=spans,
        )


def _common_prompt(rows: Sequence[Trajectory]) -> Ints | None:
    """Return the first segment's tokens if all ``rows`` begin with the same one, else None."""
    import numpy as np

    first = rows[0].segments[0].token_ids
    same = all(np.array_equal(row.segments[0].token_ids, first) for row in rows[1:])
    return first if same else None


def _filled(part: Segment, column: npt.NDArray[np.generic] | None, value: int, dtype: type[np.generic]) -> Any:
    import numpy as np

    return np.full(len(part.token_ids), value, dtype=dtype) if column is None else column
