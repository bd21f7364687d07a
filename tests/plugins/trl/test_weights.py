"""The calls of a server around an update by AsyncWeights."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from typing import Any

import pytest
import torch

from hwrl.errors import CommError, EngineError, TransferFailedError
from tests.support.route_server import route_server

pytestmark = pytest.mark.skipif(not importlib.util.find_spec("trl"), reason="TRL is not installed: ci/stack trl")


class Sender:
    """A sender whose failed update leaves a whole version if that is kept."""

    def __init__(self, url: str, *, keep_old_version: bool = True, **settings: Any) -> None:
        self.has_whole_version = keep_old_version

    def send(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        if not list(named):
            raise TransferFailedError("nothing was sent", why="there is nothing", fix="give some")


def test_the_server_stops_its_requests_and_empties_its_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise its cache of prefixes is of the old weights. It goes on after a failed update, too."""
    from hwrl_trl import AsyncWeights

    monkeypatch.setattr("hwrl_trl.weights.ServerWeights", Sender)
    calls: list[str] = []
    with route_server(calls, {}) as url:
        weights = AsyncWeights(url)
        weights.init_weight_transfer()
        weights.pause()
        weights.send_weights(iter([("weight", torch.ones(1))]))
        weights.resume()
        weights.pause()
        with pytest.raises(TransferFailedError):
            weights.send_weights(iter([]))
    assert calls == ["/pause?mode=keep", "/resume"] * 2


def test_a_server_with_weights_of_two_versions_stays_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    from hwrl_trl import AsyncWeights

    monkeypatch.setattr("hwrl_trl.weights.ServerWeights", Sender)
    calls: list[str] = []
    with route_server(calls, {}) as url:
        weights = AsyncWeights(url, keep_old_version=False)
        weights.init_weight_transfer()
        weights.pause()
        with pytest.raises(TransferFailedError):
            weights.send_weights(iter([]))
    assert calls == ["/pause?mode=keep"]


@pytest.mark.parametrize(
    ("plain_http", "error", "told"),
    [(False, EngineError, "plain_http=True"), (True, CommError, "cannot serve a store")],
)
def test_a_server_on_another_machine_can_be_reached_as_the_error_says(
    plain_http: bool, error: type[Exception], told: str
) -> None:
    """The key of the trainer's store would travel in the clear. The next step makes the store at ``host``."""
    from trl.generation import vllm_generation

    from hwrl_trl import AsyncWeights, weights_by_hwrl

    url, host = "http://192.0.2.1:1", "x" * 64  # too long for a name, so no store is made and nothing is called
    with pytest.raises(error, match=told):
        AsyncWeights(url, host=host, plain_http=plain_http).init_weight_transfer()
    with weights_by_hwrl(host=host, plain_http=plain_http), pytest.raises(error, match=told):
        client = object.__new__(vllm_generation.VLLMClient)
        client.base_url = url
        client.init_communicator()
