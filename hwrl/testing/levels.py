"""The levels of the conformance kit, and the kinds of plugins that it checks."""

from __future__ import annotations

from enum import StrEnum


class Level(StrEnum):
    """How far the kit goes. A level includes all levels before it."""

    COMPUTE = "compute"
    """Arithmetic: results equal the host's, up to rounding."""
    DEVICE = "device"
    """The plugin's identity, streams, events, random numbers, memory, offload."""
    COLLECTIVES = "collectives"
    """Two processes: groups, DeviceMesh, FSDP2; a transport between them."""
    TRAIN = "train"
    """A train engine: its state, its weights, learning."""
    ROLLOUT = "rollout"
    """A rollout engine: queues, ends of responses, new weights; weight transfers and their failures."""
    FULL = "full"
    """A short run of ``hwrl train``."""

    @property
    def included(self) -> tuple[Level, ...]:
        """This level and those before it."""
        levels = tuple(Level)
        return levels[: levels.index(self) + 1]


class Kind(StrEnum):
    """What the kit checks."""

    BACKEND = "backend"
    TRAIN_ENGINE = "train-engine"
    ROLLOUT_ENGINE = "rollout-engine"
    TRANSPORT = "transport"
