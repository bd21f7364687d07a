"""The client of a vLLM server: its calls, and its errors."""

from __future__ import annotations

import secrets
import urllib.request

import pytest

from hwrl.errors import EngineError
from hwrl_vllm import ServerClient
from tests.support.route_server import route_server


def test_the_error_of_a_call_has_the_servers_answer() -> None:
    answers = {"/start_weight_update": (500, "already active")}
    with route_server([], answers) as url, pytest.raises(EngineError, match=r"500.*already active"):
        ServerClient(url).start_weight_update()


def test_a_server_without_the_routes_is_explained() -> None:
    with route_server([], {"/resume": (404, "Not Found")}) as url, pytest.raises(EngineError, match="DEV_MODE"):
        ServerClient(url).resume()


def test_a_server_that_is_not_there_is_named() -> None:
    with route_server([], {}) as url:
        pass
    with pytest.raises(EngineError, match=f"{url} did not answer resume"):
        ServerClient(url).resume()


@pytest.mark.parametrize("url", ["http://10.0.0.1:8000", "http://localhost.example.org", "http://127.example.org"])
def test_a_key_does_not_travel_to_another_machine_in_the_clear(url: str) -> None:
    with pytest.raises(EngineError, match=r"in the clear[\s\S]*plain_http=True"):
        ServerClient(url)
    ServerClient(url, plain_http=True)


@pytest.mark.parametrize(
    "url", ["https://10.0.0.1", "http://127.0.0.1:8000", "http://[::1]:8000", "http://localhost:1"]
)
def test_addresses_that_others_cannot_read_need_no_setting(url: str) -> None:
    ServerClient(url)


def test_a_servers_answer_is_shown_without_the_key_that_it_repeats() -> None:
    key = secrets.token_urlsafe(32)
    answers = {"/init_weight_transfer_engine": (422, f"unknown: 127.0.0.1:1#{key}")}
    with route_server([], answers) as url, pytest.raises(EngineError, match="unknown: 127") as refused:
        ServerClient(url).init_weight_transfer_engine({})
    assert key not in str(refused.value)


@pytest.mark.parametrize("plain_http", [False, True])
def test_a_proxy_of_the_environment_does_not_get_the_key(plain_http: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    proxied: list[str] = []
    with route_server(calls, {}) as url, route_server(proxied, {}) as proxy:
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("http_proxy", proxy)
        monkeypatch.setattr(urllib.request, "_opener", None)  # the default, made at its first use and kept
        ServerClient(url, plain_http=plain_http).init_weight_transfer_engine({"store": "127.0.0.1:1#key"})
    assert (calls, proxied) == (["/init_weight_transfer_engine"], [])
