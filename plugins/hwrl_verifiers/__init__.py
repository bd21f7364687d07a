"""Environments of verifiers as workflows: ``rollout.workflow=hwrl_verifiers:environment``; see ``docs/workflows.md``.

Importing this module imports neither torch nor verifiers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import hwrl
from hwrl.interfaces import Command

if TYPE_CHECKING:
    from hwrl.rollout import Workflow

__all__ = ["environment", "hwrl_commands"]


def environment(
    *,
    tokenizer: Any,
    taskset: str | Mapping[str, Any],
    limit: int | None = None,
    host: str = "127.0.0.1",
    **settings: Any,
) -> Workflow:
    """Return a workflow that plays episodes of ``taskset``; a factory for ``rollout.workflow``.

    ``taskset`` is the taskset's id, or its settings with ``id``. Only its first ``limit`` tasks are read; an infinite
    taskset needs a limit. Agents find the policy at ``host``, an address of the replica's machine. ``settings`` are the
    other settings of verifiers' ``EnvConfig``: ``agent``, or ``id`` for an environment of several agents. The run's
    prompts must be the rows of ``hwrl verifiers-rows``. Blocks while the tasks load. Raises UnsupportedError without
    verifiers, and verifiers' own errors.
    """
    from hwrl_verifiers.tasks import load_env, load_tasks

    env = load_env(taskset, **settings)
    from hwrl_verifiers.episodes import Episodes  # needs verifiers

    return Episodes(env, load_tasks(env, limit=limit), host=host).play


@hwrl.hookimpl
def hwrl_commands() -> list[Command]:
    from hwrl_verifiers import rows

    return [Command("verifiers-rows", rows.HELP, rows.configure, rows.run)]
