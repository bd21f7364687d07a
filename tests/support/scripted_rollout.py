"""A rollouter with a scripted engine, a scripted ledger and scripted weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from hwrl.interfaces import Completion, GenerationRequest, Ints, PromptGroup, Response, RolloutEngine, Sampling
from hwrl.rollout import (
    LoopSettings,
    Prompt,
    PromptLease,
    PromptStream,
    Reward,
    RewardFunction,
    Rollouter,
    Scorer,
    Scores,
)
from hwrl.rollout.reward import ToScore, score


class CountingEngine(RolloutEngine):
    """Says 1, 2, 3 … a token a step; a request's response is as long as its prompt's first id."""

    def __init__(self, *, room: int = 8) -> None:
        self.version = 0
        self._room = room
        self._running: dict[int, tuple[GenerationRequest, list[int]]] = {}

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        self._running.update({request.request_id: (request, []) for request in requests})

    def step(self) -> list[Completion]:
        done = []
        for number, (request, versions) in list(self._running.items()):
            versions.append(self.version)
            if len(versions) == request.prompt_ids[0]:
                tokens = np.arange(1, len(versions) + 1, dtype=np.int32)
                stamps = np.array(versions, dtype=np.int32)
                done.append(Completion(number, Response(tokens, -tokens.astype(np.float32), stamps, truncated=False)))
                del self._running[number]
        return done

    def pending(self) -> int:
        return len(self._running)

    def capacity(self) -> int:
        return self._room - len(self._running)

    def abort(self) -> int:
        dropped = len(self._running)
        self._running.clear()
        return dropped

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], *, version: int) -> None:
        self.version = version


class Desk:
    """A ledger that gives out the prompts it was told and keeps what comes back."""

    def __init__(self, numbers: list[int]) -> None:
        self.numbers = numbers
        self.incarnation = 0
        self.groups: list[PromptGroup] = []
        self.failed: list[tuple[int, str]] = []
        self.renewed: list[list[int]] = []

    def lease(self, count: int) -> Future[list[PromptLease]]:
        given, self.numbers = self.numbers[:count], self.numbers[count:]
        future: Future[list[PromptLease]] = Future()
        future.set_result([PromptLease(100 + number, number, 0, self.incarnation) for number in given])
        return future

    def complete(self, groups: Sequence[PromptGroup], stats: dict[str, float]) -> None:
        self.groups += groups

    def fail(self, lease: PromptLease, reason: str) -> None:
        self.failed.append((lease.sequence_number, reason))

    def renew(self, leases: Sequence[PromptLease]) -> None:
        self.renewed.append([lease.sequence_number for lease in leases])


class Updater:
    """Offers the versions that a test puts there."""

    def __init__(self, engine: RolloutEngine | None = None) -> None:
        self.engine = engine or CountingEngine()
        self.offered: list[int] = []
        self.incarnation = 0
        self.next_incarnation = 0
        self.events: list[str] = []

    def poll(self) -> bool:
        return bool(self.offered)

    def update(self) -> bool:
        self.engine.load_weights([], version=self.offered.pop(0))
        self.incarnation = self.next_incarnation
        return True

    def release(self) -> None:
        self.events.append("release")

    def request(self) -> None:
        self.events.append("request")

    def totals(self) -> dict[str, float]:
        return {}


class Lengths(PromptStream):
    """Prompt n asks for a response of n + 1 tokens."""

    def __init__(self) -> None: ...

    def __getitem__(self, sequence_number: int) -> Prompt:
        return Prompt(str(sequence_number), np.array([sequence_number + 1], dtype=np.int32), sequence_number)


class InlineScorer:
    """Calls ``reward`` in a thread of this process, one call at a time; ``attempts`` calls if it raises."""

    def __init__(self, reward: Reward, *, attempts: int = 3) -> None:
        self._reward, self._attempts = RewardFunction(reward), attempts
        self._thread = ThreadPoolExecutor(1)

    def score(self, prompt: Prompt, responses: Sequence[Ints]) -> Future[Scores]:
        texts = [" ".join(map(str, response)) for response in responses]
        return self._thread.submit(self._score, prompt, texts)

    def _score(self, prompt: Prompt, texts: list[str]) -> Scores:
        return score(self._reward, ToScore(prompt.text, prompt.answer, texts), attempts=self._attempts)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


def rollouter_of(
    desk: Desk,
    *,
    reward: Reward | None = None,
    updater: Updater | None = None,
    partial: bool = True,
    engine: RolloutEngine | None = None,
    prompts: Lengths | None = None,
    sleep_level: int | None = None,
    rewards: Scorer | None = None,
    trace_every: int = 0,
    report_interval_s: float = 1.0,
    **settings: Any,
) -> Rollouter:
    updater = updater or Updater(engine)
    return Rollouter(
        updater.engine,
        ledger=desk,
        prompts=prompts or Lengths(),
        rewards=rewards
        or InlineScorer(reward or (lambda prompt, response, answer: float(len(response.split()) == answer + 1))),
        weights=updater,
        settings=LoopSettings(
            sampling=Sampling(10),
            group_size=2,
            partial_rollout=partial,
            sleep_level=sleep_level,
            trace_every=trace_every,
            replica="replica-0",
            **{"starts_every": 1, **settings},
        ),
        report_interval_s=report_interval_s,
    )


def steps(rollouter: Rollouter, count: int) -> None:
    for _ in range(count):
        rollouter.step()


def step_until(rollouter: Rollouter, condition: Callable[[], bool]) -> None:
    """Step until ``condition`` holds: other threads score."""
    deadline_s = time.monotonic() + 600.0
    while not condition():
        assert time.monotonic() < deadline_s, "it never came"
        rollouter.step()
