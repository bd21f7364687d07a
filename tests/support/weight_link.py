"""Both ends of a weight link in one process, for tests of its rules."""

import functools
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hwrl.comm import Store, serve_store
from hwrl.weights import TRANSPORTS, TransferReport, Transport, WeightReceiver, WeightSender
from hwrl.weights.control import ControlChannel
from hwrl.weights.messages import Proposal
from hwrl.weights.transport import ReceiverContext, TransportReceiver
from hwrl_cpu import INFO, CpuBackend
from tests.support.speed import slow


@pytest.fixture
def store() -> Iterator[Store]:
    yield serve_store()


def sender_of(store: Store, **options: Any) -> WeightSender:
    """``timeout_s`` is that of an idle machine."""
    options["timeout_s"] = slow(options.get("timeout_s", 10.0))
    return WeightSender(store, **{"backend": CpuBackend(INFO), **options})


def receiver_of(store: Store, replica: str = "r0", **options: Any) -> WeightReceiver:
    return WeightReceiver(store, replica=replica, **{"backend": CpuBackend(INFO), **options})


def channel_of(store: Store) -> ControlChannel:
    """Return the control channel of the link, to do by hand the work of its two ends."""
    return ControlChannel(store, name="policy", transports=TRANSPORTS)


def newest_proposal(store: Store) -> Proposal:
    """Wait for a proposal, and return the newest."""
    channel, deadline = channel_of(store), time.monotonic() + 600.0
    while not channel.newest() and time.monotonic() < deadline:
        channel.wait_for_newer(0, timeout_s=0.1)
    proposal = channel.proposal(channel.newest())
    assert proposal is not None
    return proposal


def received_by(transport: str, receiver: Callable[[ReceiverContext], TransportReceiver]) -> dict[str, Transport]:
    """Return the transports, with another receiving end for one of them."""
    return {**TRANSPORTS, transport: replace(TRANSPORTS[transport], receiver=receiver)}


def opened_memories(pid: int | str = "self") -> int:
    """Return how many of the CPU backend's shared memories process ``pid`` has mapped."""
    return sum("/torch_" in line for line in Path(f"/proc/{pid}/maps").read_text().splitlines())


def model_of(value: float) -> list[tuple[str, torch.Tensor]]:
    return [("w", torch.full((700,), float(value))), ("b", torch.tensor(float(value)))]


def beside(work: Callable[[], Any]) -> Callable[[], Any]:
    """Run ``work`` in a thread; the returned function waits for its result, or raises its error."""
    ended: list[Any] = []

    def run() -> None:
        try:
            ended.append(work())
        except Exception as exc:  # noqa: BLE001 - raised again in the waiting thread
            ended.append(exc)

    thread = threading.Thread(target=run)
    thread.start()

    def result() -> Any:
        thread.join(slow(200.0))
        assert ended, "the thread is still at work"
        if isinstance(ended[0], Exception):
            raise ended[0]
        return ended[0]

    return result


def exchange(sender: WeightSender, receivers: list[WeightReceiver], version: int) -> TransferReport:
    """Publish ``version`` to ``receivers`` and check it in each."""
    waiting = [beside(functools.partial(receiver.receive, timeout_s=600.0)) for receiver in receivers]
    report = sender.publish(version, model_of(version))
    for wait in waiting:
        received = wait()
        assert received.version == version and received["b"].item() == version
    return report
