"""The rollouter with real parts and a scripted engine: whole groups, scored, with weights at the right time."""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from dataclasses import replace

import pytest

from hwrl.errors import DataError, EngineError
from hwrl.interfaces import MEMORY_TAGS, Completion, GenerationRequest
from hwrl.rollout import Prompt, PromptLease
from hwrl.rollout.rollouter import SLEEPS_AFTER_S
from tests.support.scripted_rollout import CountingEngine, Desk, Lengths, Updater, rollouter_of, step_until, steps


def test_each_prompt_comes_back_as_one_scored_group() -> None:
    desk = Desk([3, 0])
    rollouter = rollouter_of(desk)
    step_until(rollouter, lambda: len(desk.groups) == 2)
    assert [(group.sequence_number, group.lease_id, group.size) for group in desk.groups] == [(0, 100, 2), (3, 103, 2)]
    assert [group.rewards.tolist() for group in desk.groups] == [[1.0, 1.0]] * 2
    assert desk.groups[1].token_ids.tolist() == [1, 2, 3, 4] * 2


def test_partial_rollout_takes_weights_between_two_tokens() -> None:
    desk, updater = Desk([3]), Updater()
    rollouter = rollouter_of(desk, updater=updater)
    steps(rollouter, 2)
    updater.offered = [7]
    step_until(rollouter, lambda: len(desk.groups) == 1)
    assert desk.groups[0].versions.tolist() == [0, 0, 7, 7] * 2


def test_without_partial_rollout_running_prompts_finish_first_and_no_new_one_begins() -> None:
    desk, updater = Desk([3, 3, 3, 3, 1]), Updater()
    rollouter = rollouter_of(desk, updater=updater, partial=False)
    steps(rollouter, 2)
    updater.offered = [7]
    steps(rollouter, 2)
    assert desk.numbers == [1], "the fifth prompt waits for the update"
    step_until(rollouter, lambda: len(desk.groups) == 5)
    seen = {group.sequence_number: set(group.versions.tolist()) for group in desk.groups}
    assert seen == {3: {0}, 1: {7}}


def test_nothing_begins_before_the_first_weights() -> None:
    desk, updater = Desk([0]), Updater()
    updater.engine.version = -1
    rollouter = rollouter_of(desk, updater=updater)
    answer = rollouter.evaluate([Lengths()[0]])
    steps(rollouter, 3)
    assert desk.numbers == [0] and not answer.done()
    updater.offered = [0]
    step_until(rollouter, lambda: len(desk.groups) == 1 and answer.done())


def test_responses_wait_for_weights_after_a_transfer_that_lost_them() -> None:
    desk, updater = Desk([3]), Updater()
    rollouter = rollouter_of(desk, updater=updater)
    steps(rollouter, 2)
    updater.engine.version = -1
    steps(rollouter, 3)
    assert rollouter.engine.pending() == 2 and updater.events == ["request"], "without a prompt that waits, too"
    updater.offered = [7]
    step_until(rollouter, lambda: len(desk.groups) == 1)
    assert desk.groups[0].versions.tolist() == [0, 0, 7, 7] * 2


def test_a_prompt_waits_for_the_weights_that_its_lease_asks_for() -> None:
    class Ahead(Desk):
        def lease(self, count: int) -> Future[list[PromptLease]]:
            future: Future[list[PromptLease]] = Future()
            future.set_result([replace(lease, version=5) for lease in super().lease(count).result()])
            return future

    desk, updater = Ahead([0]), Updater()
    rollouter = rollouter_of(desk, updater=updater)
    steps(rollouter, 5)
    assert not desk.groups and not rollouter.engine.pending()
    updater.offered = [5]
    step_until(rollouter, lambda: len(desk.groups) == 1)
    assert desk.groups[0].oldest_version == 5


def test_a_prompt_of_a_new_incarnation_waits_for_its_weights_however_high_the_version_of_the_lost_ones() -> None:
    """The replica was frozen at version 37 while the trainer went back; its lease asks for version 17."""
    desk, updater = Desk([0]), Updater()
    desk.incarnation, updater.engine.version = 1, 37
    rollouter = rollouter_of(desk, updater=updater)
    steps(rollouter, 5)
    assert not desk.groups and not rollouter.engine.pending()
    updater.offered, updater.next_incarnation = [17], 1
    step_until(rollouter, lambda: len(desk.groups) == 1)
    assert (desk.groups[0].incarnation, desk.groups[0].newest_version) == (1, 17)


