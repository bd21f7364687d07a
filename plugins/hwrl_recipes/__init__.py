"""``hwrl recipe``: configurations of whole runs, with their data and rewards; see ``docs/recipes``."""

from __future__ import annotations

import hwrl
from hwrl.interfaces import Command

__all__: list[str] = []


@hwrl.hookimpl
def hwrl_commands() -> list[Command]:
    from hwrl_recipes import command

    return [Command("recipe", command.HELP, command.configure, command.run)]
