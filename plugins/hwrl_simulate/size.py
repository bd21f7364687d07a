"""The size of a simulated run: its processes, and the placement that a real run would choose for them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from hwrl.errors import ConfigError
from hwrl.run import Config

DEVICES_OF_A_NODE = 8
"""The assumed number of devices per machine. The choice of the senders depends on it."""
MOST_SENDERS = 8
"""The most senders of a real run with ``weights.senders=auto``."""


@dataclass(frozen=True)
class SimulatedSize:
    """A run on ``devices`` devices. ``shared`` means that trainer and replicas take turns on the same devices.

    ``config`` has the numbers of ranks, replicas and groups for this size. ``senders`` ranks send the weights.
    """

    config: Config
    devices: int
    senders: int
    shared: bool


def scaled(config: Config, devices: int, *, steps: int, fixed_batch: bool = False) -> SimulatedSize:
    """Return the run of ``config`` on ``devices`` devices, for ``steps`` training steps.

    The ratio of ranks and replicas stays the same. The groups of a step grow with the number of devices unless
    ``fixed_batch`` is set. Raises ConfigError if there are too few devices.
    """
    width = config.rollout.tensor_parallel
    factor = devices / (config.train.ranks + config.rollout.replicas * width)
    replicas = max(1, min(round(config.rollout.replicas * factor), (devices - 1) // width))
    ranks = max(1, devices - replicas * width)
    groups = config.train.batch_groups if fixed_batch else max(1, round(config.train.batch_groups * factor))
    return placed(_resized(config, ranks=ranks, replicas=replicas, groups=groups, steps=steps), devices)


def synchronous(size: SimulatedSize) -> SimulatedSize:
    """Return the synchronous baseline: all devices generate, then all train, and every group is on-policy."""
    config, width = size.config, size.config.rollout.tensor_parallel
    steps = max(1, config.train.steps // config.async_training.trigger_parameter_sync_step)
    replicas = max(1, size.devices // width)
    resized = _resized(config, ranks=size.devices, replicas=replicas, groups=config.groups_per_version, steps=steps)
    turns = resized.async_training.model_copy(update={"staleness_threshold": 0, "trigger_parameter_sync_step": 1})
    return SimulatedSize(resized.model_copy(update={"async_training": turns}), size.devices, 1, shared=True)


def _resized(config: Config, *, ranks: int, replicas: int, groups: int, steps: int) -> Config:
    """Return ``config`` with these numbers. They may exceed the maximum number of processes of a real run."""
    train = config.train.model_copy(update={"ranks": ranks, "batch_groups": groups, "steps": steps})
    rollout = config.rollout.model_copy(update={"replicas": replicas})
    return config.model_copy(update={"train": train, "rollout": rollout})


def placed(config: Config, devices: int | None = None) -> SimulatedSize:
    """Return the run of ``config`` on ``devices`` devices (None: as many as its ranks and replicas need).

    Trainer and replicas do not share devices. Raises ConfigError if there are too few devices.
    """
    ranks, width = config.train.ranks, config.rollout.tensor_parallel
    needed = ranks + config.rollout.replicas * width
    devices = needed if devices is None else devices
    if needed > devices:
        raise ConfigError(
            f"the run needs {needed} devices",
            why=f"train.ranks={ranks} and rollout.replicas={config.rollout.replicas} "
            f"of rollout.tensor_parallel={width} need devices of their own, and {devices} are free",
            fix="simulate more devices, or fewer ranks or replicas",
        )
    several_machines = devices > DEVICES_OF_A_NODE
    if several_machines and not config.weights.bypass_cpu:
        raise ConfigError(
            f"weights cannot reach {devices} devices",
            why=f"weights.bypass_cpu=false works on one machine only, and a machine has {DEVICES_OF_A_NODE} devices",
            fix="set weights.bypass_cpu=true",
        )
    # "auto" is as many as a receiving machine's adapters, since it receives each byte once.
    widest = max(Counter(device // DEVICES_OF_A_NODE for device in range(ranks, needed)).values())
    auto = min(ranks, widest, MOST_SENDERS) if several_machines else 1
    senders = auto if config.weights.senders == "auto" else config.weights.senders
    return SimulatedSize(config, devices, senders, shared=False)
