"""``hwrl simulate``: simulate a run on thousands of devices; see ``docs/simulate.md``. No device is needed."""

from __future__ import annotations

import hwrl
from hwrl.interfaces import Command

__all__: list[str] = []


@hwrl.hookimpl
def hwrl_commands() -> list[Command]:
    from hwrl_simulate import command

    return [Command("simulate", command.HELP, command.configure, command.run)]
