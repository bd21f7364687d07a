"""A forked child does not act as its parent on a link."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from hwrl.comm import serve_store
from hwrl.errors import CommError
from hwrl.weights import WeightReceiver, WeightSender
from tests.support.weight_link import exchange, model_of, receiver_of, sender_of

Use = Callable[[WeightSender, WeightReceiver], object]


@pytest.mark.parametrize("transport", ["device", "host"])
@pytest.mark.parametrize(
    "use",
    [
        lambda sender, receiver: sender.publish(2, model_of(2)),
        lambda sender, receiver: sender.receivers(),
        lambda sender, receiver: receiver.poll(),
        lambda sender, receiver: receiver.receive(timeout_s=600.0),
        lambda sender, receiver: receiver.join(),
        lambda sender, receiver: receiver.close(),
        lambda sender, receiver: sender.close(),
    ],
    ids=["publish", "receivers", "poll", "receive", "join", "close", "end"],
)
def test_a_forked_child_is_refused_and_the_parents_link_goes_on(use: Use, transport: str) -> None:
    store = serve_store()
    with sender_of(store, transport=transport) as sender, receiver_of(store) as receiver:
        exchange(sender, [receiver], 1)
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                use(sender, receiver)
            except CommError as exc:
                os.write(write, str(exc).encode())
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        os.close(write)
        with open(read, "rb") as said:
            assert "forked child" in said.read().decode()
        assert exchange(sender, [receiver], 2).receivers == 1 or transport == "host"
