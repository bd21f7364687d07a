"""The client of a vLLM server: its calls, and its errors."""

from __future__ import annotations

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
