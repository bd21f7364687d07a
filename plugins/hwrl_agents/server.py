"""The HTTP server of a replica's endpoints. It runs in the event loop of the workflows."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import socket
from collections.abc import AsyncIterator, Coroutine, Iterator
from typing import TYPE_CHECKING, Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.responses import Response as HttpResponse
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from hwrl.comm import reachable_host
from hwrl.errors import ConfigError, HwrlError, short_repr
from hwrl.rollout import ChatTokens
from hwrl_agents.answers import AnswerFormat
from hwrl_agents.requests import ChatRequest, CompletionRequest, EndpointError, read_request
from hwrl_agents.session import Answered, Endpoint, Record

if TYPE_CHECKING:
    from hwrl.rollout import PolicyClient

_MAX_BODY_NBYTES = 1 << 24
_KEEP_ALIVE_S = 75
HEADER_S = 20.0
"""A connection is closed if the header of its first request is not complete after this time."""


_servers: dict[tuple[asyncio.AbstractEventLoop, str], EndpointServer] = {}


def server_at(host: str) -> EndpointServer:
    """Return the server of this event loop at ``host``; the first call starts it, and one after its end a new one."""
    loop = asyncio.get_running_loop()
    for other, server in list(_servers.items()):
        if server.has_ended or other[0].is_closed():
            _servers.pop(other, None)
    if (loop, host) not in _servers:
        _servers[loop, host] = EndpointServer(host=host)
        _servers[loop, host].start()
    return _servers[loop, host]


class EndpointServer:
    """Serves all endpoints of a replica on one port of ``host``. The token in a request chooses the endpoint.

    It serves from :meth:`start` to :meth:`aclose`; use one event loop for all. Raises ConfigError if ``host`` is not an
    address of this machine.
    """

    def __init__(self, *, host: str) -> None:
        self._socket = _listen(host)
        self.base_url = _url(host, self._socket.getsockname()[1])
        """The address for agents, up to ``/v1``."""
        self._endpoints: dict[str, Endpoint] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to serve. Does not block: clients can connect at once."""
        self._task = asyncio.get_running_loop().create_task(self._serve())

    @property
    def has_ended(self) -> bool:
        """Whether it serves no longer: a workflow may cancel all tasks of the event loop."""
        return self._task is not None and self._task.done()

    async def aclose(self) -> None:
        """End all connections, and free the port."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    @contextlib.contextmanager
    def open(self, client: PolicyClient, *, chat: ChatTokens) -> Iterator[Endpoint]:
        """Serve an endpoint of ``client`` within the block. Its end drops the requests and makes the token invalid."""
        endpoint = Endpoint(client, chat=chat, base_url=self.base_url)
        self._endpoints[endpoint.name] = endpoint
        try:
            yield endpoint
        finally:
            del self._endpoints[endpoint.name]
            endpoint.close()

    async def _serve(self) -> None:
        server = _QuietServer(
            uvicorn.Config(
                self._app(),
                http=_ImpatientProtocol,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=1,
            )
        )
        try:
            await server.serve(sockets=[self._socket])
        finally:
            server.force_exit = True
            for connection in list(server.server_state.connections):
                connection.shutdown()
            for listener in getattr(server, "servers", ()):
                listener.close()
            self._socket.close()

    def _app(self) -> Starlette:
        app = Starlette(
            routes=[
                Route("/v1/models", self._models, methods=["GET"]),
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
                Route("/v1/completions", self._complete, methods=["POST"]),
            ],
            exception_handlers=dict.fromkeys(
                (EndpointError, HTTPException, ClientDisconnect, HwrlError, Exception), self._refuse
            ),
        )
        app.router.redirect_slashes = False  # a redirect would tell a stranger which paths there are
        return app

    # -- one request --------------------------------------------------------------------------------------------

    def _find(self, request: Request) -> Endpoint | None:
        """Return the endpoint of the token in ``request``; None if no endpoint has it."""
        kind, _, token = request.headers.get("authorization", "").partition(" ")
        endpoint = self._endpoints.get(token.partition("-")[0])
        expected = endpoint.api_key if endpoint is not None else ""
        matches = hmac.compare_digest(token.encode(), expected.encode())
        return endpoint if kind.lower() == "bearer" and matches else None

    def _endpoint(self, request: Request) -> Endpoint:
        endpoint = self._find(request)
        if endpoint is None:
            raise HTTPException(401)
        return endpoint

    async def _refuse(self, request: Request, exc: Exception) -> HttpResponse:
        """Answer an error in OpenAI's form. A stranger gets an empty answer, and the end of the connection."""
        match exc:
            case EndpointError():
                error = exc
            case ClientDisconnect():  # it left before the end of its request: no fault, and nothing is logged
                return HttpResponse(status_code=499)
            case HTTPException():
                if self._find(request) is None:
                    return HttpResponse(status_code=exc.status_code, headers={"Connection": "close"})
                path = f"{request.method} {request.url.path}"
                message = f"{path}: {exc.detail}; chat/completions, completions and models are served"
                error = EndpointError(message, status=exc.status_code)
            case HwrlError():
                error = EndpointError(f"{exc.what}: {exc.why}", status=500)
            case _:
                error = EndpointError(f"the endpoint failed: {short_repr(exc)}", status=500)
        return JSONResponse(error.body(), status_code=error.status)

    async def _models(self, request: Request) -> HttpResponse:
        model = {"id": "policy", "object": "model", "created": 0, "owned_by": "hwrl"}
        length = self._endpoint(request).max_length
        return JSONResponse({"object": "list", "data": [{**model, "max_model_len": length}]})

    async def _chat(self, request: Request) -> HttpResponse:
        endpoint = self._endpoint(request)
        asked = read_request(ChatRequest, body := await _body(request))
        return await _answer(request, endpoint, endpoint.chat(asked, nbytes=len(body)), stream=asked.stream)

    async def _complete(self, request: Request) -> HttpResponse:
        endpoint = self._endpoint(request)
        asked = read_request(CompletionRequest, await _body(request))
        return await _answer(request, endpoint, endpoint.complete(asked), stream=asked.stream)