def test_weights_of_a_new_incarnation_end_what_the_lost_ones_began_and_an_evaluation_starts_again() -> None:
    desk, updater = Desk([5, 6]), Updater()
    updater.engine.version = 37
    rollouter = rollouter_of(desk, updater=updater)
    answer = rollouter.evaluate([Lengths()[7]])
    steps(rollouter, 3)
    assert rollouter.engine.pending() == 5
    updater.offered, updater.next_incarnation = [17], 1
    desk.numbers, desk.incarnation = [2], 1
    step_until(rollouter, lambda: answer.done() and bool(desk.groups))
    assert answer.result().version == 17, "no token of it is of the lost weights"
    assert [(group.sequence_number, group.incarnation) for group in desk.groups] == [(2, 1)]


def test_a_lease_of_a_lost_incarnation_is_never_begun() -> None:
    desk, updater = Desk([0]), Updater()
    updater.incarnation = updater.next_incarnation = 1
    rollouter = rollouter_of(desk, updater=updater)
    steps(rollouter, 3)
    desk.numbers, desk.incarnation = [4], 1
    step_until(rollouter, lambda: bool(desk.groups))
    assert [group.sequence_number for group in desk.groups] == [4]


def test_a_step_that_hangs_is_seen_from_outside() -> None:
    released, stop = threading.Event(), threading.Event()

    class Hangs(CountingEngine):
        def step(self) -> list[Completion]:
            released.wait(300)
            stop.set()
            return super().step()

    rollouter = rollouter_of(Desk([0]), engine=Hangs())
    assert rollouter.step_s() == 0.0
    thread = threading.Thread(target=rollouter.run, args=[stop])
    thread.start()
    deadline_s = time.monotonic() + 600.0
    while rollouter.step_s() < 0.2:
        assert time.monotonic() < deadline_s
    released.set()
    thread.join(100)
    assert rollouter.step_s() == 0.0


def test_a_slow_reward_holds_up_neither_generation_nor_weights() -> None:
    scored = threading.Event()

    def slow(prompt: str, response: str, answer: object) -> float:
        assert scored.wait(100)
        return 1.0

    desk, updater = Desk([0, 2]), Updater()
    rollouter = rollouter_of(desk, updater=updater, reward=slow)
    steps(rollouter, 2)
    updater.offered = [3]
    steps(rollouter, 2)
    assert rollouter.engine.version == 3 and not rollouter.engine.pending() and not desk.groups
    scored.set()
    step_until(rollouter, lambda: len(desk.groups) == 2)


def test_a_reward_that_raises_is_retried_then_the_prompt_has_failed_with_the_reason() -> None:
    calls: list[str] = []

    def flaky(prompt: str, response: str, answer: object) -> float:
        calls.append(prompt)
        if prompt == "1" or len(calls) == 1:
            raise ZeroDivisionError("no luck")
        return 1.0

    desk = Desk([0, 1])
    rollouter = rollouter_of(desk, reward=flaky)
    step_until(rollouter, lambda: bool(desk.failed and desk.groups))
    assert [group.sequence_number for group in desk.groups] == [0]
    assert desk.failed[0][0] == 1
    assert "no luck" in desk.failed[0][1]
    assert rollouter.stats()["reward_errors"] == 4


class Gap(Lengths):
    """Has no prompt 1."""

    def __getitem__(self, sequence_number: int) -> Prompt:
        if sequence_number == 1:
            raise DataError("the curriculum has no prompt for sequence number 1", why="it is empty", fix="fill it")
        return super().__getitem__(sequence_number)


def test_a_number_without_a_prompt_has_failed_and_costs_no_other() -> None:
    desk = Desk([0, 1, 2])
    step_until(rollouter_of(desk, prompts=Gap()), lambda: len(desk.groups) == 2)
    assert desk.failed == [(1, "the curriculum has no prompt for sequence number 1: it is empty")]


def test_a_reward_that_exits_has_failed_like_one_that_raises() -> None:
    desk = Desk([0])
    rollouter = rollouter_of(desk, reward=lambda prompt, response, answer: sys.exit(3))
    step_until(rollouter, lambda: bool(desk.failed))
    assert "SystemExit(3)" in desk.failed[0][1] and rollouter.stats()["reward_errors"] == 3.0


def test_an_evaluation_goes_on_beside_training_and_tells_its_oldest_version() -> None:
    desk, updater = Desk([5]), Updater()
    rollouter = rollouter_of(desk, updater=updater)
    steps(rollouter, 1)
    answer = rollouter.evaluate([Lengths()[2], Lengths()[1]])
    steps(rollouter, 1)
    updater.offered = [4]
    step_until(rollouter, lambda: answer.done() and len(desk.groups) == 1)
    assert answer.result(timeout=0).version == 0
    assert answer.result(timeout=0).metrics() == {"reward": 1.0}
    assert desk.groups[0].versions.max() == 4


