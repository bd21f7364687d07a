"""The HTTP server of a replica's endpoints. It runs in the event loop of the workflows."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import socket
from collections.abc import AsyncIterator, Coroutine, Iterator
from typing import Any

import h11
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.responses import Response as HttpResponse
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from hwrl.comm.sockets import reachable_host
from hwrl.errors import ConfigError, HwrlError, short_repr
from hwrl.rollout.chat import ChatTokens
from hwrl.rollout.endpoint.answers import AnswerFormat
from hwrl.rollout.endpoint.requests import ChatRequest, CompletionRequest, EndpointError, read_request
from hwrl.rollout.endpoint.session import Answered, Endpoint, Generates, Record

_MAX_BODY_NBYTES = 1 << 24
_KEEP_ALIVE_S = 75
HEADER_S = 20.0
"""A connection is closed if the header of a request is not complete after this time."""


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
    def open(self, client: Generates, *, chat: ChatTokens) -> Iterator[Endpoint]:
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
            exception_handlers={
                EndpointError: _refuse,
                HTTPException: self._refuse_path,
                _UnknownTokenError: _refuse_stranger,
                ClientDisconnect: _answer_nobody,
                HwrlError: _report,
                Exception: _report_unexpected,
            },
        )
        app.router.redirect_slashes = False  # a redirect would tell a stranger which paths there are
        return app

    # -- one request --------------------------------------------------------------------------------------------

    def _endpoint(self, request: Request) -> Endpoint:
        """Return the endpoint of the token in ``request``. Raises _UnknownTokenError if no endpoint has it."""
        kind, _, token = request.headers.get("authorization", "").partition(" ")
        endpoint = self._endpoints.get(token.partition("-")[0])
        expected = endpoint.api_key if endpoint is not None else ""
        matches = hmac.compare_digest(token.encode(), expected.encode())
        if endpoint is None or kind.lower() != "bearer" or not matches:
            raise _UnknownTokenError
        return endpoint

    async def _refuse_path(self, request: Request, exc: Exception) -> HttpResponse:
        """Answer a wrong path: with the right ones for a valid token, else with nothing."""
        assert isinstance(exc, HTTPException)
        try:
            self._endpoint(request)
        except _UnknownTokenError:
            return HttpResponse(status_code=exc.status_code)
        path = f"{request.method} {request.url.path}"
        message = f"{path}: {exc.detail}; chat/completions, completions and models are served"
        return JSONResponse(EndpointError(message, status=exc.status_code).body(), status_code=exc.status_code)

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


class _UnknownTokenError(Exception):
    """The request has no endpoint's token. A stranger gets an empty answer."""


class _QuietServer(uvicorn.Server):
    """A server that leaves the signals of the process to others."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture no signals."""
        yield


class _ImpatientProtocol(H11Protocol):
    """HTTP as uvicorn speaks it, with a time limit for the client's part between two requests.

    uvicorn waits for ever for the first byte, for the rest of a header, and for the rest of a body that nobody reads.
    So a stranger could hold connections until the process has no more descriptors.
    """

    _due_s: float | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as uvicorn's
        """Begin to wait for a header."""
        super().connection_made(transport)
        self._limit_wait()

    def data_received(self, data: bytes) -> None:
        """Read ``data``. Without a complete header, the time limit of this request remains."""
        super().data_received(data)
        if self.cycle is None or self.cycle.response_complete:
            self._limit_wait()
        else:
            self._due_s = None

    def on_response_complete(self) -> None:
        """Wait for the next request, or for the rest of a body: that has the shorter time limit."""
        super().on_response_complete()
        if self.conn.their_state is h11.SEND_BODY:
            self._limit_wait()

    def _limit_wait(self) -> None:
        self._unset_keepalive_if_required()
        if not self.transport.is_closing():
            self._due_s = self._due_s or self.loop.time() + HEADER_S
            self.timeout_keep_alive_task = self.loop.call_at(self._due_s, self.timeout_keep_alive_handler)


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


async def _refuse(request: Request, exc: Exception) -> HttpResponse:
    assert isinstance(exc, EndpointError)
    return JSONResponse(exc.body(), status_code=exc.status)


async def _refuse_stranger(request: Request, exc: Exception) -> HttpResponse:
    return HttpResponse(status_code=401)


async def _answer_nobody(request: Request, exc: Exception) -> HttpResponse:
    """Answer a client that has left before the end of its request: this is no fault, and nothing is logged."""
    return HttpResponse(status_code=499)


async def _report(request: Request, exc: Exception) -> HttpResponse:
    assert isinstance(exc, HwrlError)
    return JSONResponse(EndpointError(f"{exc.what}: {exc.why}", status=500).body(), status_code=500)


async def _report_unexpected(request: Request, exc: Exception) -> HttpResponse:
    return JSONResponse(EndpointError(f"the endpoint failed: {short_repr(exc)}", status=500).body(), status_code=500)


def _listen(host: str) -> socket.socket:
    """Return a socket at a free port of ``host``. Raises ConfigError if that is not an address of this machine."""
    try:
        return socket.create_server((host, 0), family=_family(host), backlog=2048)
    except OSError as exc:
        raise ConfigError(
            f"endpoints cannot listen at {host!r}",
            why=str(exc),
            fix="set rollout.endpoint_host to an address of each replica's machine, or to 0.0.0.0 for all of them",
        ) from exc


def _url(host: str, port: int) -> str:
    """Return the address for agents. A host for all interfaces becomes this machine's address."""
    host = reachable_host(host)
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
