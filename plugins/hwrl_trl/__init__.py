"""hwrl's parts inside transformers' Trainer, TRL and accelerate; ``docs/trl.md`` shows them.

Importing this module imports neither torch nor transformers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import hwrl
from hwrl.interfaces import Command
from hwrl.lazy import lazy_names

if TYPE_CHECKING:
    from hwrl_trl.checkpoints import CheckpointCallback
    from hwrl_trl.offload import OffloadCallback
    from hwrl_trl.weights import AsyncWeights, weights_by_hwrl

__all__ = ["AsyncWeights", "CheckpointCallback", "OffloadCallback", "hwrl_commands", "weights_by_hwrl"]

_MODULE_OF = {
    "AsyncWeights": "weights",
    "CheckpointCallback": "checkpoints",
    "OffloadCallback": "offload",
    "weights_by_hwrl": "weights",
}


# The module keeps its own dir(), because pluggy looks there for the hook.
__getattr__, _ = lazy_names(__name__, _MODULE_OF)


@hwrl.hookimpl
def hwrl_commands() -> list[Command]:
    """Return ``hwrl trl-demo``."""
    from hwrl_trl import demo

    return [Command("trl-demo", demo.HELP, demo.configure, demo.run)]
