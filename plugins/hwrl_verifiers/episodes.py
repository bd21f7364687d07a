"""Episodes of verifiers as runs of a workflow. Verifiers plays and rewards them; hwrl's endpoints record the tokens."""

from __future__ import annotations

import asyncio
import contextlib
import copy
from collections.abc import AsyncIterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

from verifiers.v1.clients import EvalClientConfig, ModelContext

from hwrl.errors import DataError
from hwrl.interfaces import Trajectory
from hwrl.rollout import PolicyClient, Prompt
from hwrl_agents import Endpoint, serve

_POLICY = ModelContext(
    model="policy",
    client=EvalClientConfig(base_url="http://127.0.0.1:9/v1", api_key_var="HWRL_POLICY"),
)
"""The model of agents without a client of their own. Its address and key are not used: each agent gets an endpoint of
hwrl. So verifiers' records and logs contain no key."""


@dataclass(frozen=True)
class _Episode:
    """A run of the workflow. Its endpoints listen at ``host``.

    ``endpoints`` has the endpoint of each agent, by the id of the agent's trace.
    """

    client: PolicyClient
    host: str
    endpoints: dict[str, Endpoint] = field(default_factory=dict)


_run: ContextVar[_Episode] = ContextVar("_run")


class Episodes:
    """Plays episodes of ``env``, for the tasks by index. The servers of ``env`` start with the first episode.

    They end when the event loop cancels its tasks.
    """

    def __init__(self, env: Any, tasks: Mapping[int, Any], *, host: str) -> None:
        self._env, self._tasks, self._host = env, tasks, host
        self._serving: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[None] | None = None

    async def play(self, client: PolicyClient, prompt: Prompt) -> list[Trajectory]:
        """Play the task of ``prompt``; return the trajectories of each trained agent, with the agent's reward.

        Raises DataError if the prompt's row names no task, RuntimeError if the episode has an error or no trajectory.
        """
        task = self._task(prompt)
        await self._serve()
        run = _Episode(client, self._host)
        _run.set(run)
        episode = await self._env.run_episode(task, _POLICY)
        if not episode.ok:
            errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
            told = "; ".join(f"{error.type}: {error.message}" for error in errors)
            raise RuntimeError(f"the episode of task {task.data.idx} failed: {told or 'verifiers tells no reason'}")
        trained = [trace for trace in episode.traces if trace.agent.trainable and trace.id in run.endpoints]
        rows = [row for trace in trained for row in _rewarded(trace, run.endpoints[trace.id])]
        if not rows:
            raise RuntimeError(f"no trained agent asked the policy in the episode of task {task.data.idx}")
        return rows

    def _task(self, prompt: Prompt) -> Any:
        number = prompt.row.get("task")
        task = self._tasks.get(number) if isinstance(number, int) else None
        if task is None or task.key != prompt.answer:
            raise DataError(
                f"the row of the prompt {prompt.text[:80]!r} is no task of this taskset",
                why=f"its columns task={number!r} and answer={prompt.answer!r} name none of "
                f"the {len(self._tasks)} tasks",
                fix="write the rows again with hwrl verifiers-rows, with the run's settings of the taskset",
            )
        return task

    async def _serve(self) -> None:
        """Wait until the servers of ``env`` are up; start them if nobody has, or if they failed."""
        if self._ready is None or self._serving is None or self._serving.done():
            self._ready = asyncio.get_running_loop().create_future()
            self._serving = asyncio.create_task(self._hold(self._ready))
        await asyncio.shield(self._ready)

    async def _hold(self, ready: asyncio.Future[None]) -> None:
        try:
            async with self._env.serving():
                # No public name replaces the proxy. Each rollout of an agent acquires it from this attribute.
                self._env._interception = _WithEndpoints(self._env._interception)
                ready.set_result(None)
                await asyncio.Event().wait()
        except Exception as exc:
            if ready.done():
                raise
            ready.set_exception(exc)


class _WithEndpoints:
    """verifiers' proxy between agents and models. Each agent of the policy gets an endpoint of hwrl."""

    def __init__(self, proxy: Any) -> None:
        self._proxy = proxy

    @contextlib.asynccontextmanager
    async def acquire(self, session: Any) -> AsyncIterator[Any]:
        async with self._proxy.acquire(session) as slot:
            if session.ctx.client != _POLICY.client:
                yield slot  # this agent has a model of its own
                return
            run = _run.get()
            async with serve(run.client, host=run.host) as endpoint:
                run.endpoints[session.trace.id] = endpoint
                session.client = copy.copy(session.client)  # shares the connections
                session.client.base_url, session.client.api_key = endpoint.base_url, endpoint.api_key
                yield slot


def _rewarded(trace: Any, endpoint: Endpoint) -> list[Trajectory]:
    """Return the endpoint's trajectories with reward and metrics of ``trace``; the reward's parts are metrics, too."""
    scores = {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
    counted = {**trace.metrics, **scores, "turns": trace.num_turns}
    metrics = {name: float(value) for name, value in counted.items() if value is not None}
    cut = trace.is_truncated
    return [
        replace(row, reward=float(trace.reward), metrics=metrics, truncated=row.truncated or cut)
        for row in endpoint.trajectories()
    ]
