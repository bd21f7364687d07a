"""The options under ``train.engine_options``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from hwrl.errors import ConfigError, did_you_mean


@dataclass(frozen=True)
class MegatronOptions:
    """The numbers of ranks that share a copy of the model; the copies are data-parallel.

    ``tensor_parallel`` ranks share each layer. ``pipeline_parallel`` stages have the layers one after the other.
    ``expert_parallel`` copies of the model share its experts.
    """

    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    expert_parallel: int = 1


def parse_options(options: Mapping[str, Any]) -> MegatronOptions:
    """Check and return ``options``. A ConfigError names the wrong key and suggests the right one."""
    known = [field.name for field in fields(MegatronOptions)]
    for key, value in options.items():
        if key not in known:
            raise ConfigError(
                f"there is no option train.engine_options.{key}",
                why=f"train.engine=megatron knows {', '.join(known)}",
                fix=did_you_mean(key, known, otherwise="remove it"),
            )
        if type(value) is not int or value < 1:
            raise ConfigError(
                f"train.engine_options.{key}={value!r} is not possible",
                why="it is a number of ranks",
                fix="give 1 or more",
            )
    return MegatronOptions(**options)
