"""Load an environment of verifiers, and the tasks of its taskset."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

from hwrl.errors import DataError, UnsupportedError


def load_env(taskset: str | Mapping[str, Any], **settings: Any) -> Any:
    """Return verifiers' ``Env`` for ``taskset``, an id or settings with ``id``. ``settings`` are others of EnvConfig.

    Raises UnsupportedError without verifiers, and verifiers' own errors.
    """
    if importlib.util.find_spec("verifiers") is None or importlib.util.find_spec("verifiers.v1") is None:
        raise UnsupportedError(
            "environments of verifiers cannot be played",
            why="the package verifiers is not installed, or older than 0.4",
            fix="pip install 'hwrl[verifiers]', on every machine with replicas",
        )
    from verifiers.v1.utils.loaders import load_environment, resolve_env_config

    chosen = {"id": taskset} if isinstance(taskset, str) else dict(taskset)
    return load_environment(resolve_env_config({**settings, "taskset": chosen}))


def load_tasks(env: Any, *, limit: int | None) -> dict[int, Any]:
    """Return the first ``limit`` tasks of ``env``, or all, by index. Raises DataError for an infinite number."""
    tasks = env.taskset if limit is None else env.taskset.take(limit)
    if not tasks.bounded:
        raise DataError(
            f"the taskset {env.config.taskset.id} is infinite",
            why="all tasks are loaded at the start",
            fix="set a limit: rollout.workflow_options.limit, and the same with hwrl verifiers-rows --limit",
        )
    return {task.data.idx: task for task in tasks}