def test_an_evaluation_that_cannot_be_scored_says_so() -> None:
    def broken(prompt: str, response: str, answer: object) -> float:
        raise ValueError("broken")

    rollouter = rollouter_of(Desk([]), reward=broken)
    answer = rollouter.evaluate([Lengths()[0]])
    step_until(rollouter, answer.done)
    with pytest.raises(DataError, match="1 of 1 evaluation prompts"):
        answer.result(timeout=0)


class FailsToStep(CountingEngine):
    def step(self) -> list[Completion]:
        raise RuntimeError("the device is gone")


class FailsToBegin(CountingEngine):
    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        raise RuntimeError("the device is gone")


@pytest.mark.parametrize("engine", [FailsToStep, FailsToBegin])
def test_an_evaluation_that_a_run_leaves_unfinished_is_told_and_later_ones_are_refused(
    engine: type[CountingEngine],
) -> None:
    waits, stop = rollouter_of(Desk([])), threading.Event()
    stop.set()
    asked = waits.evaluate([Lengths()[0]])  # not begun yet
    waits.run(stop)
    fails = rollouter_of(Desk([]), engine=engine())
    begun = fails.evaluate([Lengths()[0]])
    with pytest.raises(RuntimeError, match="the device is gone"):
        fails.run(threading.Event())
    for answer in (asked, waits.evaluate([Lengths()[0]]), begun, fails.evaluate([Lengths()[0]])):
        with pytest.raises(EngineError, match="the rollouter has ended"):
            answer.result(timeout=0)


def test_the_seconds_of_all_activities_add_up() -> None:
    rollouter = rollouter_of(Desk([3]))
    steps(rollouter, 5)
    stats = rollouter.stats()
    assert stats["tokens"] == 8
    assert stats["generate_s"] > 0
    assert {"idle_s", "generate_s"} <= stats.keys()


def test_a_prompts_own_limit_lowers_the_runs() -> None:
    class Limited(Lengths):
        def __getitem__(self, sequence_number: int) -> Prompt:
            return replace(super().__getitem__(sequence_number), max_new_tokens=3 if sequence_number else 300)

    limits: list[int] = []

    class Watching(CountingEngine):
        def submit(self, requests: Sequence[GenerationRequest]) -> None:
            limits.extend(request.sampling.max_new_tokens for request in requests)
            super().submit(requests)

    rollouter_of(Desk([0, 1]), engine=Watching(), prompts=Limited()).step()
    assert limits == [10, 10, 3, 3]


