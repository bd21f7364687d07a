"""The host transport with one fault, named by HWRL_FAULT: the conformance kit must catch each of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hwrl.errors import CommError, LayoutMismatchError
from hwrl.weights import (
    TRANSPORTS,
    Checksums,
    ReceiverContext,
    SenderContext,
    Transport,
    TransportReceiver,
    TransportSender,
)

_HOST = TRANSPORTS["host"]


def fault(name: str) -> bool:
    return os.environ.get("HWRL_FAULT") == name


class Wrapped:
    """Passes everything on to ``end``."""

    def __init__(self, end: Any, context: Any) -> None:
        self._end, self._context = end, context

    def __getattr__(self, name: str) -> Callable[..., Any]:
        found: Callable[..., Any] = getattr(self._end, name)
        return found


class FaultySender(Wrapped):
    kept: Any = None
    first: Any = None
    rounds = 0

    def prepare(self, number: int, to: tuple[int, ...], clock: Any) -> Any:
        return self._end.prepare(number, to, clock)

    def send(self, sending: Any, reader: Any, clock: Any) -> torch.Tensor:
        self.rounds += 1
        if fault("keys stay in the store"):
            self._context.store.set(f"left/{self.rounds}", "behind")
        if (fault("a second version is not sent") and self.rounds > 1) or self._context.store.check(["left"]):
            raise CommError("nothing is sent", why="it is the fault", fix="remove it")
        self.kept = FaultyReader(reader, self._context.layout)
        sums: torch.Tensor = self._end.send(sending, self.kept, clock)
        if not fault("sent tensors are kept"):
            self.kept = None
        return sums


class FaultyReader(Wrapped):
    def __init__(self, reader: Any, layout: Any) -> None:
        super().__init__(reader, layout)
        self.read: list[list[torch.Tensor]] = []
        if fault("the source is read in advance"):
            self.read = [reader.tensors_of(bucket) for bucket in layout.buckets]
        self._next = 0

    def tensors_of(self, bucket: Any) -> Sequence[torch.Tensor]:
        if fault("the source is read in advance"):
            self._next += 1
            return self.read[self._next - 1]
        try:
            tensors: list[torch.Tensor] = self._end.tensors_of(bucket)
        except (ZeroDivisionError, LayoutMismatchError):
            if not fault("a failing source is hidden"):
                raise
            tensors = [torch.zeros(1024) for _ in bucket.entries]
        if fault("sent tensors are kept"):
            self.read.append(tensors)
        return tensors

    def finish(self) -> None:
        if not fault("a failing source is hidden"):
            self._end.finish()


class FaultyReceiver(Wrapped):
    def close(self) -> None:
        self._end.close()
        if fault("a receiver that leaves stops the sender"):
            self._context.store.set("left", "")

    def receive(self, receiving: Any, destination: Any, sums: Checksums, clock: Any) -> Any:
        theirs = self._end.receive(receiving, destination, sums, clock)
        if fault("bytes change after their sums"):
            destination.memory_for(0).memory[:8] += 1
        return sums.values.clone() if fault("a receiver trusts its own sums") else theirs


def sender(context: SenderContext) -> TransportSender:
    end: Any = FaultySender(_HOST.sender(context), context)
    return end  # type: ignore[no-any-return] # it has all methods by __getattr__


def receiver(context: ReceiverContext) -> TransportReceiver:
    end: Any = FaultyReceiver(_HOST.receiver(context), context)
    return end  # type: ignore[no-any-return] # likewise


FAULTY = Transport(_HOST.payload, sender, receiver, keeps_versions=True, stage="copy")
