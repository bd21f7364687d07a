"""``hwrl bench``: measure hwrl beside torch and other packages; see ``docs/benchmarks.md``.

Importing this module imports no torch.
"""

from __future__ import annotations

import hwrl
from hwrl.interfaces import Command

__all__ = ["hwrl_commands"]


@hwrl.hookimpl
def hwrl_commands() -> list[Command]:
    from hwrl_bench import command

    return [Command("bench", command.HELP, command.configure, command.run)]
