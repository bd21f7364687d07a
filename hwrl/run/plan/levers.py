"""Settings that make a run fit: levers in the order of their cost, and the fewest of them that are enough."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hwrl.errors import ConfigError
from hwrl.run.config import EMBEDDED, FSDP, Config, parse_config
from hwrl.run.plan.plan import Hardware, make_plan

_MOST = 3
"""Suggestions at most."""


@dataclass(frozen=True)
class Lever:
    """Overrides of the configuration, as ``key: value``, and what they cost."""

    changes: tuple[tuple[str, Any], ...]
    cost: str

    @property
    def words(self) -> list[str]:
        """The overrides as words for the command line."""
        return [f"{key}={_word(value)}" for key, value in self.changes]


@dataclass(frozen=True)
class Suggestion:
    """Levers that make the run fit together."""

    levers: tuple[Lever, ...]

    @property
    def words(self) -> list[str]:
        """The overrides as words for the command line, the last value of each key."""
        return Lever(tuple(dict(change for lever in self.levers for change in lever.changes).items()), "").words


def suggest(config: Config, hardware: Hardware) -> list[Suggestion]:
    """Return up to three ways to make ``config`` fit ``hardware``, the cheapest first; none if no levers are enough.

    Single levers come first. Without one, levers are added until the run fits, and those not needed are taken away.
    """
    levers = list(_levers(config, hardware))
    single: dict[tuple[str, ...], Lever] = {}  # the cheapest value of each key
    for lever in levers:
        keys = tuple(key for key, _ in lever.changes)
        if len(single) < _MOST and keys not in single and _fits(config, hardware, [lever]):
            single[keys] = lever
    if single:
        return [Suggestion((lever,)) for lever in single.values()]
    found: list[Suggestion] = []
    while len(found) < _MOST:
        needed = _smallest(config, hardware, levers)
        if needed is None:
            return found
        found.append(Suggestion(tuple(needed)))
        levers = [lever for lever in levers if lever is not needed[-1]]  # the next way does without the dearest
    return found


def _smallest(config: Config, hardware: Hardware, levers: Sequence[Lever]) -> list[Lever] | None:
    """Return few of ``levers`` that are enough, in their order; None if all are not enough."""
    taken: list[Lever] = []
    for lever in levers:
        if apply(config, [*taken, lever]) is not None:
            taken.append(lever)
        if _fits(config, hardware, taken):
            break
    else:
        return None
    for lever in list(reversed(taken)):
        fewer = [one for one in taken if one is not lever]
        if _fits(config, hardware, fewer):
            taken = fewer
    return taken


def _fits(config: Config, hardware: Hardware, levers: Sequence[Lever]) -> bool:
    changed = apply(config, levers)
    try:
        return changed is not None and make_plan(changed, hardware).fits
    except ConfigError:  # a plugin's engine refuses it, for example the number of ranks
        return False


def apply(config: Config, levers: Sequence[Lever]) -> Config | None:
    """Return ``config`` with the overrides of ``levers``; None if they contradict it."""
    tree = config.model_dump(mode="json")
    for key, value in (change for lever in levers for change in lever.changes):
        *sections, last = key.split(".")
        place = tree
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = value
    try:
        return parse_config(tree)
    except ConfigError:
        return None


def _levers(config: Config, hardware: Hardware) -> Iterator[Lever]:
    """Yield the levers that ``config`` has left, the cheapest first."""
    for rule in (_free, _time, _rollout_size, _placement, _other_model):
        yield from rule(config, hardware)


def _free(config: Config, hardware: Hardware) -> Iterator[Lever]:
    train = config.train
    if train.activation_checkpointing is False:
        yield Lever((("train.activation_checkpointing", "auto"),), "time, only as memory needs it")
    if config.weights.keep_old_version:
        yield Lever((("weights.keep_old_version", False),), "a failed transfer leaves a replica without weights")
    if train.shard_ranks not in (None, train.ranks):
        yield Lever((("train.shard_ranks", None),), "weights are gathered from all ranks")
    if not config.rollout.free_cache_engine:
        yield Lever((("rollout.free_cache_engine", True),), "replicas need time to wake up")


def _time(config: Config, hardware: Hardware) -> Iterator[Lever]:
    train = config.train
    row = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    tokens = train.micro_batch_tokens // 2
    while tokens >= min(row, 2048):
        yield Lever((("train.micro_batch_tokens", tokens),), "more and smaller passes")
        tokens //= 2
    if train.activation_checkpointing is not True:
        yield Lever((("train.activation_checkpointing", True),), "a third more time in each step")
    for ranks in (2, 4, 8):
        if train.engine == FSDP and train.context_parallel < ranks <= train.ranks:
            yield Lever((("train.context_parallel", ranks),), "exchanges of tokens in each layer")
    if not train.host_step and not (train.param_offload and train.optimizer_offload):
        offloads = (("train.param_offload", True), ("train.optimizer_offload", True))
        yield Lever(offloads, "copies from and to the host in each step")


def _rollout_size(config: Config, hardware: Hardware) -> Iterator[Lever]:
    running = config.rollout.max_running // 2
    while config.rollout.engine == EMBEDDED and running >= max(config.rollout.n, 4):
        yield Lever((("rollout.max_running", running),), "fewer responses at the same time")
        running //= 2
    width = 2 * config.rollout.tensor_parallel
    while config.rollout.engine != EMBEDDED and width <= hardware.devices // hardware.nodes:
        replicas = max(1, config.rollout.replicas * config.rollout.tensor_parallel // width)
        changes = (("rollout.tensor_parallel", width), ("rollout.replicas", replicas))
        yield Lever(changes, "collectives in each token")
        width *= 2


def _placement(config: Config, hardware: Hardware) -> Iterator[Lever]:
    rollout, ranks = config.rollout, config.train.ranks
    for replicas in dict.fromkeys([rollout.replicas, max(1, rollout.replicas // 2), 1]):
        left = hardware.devices - replicas * rollout.tensor_parallel
        left -= left % config.train.context_parallel
        if left > ranks:
            changes = [("train.ranks", left)] + [("rollout.replicas", replicas)] * (replicas != rollout.replicas)
            yield Lever(tuple(changes), "fewer devices for other work")
    if not config.train.host_step and config.train.engine == FSDP:
        changes = [("train.host_step", True), ("train.param_offload", False), ("train.optimizer_offload", False)]
        yield Lever(tuple(changes), "gradients and weights cross to the host in each step, and its cores step")


def _other_model(config: Config, hardware: Hardware) -> Iterator[Lever]:
    if config.model.dtype == "float32":
        yield Lever((("model.dtype", "bfloat16"),), "computes with fewer digits")
    if not config.model.lora_rank and config.train.engine == FSDP:
        yield Lever((("model.lora_rank", 32),), "trains an adapter, not the model")


def _word(value: Any) -> str:
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)
