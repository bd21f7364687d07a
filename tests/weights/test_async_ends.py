"""The ends of a weight link for ``async`` code."""

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import torch

from hwrl.comm import Store
from hwrl.errors import CommAbortedError, CommTimeoutError, TransferFailedError
from hwrl.weights import AsyncStreamReceiver, AsyncWeightReceiver, AsyncWeightSender
from hwrl_cpu import INFO, CpuBackend
from tests.support.weight_link import beside, model_of, sender_of, store

__all__ = ["store"]  # the fixture


@contextlib.asynccontextmanager
async def _link(store: Store) -> AsyncIterator[tuple[AsyncWeightSender, AsyncWeightReceiver, AsyncStreamReceiver]]:
    backend: Any = {"backend": CpuBackend(INFO)}
    async with (
        AsyncWeightSender(store, timeout_s=600.0, **backend) as sender,
        AsyncWeightReceiver(store, replica="r0", **backend) as receiver,
        AsyncStreamReceiver(store, replica="s0", **backend) as streaming,
    ):
        await sender.wait_for_receivers(["r0", "s0"])
        yield sender, receiver, streaming


async def _read(streaming: AsyncStreamReceiver) -> dict[str, torch.Tensor]:
    return {name: tensor async for name, tensor in streaming.stream()}


def test_both_ends_work_in_one_event_loop_which_goes_on_meanwhile(store: Store) -> None:
    async def main() -> None:
        async with _link(store) as (sender, receiver, streaming):
            ticks = 0

            async def tick() -> None:
                nonlocal ticks
                while True:
                    await asyncio.sleep(0.001)
                    ticks += 1

            ticking = asyncio.create_task(tick())
            for version in (1, 2):
                weights = (pair for pair in model_of(version))
                reading = asyncio.gather(receiver.receive(), _read(streaming))
                await asyncio.sleep(0.05)
                report = await sender.publish(version, weights, {"step": version}, again=True)
                received, streamed = await reading
                assert (report.receivers, received.version, streaming.receiver.version) == (2, version, version)
                assert torch.equal(received["w"], streamed["w"]) and streamed["b"].item() == version
            assert ticks > 10
            ticking.cancel()

    asyncio.run(main())


def test_a_cancelled_wait_ends_soon_and_the_link_goes_on(store: Store) -> None:
    async def main() -> None:
        async with _link(store) as (sender, receiver, streaming):
            for waiting in (receiver.receive(), _read(streaming)):
                begin = time.monotonic()
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(waiting, timeout=0.05)
                assert time.monotonic() - begin < 300.0
            reading = asyncio.gather(receiver.receive(), _read(streaming))
            await sender.wait_for_receivers(["r0", "s0"])
            await sender.publish(3, model_of(3))
            received, streamed = await reading
            assert (received.version, streamed["b"].item()) == (3, 3.0)

    asyncio.run(main())


def test_a_wait_that_is_cancelled_twice_still_waits_for_the_end_of_the_receive(store: Store) -> None:
    async def main() -> None:
        async with _link(store) as (_, receiver, __):
            waiting = asyncio.create_task(receiver.receive())
            await asyncio.sleep(0.05)
            waiting.cancel()
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            with pytest.raises(CommTimeoutError):  # at once: the thread is free
                await asyncio.wait_for(receiver.receive(timeout_s=0.0), timeout=100.0)

    asyncio.run(main())


def test_a_stream_that_is_cancelled_at_its_first_await_leaves_no_receive(store: Store) -> None:
    async def main() -> None:
        async with _link(store) as (_, __, streaming):
            reading = asyncio.create_task(_read(streaming))
            await asyncio.sleep(0)  # it is at its first await now
            reading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reading
            assert "hwrl-receive" not in [thread.name for thread in threading.enumerate()]

    asyncio.run(main())


@pytest.mark.parametrize("transport", ["device", "host"])
def test_a_version_that_is_committed_when_its_receive_is_cancelled_comes_with_the_next(
    store: Store, transport: str
) -> None:
    async def main() -> None:
        async with AsyncWeightReceiver(store, replica="r0", backend=CpuBackend(INFO)) as receiver:
            with sender_of(store, transport=transport) as sender:
                waiting = asyncio.create_task(receiver.receive())
                publishing = beside(lambda: sender.publish(1, model_of(1)))
                await asyncio.sleep(0)  # it is in its thread now; from here on this loop does not run
                deadline = time.monotonic() + 100.0
                while receiver.receiver.version is None and time.monotonic() < deadline:
                    threading.Event().wait(0.001)
                waiting.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await waiting
                publishing()
                assert receiver.receiver.poll() == 1
                received = await receiver.receive(timeout_s=0.0)
                assert (received.version, received["b"].item()) == (1, 1.0)
                with pytest.raises(CommTimeoutError):
                    await receiver.receive(timeout_s=0.0)

    asyncio.run(main())


def test_a_stream_cancelled_at_its_last_await_has_no_version_and_the_next_one_gets_it(store: Store) -> None:
    async def main() -> None:
        async with AsyncStreamReceiver(store, replica="s0", backend=CpuBackend(INFO)) as streaming:
            with sender_of(store, transport="host") as sender:
                sender.publish(1, [("w", torch.ones(3))])
                reading = streaming.stream()
                await anext(reading)
                last = asyncio.ensure_future(anext(reading))
                await asyncio.sleep(0)
                deadline = time.monotonic() + 100.0
                while "hwrl-receive" in [one.name for one in threading.enumerate()] and time.monotonic() < deadline:
                    threading.Event().wait(0.001)
                last.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await last
                assert streaming.receiver.version is None
                assert (await _read(streaming))["w"].tolist() == [1.0, 1.0, 1.0]
                assert streaming.receiver.version == 1

    asyncio.run(main())


def test_an_end_can_be_closed_before_its_context_ends(store: Store) -> None:
    async def main() -> None:
        async with _link(store) as ends:
            for end in ends:
                await end.close()

    asyncio.run(main())


def test_an_iterator_that_is_closed_early_ends_the_receive(store: Store) -> None:
    async def main() -> None:
        async with _link(store) as (sender, receiver, streaming):
            publishing = asyncio.create_task(sender.publish(1, [(f"t{i}", torch.ones(9)) for i in range(4)]))
            waiting = asyncio.create_task(receiver.receive())
            tensors = streaming.stream()
            await anext(tensors)
            await tensors.aclose()  # type: ignore[attr-defined]  # an async generator has it
            assert (await waiting).version == 1
            await publishing

    asyncio.run(main())


def test_errors_come_through(store: Store) -> None:
    async def main() -> None:
        async with _link(store) as (sender, receiver, streaming):
            waiting = [asyncio.create_task(receiver.receive()), asyncio.create_task(_read(streaming))]
            await asyncio.sleep(0.05)
            with pytest.raises(KeyError):
                await sender.publish(1, _broken())
            for task in waiting:
                with pytest.raises(TransferFailedError, match="gave up version 1"):
                    await task
            receiver.receiver.cancel()
            with pytest.raises(CommAbortedError):
                await receiver.receive()

    asyncio.run(main())


def _broken() -> Iterator[tuple[str, torch.Tensor]]:
    yield "w", torch.ones(3)
    raise KeyError("no such layer")
