"""``hwrl plan``: the memory and the traffic of a run, from its configuration alone; see ``docs/plan.md``."""

from __future__ import annotations

import hwrl
from hwrl.interfaces import Command

__all__: list[str] = []


@hwrl.hookimpl
def hwrl_commands() -> list[Command]:
    from hwrl_plan import command

    return [Command("plan", command.HELP, command.configure, command.run)]
