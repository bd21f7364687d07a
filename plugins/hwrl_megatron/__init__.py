"""Training on Megatron-core: ``train.engine=megatron``; see ``docs/megatron.md``.

Importing this module imports neither torch nor megatron.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import hwrl
from hwrl.errors import EngineError, UnsupportedError
from hwrl_megatron.options import parse_options

if TYPE_CHECKING:
    from hwrl.comm import Group
    from hwrl.interfaces import Backend, EngineSettings, MemoryCause, RolloutSettings, TrainEngine

__all__ = ["hwrl_check_engine", "hwrl_engine_memory", "hwrl_train_engine", "prepare_process"]


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
            why="PEFT, the library for adapters, does not support layers of Megatron-core",
            fix="use train.engine=fsdp, or train the whole model with model.lora_rank=0",
        )
    chosen = parse_options(options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron warns of its own defaults and of missing optional libraries
        prepare_process()
        from hwrl_megatron.engine import MegatronEngine

        return MegatronEngine(settings, backend=backend, group=group, options=chosen)


@hwrl.hookimpl
def hwrl_engine_memory(
    settings: EngineSettings | RolloutSettings, options: Mapping[str, Any], ranks: int, device_nbytes: int
) -> Iterable[MemoryCause]:
    from hwrl.interfaces import EngineSettings
    from hwrl_megatron.memory import engine_memory

    assert isinstance(settings, EngineSettings), "the plugin has no rollout engine"
    return engine_memory(settings, parse_options(options), ranks=ranks, device_nbytes=device_nbytes)


def prepare_process() -> None:
    """Prepare this process for Megatron-core on its backend; call it before importing megatron.

    Megatron-core asks ``torch.cuda`` for its device. The backend's plugin may install an adaptor, in its hook
    ``hwrl_bootstrap``. A backend without streams has no device module like ``torch.cuda``: its device is the host, and
    Megatron's modules are redirected to it. Later calls do nothing. Raises BackendUnavailableError if the process needs
    preparation and has already imported megatron.
    """
    from hwrl.discovery import bootstrap, get_backend

    backend = get_backend()
    bootstrap("megatron")
    if not backend.supports(hwrl.Capability.STREAMS).usable:
        from hwrl_megatron.host import redirect

        redirect(backend.device())
