"""The engines of a trainer rank, with one state for checkpoints: :class:`Engines`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hwrl.interfaces import LentState, LentTensor, OffloadedState, TrainEngine

if TYPE_CHECKING:
    import torch

    from hwrl.train.critic import CriticEngine

_CRITIC = "critic"
"""The key of the critic's state, beside the keys of the policy's."""


@dataclass(frozen=True)
class Engines:
    """The policy, and a critic or None. A checkpoint has both after the same step, or the policy alone."""

    policy: TrainEngine
    critic: CriticEngine | None = None

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Keep all parameters and optimizer states on the device for the block."""
        with ExitStack() as loaded:
            for engine in self._all:
                loaded.enter_context(engine.on_device(optimizer=True))
            yield

    @contextmanager
    def saved_state(self) -> Iterator[tuple[dict[str, Any], OffloadedState | None]]:
        """Yield the state to save inside the block, and the owner of its offloaded part, or None."""
        with ExitStack() as saved:
            states, owners = zip(*(saved.enter_context(engine.saved_state()) for engine in self._all), strict=True)
            offloaded = [owner for owner in owners if owner is not None]
            yield self._joined(states), _JoinedState(offloaded) if len(offloaded) > 1 else (offloaded or [None])[0]

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all engines."""
        return self._joined([engine.state_dict() for engine in self._all])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a :meth:`state_dict`."""
        self.policy.load_state_dict({key: value for key, value in state.items() if key != _CRITIC})
        if self.critic is not None:
            self.critic.load_state_dict(state[_CRITIC])

    def close(self) -> None:
        """Close all engines."""
        for engine in reversed(self._all):
            engine.close()

    @property
    def _all(self) -> Sequence[TrainEngine]:
        return [self.policy] if self.critic is None else [self.critic, self.policy]

    @staticmethod
    def _joined(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        *critics, policy = states
        return {**policy, _CRITIC: critics[0]} if critics else dict(policy)


class _JoinedState:
    """The offloaded parts of several owners, and their host copies while they are lent."""

    def __init__(self, owners: Sequence[OffloadedState]) -> None:
        self._owners = owners
        self._parts: list[LentState] = []

    def lend_all(self) -> LentState:
        self._parts = [owner.lend_all() for owner in self._owners]
        return self

    def holds(self, tensor: torch.Tensor) -> bool:
        return any(part.holds(tensor) for part in self._parts)

    def lend(self, tensor: torch.Tensor) -> LentTensor | None:
        return next((part.lend(tensor) for part in self._parts if part.holds(tensor)), None)

    def give_back(self) -> None:
        for part in self._parts:
            part.give_back()