class _QuietServer(uvicorn.Server):
    """A server that leaves the signals of the process to others."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture no signals."""
        yield


class _ImpatientProtocol(H11Protocol):
    """HTTP as uvicorn speaks it, but a connection must bring a request in time; uvicorn would wait for ever.

    So a stranger cannot hold connections until the process has no more descriptors.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as uvicorn's
        """Begin to wait for the header of the first request."""
        super().connection_made(transport)
        self.loop.call_later(HEADER_S, self._end_without_request)

    def _end_without_request(self) -> None:
        if self.cycle is None:
            self.transport.close()


async def _answer(
    request: Request,
    endpoint: Endpoint,
    work: Coroutine[Any, Any, Answered],
    *,
    stream: bool,
) -> HttpResponse:
    """Run ``work`` and answer. If the client leaves before, ``work`` is cancelled, and nothing is recorded."""
    task, gone = endpoint.start(work), asyncio.ensure_future(_until_gone(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            return HttpResponse(status_code=499)
        if task.cancelled():
            raise EndpointError("the run of the workflow has ended", status=401, code="invalid_api_key")
        form, record = task.result()
    finally:
        task.cancel()
        gone.cancel()
    if stream:
        return StreamingResponse(_events(form, record), media_type="text/event-stream")
    answer = JSONResponse(form.whole())  # this may raise, and the agent would not read the answer
    record()
    return answer


async def _events(form: AnswerFormat, record: Record) -> AsyncIterator[str]:
    """Yield the events of a stream. The answers are recorded before the client reads that they are complete."""
    for chunk in form.chunks():
        yield _event(chunk)
    record()
    for chunk in form.last_chunks():
        yield _event(chunk)
    yield "data: [DONE]\n\n"


def _event(chunk: dict[str, Any]) -> str:
    return f"data: {json.dumps(chunk)}\n\n"


async def _body(request: Request) -> bytes:
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > _MAX_BODY_NBYTES:
            raise EndpointError(f"the body has more than {_MAX_BODY_NBYTES:,} bytes", status=413)
    return bytes(body)


async def _until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _listen(host: str) -> socket.socket:
    """Return a socket at a free port of ``host``. Raises ConfigError if that is not an address of this machine."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, 0), family=family, backlog=2048)
    except OSError as exc:
        raise ConfigError(
            f"endpoints cannot listen at {host!r}",
            why=str(exc),
            fix="take an address of each replica's machine as the host, or 0.0.0.0 for all of them",
        ) from exc


def _url(host: str, port: int) -> str:
    """Return the address for agents. A host for all interfaces becomes this machine's address."""
    host = reachable_host(host)
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"
