"""Rollout on vLLM: ``rollout.engine=vllm``. Importing this module imports neither vLLM nor torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import hwrl

if TYPE_CHECKING:
    from hwrl.backend import Backend
    from hwrl.rollout.engine import RolloutEngine, RolloutSettings


@hwrl.hookimpl
def hwrl_rollout_engine(settings: RolloutSettings, options: Mapping[str, Any], backend: Backend) -> RolloutEngine:
    from hwrl_vllm.engine import VllmEngine

    return VllmEngine(settings, options=options, backend=backend)
