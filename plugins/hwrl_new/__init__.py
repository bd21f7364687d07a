"""``hwrl new-backend``, ``new-engine`` and ``new-transport``: write a package that works, to be changed."""

from __future__ import annotations

import hwrl
from hwrl.interfaces import Command

__all__: list[str] = []


@hwrl.hookimpl
def hwrl_commands() -> list[Command]:
    from hwrl.testing import Kind
    from hwrl_new.packages import new_package_command

    return [
        new_package_command("new-backend", Kind.BACKEND),
        new_package_command("new-engine", Kind.ROLLOUT_ENGINE, Kind.TRAIN_ENGINE),
        new_package_command("new-transport", Kind.TRANSPORT),
    ]
