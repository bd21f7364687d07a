"""Workflows that are ready: text environments and conversations with tools; see ``docs/workflows.md``.

``rollout.workflow=hwrl_workflows:environment`` and ``rollout.workflow=hwrl_workflows:tool_use`` name them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hwrl.lazy import lazy_names

if TYPE_CHECKING:
    from hwrl_workflows.environments import TextEnvironment, environment
    from hwrl_workflows.tools import tool_use

__all__ = ["TextEnvironment", "environment", "tool_use"]

__getattr__, _ = lazy_names(
    __name__, {"TextEnvironment": "environments", "environment": "environments", "tool_use": "tools"}
)
