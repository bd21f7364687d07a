"""OpenAI-compatible endpoints for agents, with a record of the policy's exact tokens; see ``docs/agents.md``."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from hwrl.errors import UnsupportedError
from hwrl.lazy import lazy_names

if TYPE_CHECKING:
    from hwrl.rollout import PolicyClient
    from hwrl_agents.server import EndpointServer
    from hwrl_agents.session import Endpoint

__all__ = ["Endpoint", "EndpointServer", "serve"]

__getattr__, _ = lazy_names(__name__, {"Endpoint": "session", "EndpointServer": "server"})


@contextlib.asynccontextmanager
async def serve(client: PolicyClient, *, host: str = "127.0.0.1") -> AsyncIterator[Endpoint]:
    """Serve the policy to an agent over HTTP while the block runs; see :class:`Endpoint`.

    All endpoints of an event loop at ``host``, an address of this machine, have one server. Raises UnsupportedError if
    hwrl's extra ``agents`` is not installed, and ConfigError for another machine's address.
    """
    try:
        from hwrl_agents.server import server_at
    except ImportError as exc:
        raise UnsupportedError(
            "this process cannot serve endpoints",
            why=f"a package is not installed: {exc}",
            fix="pip install 'hwrl[agents]', on every machine with replicas",
        ) from exc
    with server_at(host).open(client, chat=client.chat) as opened:
        yield opened
