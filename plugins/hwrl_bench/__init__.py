"""``hwrl bench``: measure hwrl beside torch and other packages; see ``docs/benchmarks.md``.

Importing this module imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import hwrl
from hwrl.interfaces import Command
from hwrl.lazy import lazy_names

if TYPE_CHECKING:
    from hwrl_bench.models import MODELS
    from hwrl_bench.result import provenance
    from hwrl_bench.ways import BenchPlan, TransferResult, TransferWay
    from hwrl_bench.worker import BenchWorker

__all__ = [
    "MODELS",
    "BenchPlan",
    "BenchWorker",
    "TransferResult",
    "TransferWay",
    "hwrl_commands",
    "provenance",
]

_MODULE_OF = {
    "MODELS": "models",
    "BenchPlan": "ways",
    "BenchWorker": "worker",
    "TransferResult": "ways",
    "TransferWay": "ways",
    "provenance": "result",
}

__getattr__, _ = lazy_names(__name__, _MODULE_OF)  # its own dir() stays: the hook must be found there


@hwrl.hookimpl
def hwrl_commands() -> list[Command]:
    from hwrl_bench import command

    return [Command("bench", command.HELP, command.configure, command.run)]
