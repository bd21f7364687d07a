"""Find settings that make a run fit: levers in the order of their cost, and small sets of levers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hwrl.errors import ConfigError
from hwrl.run import EMBEDDED, FSDP, Config
from hwrl_plan.planning import Hardware, make_plan

_MAX_SUGGESTIONS = 3
"""The maximum number of suggestions."""


@dataclass(frozen=True)
class Lever:
    """Overrides of the configuration that save memory, as (key, value), and their cost as text."""

    changes: tuple[tuple[str, Any], ...]
    cost: str

    @property
    def overrides(self) -> list[str]:
        """The overrides in the form of the command line: ``key=value``."""
        return [f"{key}={_yaml_value(value)}" for key, value in self.changes]


@dataclass(frozen=True)
class Suggestion:
    """Levers that make the run fit if they are all applied."""

    levers: tuple[Lever, ...]

    @property
    def overrides(self) -> list[str]:
        """The overrides of all levers in the form of the command line. For a repeated key, only the last value."""
        return Lever(tuple(dict(change for lever in self.levers for change in lever.changes).items()), "").overrides


def suggest(config: Config, hardware: Hardware) -> list[Suggestion]:
    """Return up to three ways to make ``config`` fit ``hardware``, the cheapest first; an empty list if there is none.

    If single levers are enough, only those are returned. Otherwise levers are added, from the cheapest on, until the
    run fits, and unnecessary ones are removed again.
    """
    rules = (_free, _time, _rollout_size, _placement, _other_model)
    levers = [lever for rule in rules for lever in rule(config, hardware)]  # the cheapest first
    single: dict[tuple[str, ...], Lever] = {}  # the cheapest value of each key
    for lever in levers:
        keys = tuple(key for key, _ in lever.changes)
        if len(single) < _MAX_SUGGESTIONS and keys not in single and _fits(config, hardware, [lever]):
            single[keys] = lever
    if single:
        return [Suggestion((lever,)) for lever in single.values()]
    suggestions: list[Suggestion] = []
    while len(suggestions) < _MAX_SUGGESTIONS:
        needed = _smallest(config, hardware, levers)
        if needed is None:
            return suggestions
        suggestions.append(Suggestion(tuple(needed)))
        levers = [lever for lever in levers if lever is not needed[-1]]  # next, try without the most expensive one
    return suggestions


def _smallest(config: Config, hardware: Hardware, levers: Sequence[Lever]) -> list[Lever] | None:
    """Return a small subset of ``levers`` for a run that fits; None if it does not fit even with all of them."""
    taken: list[Lever] = []
    for lever in levers:
        if apply(config, [*taken, lever]) is not None:
            taken.append(lever)
        if _fits(config, hardware, taken):
            break
    else:
        return None
    for lever in list(reversed(taken)):
        fewer = [other for other in taken if other is not lever]
        if _fits(config, hardware, fewer):
            taken = fewer
    return taken


def _fits(config: Config, hardware: Hardware, levers: Sequence[Lever]) -> bool:
    changed = apply(config, levers)
    try:
        return changed is not None and make_plan(changed, hardware).fits
    except ConfigError:  # a plugin's engine may refuse a value, for example the number of ranks
        return False


def apply(config: Config, levers: Sequence[Lever]) -> Config | None:
    """Return ``config`` with the overrides of ``levers``; None if the result is not a valid configuration."""
    tree = config.model_dump(mode="json")
    for key, value in (change for lever in levers for change in lever.changes):
        *sections, last = key.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[last] = value
    try:
        return Config.model_validate(tree)
    except ValueError:
        return None


def _free(config: Config, hardware: Hardware) -> Iterator[Lever]:
    train = config.train
    if train.activation_checkpointing is False:
        yield Lever((("train.activation_checkpointing", "auto"),), "time, but only as far as memory requires")
    if config.weights.keep_old_version:
        yield Lever((("weights.keep_old_version", False),), "a failed transfer leaves a replica without weights")
    if train.shard_ranks not in (None, train.ranks):
        yield Lever((("train.shard_ranks", None),), "weights must be gathered from all ranks")
    if not config.rollout.free_cache_engine:
        yield Lever((("rollout.free_cache_engine", True),), "replicas need time to wake up")


def _time(config: Config, hardware: Hardware) -> Iterator[Lever]:
    train = config.train
    row = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    tokens = train.micro_batch_tokens // 2
    while tokens >= min(row, 2048):
        yield Lever((("train.micro_batch_tokens", tokens),), "more passes, and smaller ones")
        tokens //= 2
    if train.activation_checkpointing is not True:
        yield Lever((("train.activation_checkpointing", True),), "a third more time in each step")
    for ranks in (2, 4, 8):
        if train.engine == FSDP and train.context_parallel < ranks <= train.ranks:
            yield Lever((("train.context_parallel", ranks),), "communication between ranks in each layer")
    if not train.host_step and not (train.param_offload and train.optimizer_offload):
        offloads = (("train.param_offload", True), ("train.optimizer_offload", True))
        yield Lever(offloads, "copies to and from the host in each step")


def _rollout_size(config: Config, hardware: Hardware) -> Iterator[Lever]:
    running = config.rollout.max_running // 2
    while config.rollout.engine == EMBEDDED and running >= max(config.rollout.n, 4):
        yield Lever((("rollout.max_running", running),), "fewer responses at the same time")
        running //= 2
    width = 2 * config.rollout.tensor_parallel
    while config.rollout.engine != EMBEDDED and width <= hardware.devices // hardware.nodes:
        replicas = max(1, config.rollout.replicas * config.rollout.tensor_parallel // width)
        changes = (("rollout.tensor_parallel", width), ("rollout.replicas", replicas))
        yield Lever(changes, "collectives for each token")
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
        yield Lever(tuple(changes), "gradients and weights move through the host, whose cores run the optimizer")


def _other_model(config: Config, hardware: Hardware) -> Iterator[Lever]:
    if config.model.dtype == "float32":
        yield Lever((("model.dtype", "bfloat16"),), "lower precision")
    if not config.model.lora_rank and config.train.engine == FSDP:
        yield Lever((("model.lora_rank", 32),), "trains an adapter, not the model")


def _yaml_value(value: Any) -> str:
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)
