"""The calls of a server around an update by AsyncWeights."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from typing import Any

import pytest
import torch

from hwrl.errors import TransferFailedError
from tests.support.route_server import route_server

pytestmark = pytest.mark.skipif(not importlib.util.find_spec("trl"), reason="TRL is not installed: ci/stack trl")


class Sender:
    def __init__(self, url: str, **settings: Any) -> None: ...

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
