"""Requests to an endpoint, in OpenAI's form. An unsupported parameter is refused by its name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from hwrl.interfaces import Sampling

NO_EFFECT = frozenset(
    {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "parallel_tool_calls"}
)
"""Parameters without an effect on the answer: any value is accepted."""
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
}
"""Unsupported parameters, each with the values that are accepted because they change nothing."""
_MOST_PARTS, _MOST_STOPS = 1 << 14, 64
"""The most messages or tools, and the most stops, of a request: each new token is compared with all stops."""
_Stop = Annotated[str, Field(max_length=1000)]
_ROLES = ("system", "developer", "user", "assistant", "tool")
Asked = TypeVar("Asked", bound="GenerationFields")


class EndpointError(Exception):
    """An error for the agent, in OpenAI's form, with the HTTP ``status`` of the answer."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def body(self) -> dict[str, Any]:
        """Return the JSON of the answer."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


class StreamOptions(BaseModel):
    """The parameter ``stream_options``."""

    model_config = ConfigDict(extra="forbid")
    include_usage: bool = False


class GenerationFields(BaseModel):
    """The parameters that both kinds of requests have. None means the run's value."""

    model_config = ConfigDict(extra="forbid")
    model: str = "policy"
    n: Annotated[int, Field(ge=1, le=128)] = 1
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    stop: _Stop | Annotated[list[_Stop], Field(max_length=_MOST_STOPS)] | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=_MOST_STOPS)] | None = None
    seed: int | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    return_token_ids: bool = False

    @model_validator(mode="before")
    @classmethod
    def _drop_without_effect(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            raise ValueError("the body must be a JSON object")
        return {
            name: value
            for name, value in given.items()
            if value is not None and name not in NO_EFFECT and value not in NEUTRAL.get(name, ())
        }

    def limit(self) -> int | None:
        """Return the request's own limit on new tokens; None if it has none."""
        return self.max_tokens

    def sampling(self, run: Sampling, *, choice: int) -> Sampling:
        """Return the sampling of answer number ``choice``: the request's parameters, and ``run`` for all others.

        With a seed, each choice has a different one. Raises EndpointError for a value out of its range. Raises it for
        temperature 0 if ``run`` is not greedy: a greedy token is certain, but its log-probability is that of
        temperature 1, so it cannot be trained.
        """
        if self.temperature == 0 and run.temperature != 0:
            raise EndpointError(
                f"temperature=0 cannot be trained: leave it out; the run samples at {run.temperature}",
                param="temperature",
                code="unsupported_value",
            )
        names = ("temperature", "top_p", "top_k", "min_p")
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        if self.stop is not None:
            given["stop"] = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        if self.stop_token_ids is not None:
            given["stop_token_ids"] = tuple(self.stop_token_ids)
        if self.seed is not None:
            given["seed"] = self.seed + choice
        limit = min(run.max_new_tokens, self.limit() or run.max_new_tokens)
        try:
            return replace(run, **given, max_new_tokens=limit)
        except ValueError as exc:
            raise EndpointError(str(exc), param=str(exc).partition("=")[0], code="invalid_value") from exc


class ChatRequest(GenerationFields):
    """The body of a request to ``/v1/chat/completions``."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1, max_length=_MOST_PARTS)]
    tools: Annotated[list[dict[str, Any]], Field(max_length=_MOST_PARTS)] = []
    tool_choice: Literal["auto", "none"] = "auto"
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=1)] = 0
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    chat_template_kwargs: dict[str, Any] = {}

    def limit(self) -> int | None:
        """Return the request's own limit on new tokens, by its new name or else its old one."""
        return self.max_completion_tokens or self.max_tokens

    @model_validator(mode="after")
    def _has_messages(self) -> ChatRequest:
        for number, message in enumerate(self.messages):
            if reason := _why_no_message(message):
                raise ValueError(f"messages[{number}] {reason}")
        for number, tool in enumerate(self.tools):
            function = tool.get("function")
            if tool.get("type") != "function" or not isinstance(function, dict) or "name" not in function:
                raise ValueError(f"tools[{number}] is no function with a name")
        return self


class CompletionRequest(GenerationFields):
    """The body of a request to ``/v1/completions``. ``prompt`` is a text or a list of token ids."""

    prompt: str | Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(min_length=1)]
    logprobs: Annotated[int, Field(ge=0, le=1)] | None = None


def read_request(kind: type[Asked], body: bytes) -> Asked:
    """Return the request in ``body``, a JSON object. Raises EndpointError with the name of a wrong parameter."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as exc:
        error = exc.errors(include_url=False, include_input=False, include_context=False)[0]
        param = str(error["loc"][0]) if error["loc"] else None
        if error["type"] == "extra_forbidden":
            param = ".".join(str(part) for part in error["loc"])
            raise EndpointError(
                f"{param} is not supported; leave it out", param=param, code="unsupported_parameter"
            ) from exc
        raise EndpointError(f"{param or 'the request'}: {error['msg']}", param=param, code="invalid_value") from exc


def _why_no_message(message: Mapping[str, Any]) -> str | None:
    """Return why ``message`` cannot be rendered; None if it can."""
    content, calls = message.get("content"), message.get("tool_calls") or ()
    if message.get("role") not in _ROLES:
        return f"has the role {message.get('role')!r}; known are {', '.join(_ROLES)}"
    if not isinstance(content, str | list | None):
        return "has a content that is neither a text nor a list of parts"
    for part in content if isinstance(content, list) else ():
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            return f"has a part of the type {kind!r}; only text is supported"
    if not isinstance(calls, list | tuple) or not all(_is_call(call) for call in calls):
        return "has tool_calls that are no list of functions with a name"
    return None


def _is_call(call: Any) -> bool:
    function = call.get("function") if isinstance(call, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)
