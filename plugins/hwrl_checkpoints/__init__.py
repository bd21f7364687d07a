"""``hwrl checkpoints``: list, verify, export, join and prune the checkpoints of a run; see ``docs/checkpoints.md``."""

from __future__ import annotations

import hwrl
from hwrl.interfaces import Command

__all__: list[str] = []


@hwrl.hookimpl
def hwrl_commands() -> list[Command]:
    from hwrl_checkpoints import command

    return [Command("checkpoints", command.HELP, command.configure, command.run)]
