"""``hwrl report``: one HTML file about a run, made from the files in the run directory; see ``docs/report.md``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import hwrl
from hwrl.interfaces import Command
from hwrl.lazy import lazy_names

if TYPE_CHECKING:
    from hwrl_report.build import build_page

__all__ = ["build_page", "hwrl_commands"]

__getattr__, _ = lazy_names(__name__, {"build_page": "build"})  # its own dir() stays: the hook must be found there


@hwrl.hookimpl
def hwrl_commands() -> list[Command]:
    from hwrl_report import command

    return [Command("report", command.HELP, command.configure, command.run)]
