"""Training on Megatron-core: ``train.engine=megatron``; see ``docs/megatron.md``.

Importing this module imports neither torch nor megatron.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import hwrl
from hwrl.errors import EngineError, UnsupportedError
from hwrl_megatron.options import parse_options

if TYPE_CHECKING:
    from hwrl.comm import Group
    from hwrl.interfaces import Backend, EngineSettings, TrainEngine


@hwrl.hookimpl
def hwrl_check_engine(options: Mapping[str, Any]) -> None:
    if importlib.util.find_spec("megatron") is None:
        raise EngineError(
            "train.engine=megatron cannot be used",
            why="megatron-core is not installed",
            fix="pip install hwrl[megatron]",
        )
    parse_options(options)


@hwrl.hookimpl
def hwrl_train_engine(
    settings: EngineSettings, options: Mapping[str, Any], backend: Backend, group: Group | None
) -> TrainEngine:
    hwrl_check_engine(options)
    if settings.lora is not None:
        raise UnsupportedError(
            "train.engine=megatron trains no adapter",
            why="PEFT, which makes adapters, knows no layers of Megatron-core's",
            fix="use train.engine=fsdp, or train the whole model with model.lora_rank=0",
        )
    from hwrl.discovery import bootstrap

    chosen = parse_options(options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # megatron's, of its own defaults and of libraries that are not installed
        bootstrap("megatron")
        from hwrl_megatron.engine import MegatronEngine

        return MegatronEngine(settings, backend=backend, group=group, options=chosen)