class DrowsyEngine(CountingEngine):
    """Notes when it sleeps and wakes; at level 2 it forgets its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.naps: list[str] = []

    def sleep(self, *, level: int) -> int:
        assert not self.pending()
        self.naps.append(f"sleep {level}")
        self.version = -1 if level == 2 else self.version
        return 1000

    def wake(self, tags: Collection[str] = MEMORY_TAGS) -> None:
        self.naps.append(f"wake {' '.join(sorted(tags))}")

    def step(self) -> list[Completion]:
        assert not self.naps or "kv_cache" in self.naps[-1], "it is awake"
        return super().step()


class Throttled(Desk):
    """Answers no question for prompts until it is told to."""

    def __init__(self, numbers: list[int]) -> None:
        super().__init__(numbers)
        self.asked: list[Future[list[PromptLease]]] = []

    def lease(self, count: int) -> Future[list[PromptLease]]:
        self.asked.append(Future())
        return self.asked[-1]

    def give(self) -> None:
        self.asked[-1].set_result([PromptLease(100 + number, number, 0, self.incarnation) for number in self.numbers])


@pytest.mark.parametrize("level", [1, 2])
def test_an_idle_engine_sleeps_until_there_is_work_and_gets_what_it_has_dropped(level: int) -> None:
    engine, desk = DrowsyEngine(), Throttled([1])
    updater = Updater(engine)
    rollouter = rollouter_of(desk, updater=updater, sleep_level=level)
    step_until(rollouter, lambda: bool(engine.naps))
    steps(rollouter, 5)
    assert engine.naps == [f"sleep {level}"], "once is enough"
    assert updater.events == ["release"]
    assert rollouter.stats()["freed_nbytes"] == 1000
    desk.give()
    steps(rollouter, 3)
    assert engine.naps[1:] == ["wake kv_cache weights"]
    if level == 2:
        assert updater.events == ["release", "request"] and not engine.pending()
        updater.offered = [0]
    step_until(rollouter, lambda: len(desk.groups) == 1)


def test_a_sleeping_engine_takes_new_weights_before_it_has_a_cache() -> None:
    engine, desk = DrowsyEngine(), Throttled([])
    updater = Updater(engine)
    rollouter = rollouter_of(desk, updater=updater, sleep_level=2)
    step_until(rollouter, lambda: bool(engine.naps))
    updater.offered = [3]
    steps(rollouter, 1)
    assert engine.naps[1:] == ["wake weights", "wake kv_cache weights"]
    assert engine.version == 3


def test_an_engine_without_a_level_never_sleeps() -> None:
    engine, desk = DrowsyEngine(), Throttled([])
    rollouter = rollouter_of(desk, engine=engine)
    waited_until_s = time.monotonic() + 3 * SLEEPS_AFTER_S
    step_until(rollouter, lambda: time.monotonic() > waited_until_s)
    assert not engine.naps
    assert "sleeps" not in rollouter.stats()


def test_a_leaving_rollouter_finishes_its_prompts_and_the_request_on_its_way_and_asks_for_no_more() -> None:
    desk = Throttled([2, 1])
    rollouter = rollouter_of(desk)
    steps(rollouter, 2)
    rollouter.leave()
    stop = threading.Event()
    running = threading.Thread(target=rollouter.run, args=[stop])
    running.start()
    try:
        running.join(0.1)
        assert running.is_alive(), "leases may still come"
        answer = rollouter.evaluate([Lengths()[0]])
        desk.give()
        running.join(100.0)
        assert not running.is_alive() and len(desk.asked) == 1
    finally:
        stop.set()
        running.join()
    assert sorted(group.sequence_number for group in desk.groups) == [1, 2] and answer.result(0) is not None


def test_prompts_start_together_in_every_fourth_round_and_at_once_when_nothing_runs() -> None:
    begun: list[int] = []

    class NotingEngine(CountingEngine):
        def submit(self, requests: Sequence[GenerationRequest]) -> None:
            begun.append(round_number)
            super().submit(requests)

    rollouter = rollouter_of(Desk([6] * 40), engine=NotingEngine(room=4), starts_every=4)
    for round_number in range(40):  # noqa: B007 - the engine reads it
        steps(rollouter, 1)
    apart = {after - before for before, after in itertools.pairwise(sorted(set(begun)))}
    assert begun[0] == 0 and min(apart) >= 4, begun


class WatchedEngine(CountingEngine):
    """Notes how many places are taken by evaluation prompts, which have 7 tokens, and by training prompts."""

    def __init__(self, *, room: int) -> None:
        super().__init__(room=room)
        self.taken: list[tuple[int, int]] = []

    def step(self) -> list[Completion]:
        evaluated = sum(request.prompt_ids[0] == 7 for request, _ in self._running.values())
        self.taken.append((evaluated, len(self._running) - evaluated))
        return super().step()


@pytest.mark.parametrize(
    ("room", "share", "samples", "evaluated", "trained"),
    [(32, 0.25, 1, 8, 24), (32, 0.25, 11, 8, 24), (8, 0.25, 1, 2, 6), (8, 0.01, 4, 1, 6), (4, 1.0, 1, 2, 2)],
)
def test_an_evaluation_takes_its_share_of_the_places_and_training_keeps_the_others(
    room: int, share: float, samples: int, evaluated: int, trained: int
) -> None:
    engine, desk = WatchedEngine(room=room), Desk([1] * 20_000)
    rollouter = rollouter_of(desk, engine=engine, eval_share=share, eval_samples=samples)
    steps(rollouter, 3)
    answer = rollouter.evaluate([Lengths()[6]] * 1000)
    steps(rollouter, 30)
    assert not answer.done() and max(engine.taken) == (evaluated, trained)
    assert min(room - sum(taken) for taken in engine.taken) >= 0
    assert min(taken[1] for taken in engine.taken[2:]) >= trained - 1, "a group of two starts with two places"
    assert {taken[0] for taken in engine.taken[20:]} <= {evaluated - 1, evaluated}
    step_until(rollouter, answer.done)
    assert len(answer.result().prompts) == 1000


def test_an_evaluation_beside_groups_that_take_all_places_gets_one_more() -> None:
    engine = WatchedEngine(room=2)
    rollouter = rollouter_of(Desk([1] * 20_000), engine=engine)
    answer = rollouter.evaluate([Lengths()[6]] * 3)
    step_until(rollouter, answer.done)
    assert max(taken[0] for taken in engine.taken) == 1
    assert {taken[1] for taken in engine.taken} <= {1, 2}, "training waits for nothing"


def test_an_evaluation_alone_takes_all_places() -> None:
    engine = WatchedEngine(room=8)
    rollouter = rollouter_of(Desk([]), engine=engine)
    answer = rollouter.evaluate([Lengths()[6]] * 100, alone=True)
    step_until(rollouter, answer.done)
    assert engine.taken[0] == (8, 0) and max(engine.taken) == (8, 0)
