"""What a workflow gets to work with: the policy as a client, and a builder of trajectories."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from hwrl.errors import EngineError
from hwrl.interfaces import Ints, Response, Sampling, Segment, Trajectory
from hwrl.rollout.chat import ChatTokens


class PolicyClient:
    """The policy, for the runs of a workflow on one prompt. Call its methods in the workflows' event loop only.

    ``tokenizer`` is the model's. ``sampling`` is the run's, with the prompt's own limit on new tokens. A conversation
    has at most ``max_length`` tokens, the generated ones included. Token ids are below ``vocabulary``. ``chat`` turns
    messages into tokens, and the policy's tokens into messages.
    """

    def __init__(
        self,
        generate: Callable[[Ints, Sampling], Awaitable[Response]],
        *,
        chat: ChatTokens,
        sampling: Sampling,
        max_length: int,
        vocabulary: int,
    ) -> None:
        self._generate, self.vocabulary = generate, vocabulary
        self.tokenizer, self.chat = chat.tokenizer, chat
        self.sampling, self.max_length = sampling, max_length

    async def generate(self, token_ids: Sequence[int] | Ints, sampling: Sampling | None = None) -> Response:
        """Return the policy's continuation of ``token_ids``. New weights may arrive between two of its tokens.

        ``sampling`` replaces the run's. ``max_length`` may lower its ``max_new_tokens``. Raises EngineError if
        ``max_length`` leaves no room, if the model lacks a token of ``token_ids``, and for greedy sampling in training.
        """
        ids = np.asarray(token_ids, dtype=np.int32)
        room = self.max_length - len(ids)
        if room <= 0 or not len(ids):
            raise EngineError(
                f"the policy cannot continue {len(ids)} tokens",
                why=f"a conversation has 1 to {self.max_length} tokens with the generated ones (rollout.max_model_len)",
                fix="end the trajectory before that, or raise rollout.max_model_len",
            )
        if ids.min() < 0 or ids.max() >= self.vocabulary:
            raise EngineError(
                f"the model has no token {ids.max() if ids.min() >= 0 else ids.min()}",
                why=f"its tokens are 0 to {self.vocabulary - 1}",
                fix="encode text with client.tokenizer",
            )
        sampling = sampling or self.sampling
        if sampling.temperature == 0 and self.sampling.temperature > 0:
            raise EngineError(
                "a greedy response cannot be trained",
                why="its tokens are certain, and their log-probabilities are those of temperature 1",
                fix="leave the temperature to the run; evaluations are greedy by themselves",
            )
        return await self._generate(ids, replace(sampling, max_new_tokens=min(room, sampling.max_new_tokens)))

    def begin(self, prompt_ids: Sequence[int] | Ints) -> TrajectoryBuilder:
        """Return a builder of a trajectory that begins with ``prompt_ids``."""
        return TrajectoryBuilder(self, prompt_ids)


class TrajectoryBuilder:
    """Builds a trajectory turn by turn: :meth:`generate` adds the policy's tokens, :meth:`add` other authors'."""

    def __init__(self, client: PolicyClient, prompt_ids: Sequence[int] | Ints) -> None:
        self._client, self._truncated = client, False
        self._segments = [Segment(np.asarray(prompt_ids, dtype=np.int32))]

    @property
    def token_ids(self) -> Ints:
        """All tokens so far."""
        return np.concatenate([segment.token_ids for segment in self._segments])

    @property
    def room(self) -> int:
        """How many more tokens fit into the conversation; 0 or less if it is full."""
        return self._client.max_length - sum(len(segment.token_ids) for segment in self._segments)

    async def generate(self, sampling: Sampling | None = None, *, reward: float | None = None) -> Response:
        """Let the policy continue; append its response, and return it. ``reward`` is as for :meth:`reward_turn`.

        Raises what :meth:`PolicyClient.generate` raises.
        """
        before = len(self._segments)
        response = await self._client.generate(self.token_ids, sampling)
        if len(self._segments) != before:
            raise EngineError(
                "the trajectory changed while the policy continued it",
                why="the response continues other tokens than those that would stand before it",
                fix="await generate() before the next generate() or add(); begin a trajectory for each branch",
            )
        self._segments.append(Segment.of_response(response, reward=reward))
        self._truncated = response.truncated
        return response

    def add(self, token_ids: Sequence[int] | Ints) -> None:
        """Append the tokens of another author: a tool, a user, a template. They are not trained."""
        self._segments.append(Segment(np.asarray(token_ids, dtype=np.int32)))

    def reward_turn(self, reward: float) -> None:
        """Set the reward of the policy's newest turn; its last token carries it."""
        last = max(index for index, segment in enumerate(self._segments) if segment.by_policy)
        self._segments[last] = self._segments[last].rewarded(reward)

    def finish(
        self, reward: float | None = None, metrics: Mapping[str, float] | None = None, *, truncated: bool = False
    ) -> Trajectory:
        """Return the trajectory. Without ``reward`` the run's reward function judges it.

        It counts as truncated if a limit on tokens ended the policy's last turn, or if ``truncated`` is true.
        """
        return Trajectory(tuple(self._segments), reward, dict(metrics or {}), self._truncated or truncated)
