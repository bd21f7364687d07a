"""Groups of responses: whole, in the order of their requests, within the limits of their prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hwrl.interfaces import Completion, GenerationRequest, Sampling
from hwrl.rollout.generation import GroupGenerator, PendingGroup, mean_metrics
from tests.support.scripted_rollout import CountingEngine, Lengths


class Reversed(CountingEngine):
    """Finishes the requests of a group one a step, the last one first."""

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        ends = range(len(requests), 0, -1)
        super().submit(
            [replace(one, prompt_ids=one.prompt_ids * 0 + end) for one, end in zip(requests, ends, strict=True)]
        )


def test_a_group_is_returned_once_with_its_last_response_and_in_the_order_of_its_requests() -> None:
    generator = GroupGenerator(Reversed(), group_size=3)
    started = PendingGroup(Lengths()[0], 3)
    generator.start(started, Sampling(10))
    assert generator.step() == [] and generator.step() == []
    assert not started.is_generated
    assert generator.step() == [started]
    assert started.is_generated and not started.is_scored
    assert [len(row.response_ids) for row in started.trajectories] == [3, 2, 1]
    assert generator.tokens == 6


def test_groups_of_several_sizes_are_kept_apart() -> None:
    generator = GroupGenerator(CountingEngine(), group_size=3)
    one, three = (PendingGroup(Lengths()[0], size) for size in (1, 3))
    for group in (one, three):
        generator.start(group, Sampling(10))
    assert generator.step() == [one, three]
    assert [len(group.samples) for group in (one, three)] == [1, 3]


def test_room_counts_samples_and_dropping_frees_it() -> None:
    engine = CountingEngine(room=8)
    generator = GroupGenerator(engine, group_size=3)
    assert generator.room() == 8
    generator.start(PendingGroup(Lengths()[5], 3), Sampling(10))
    assert generator.room() == 5
    generator.drop()
    assert generator.room() == 8 and not engine.pending()


def test_a_prompts_own_limit_lowers_the_limit_of_the_sampling() -> None:
    limits: list[int] = []

    class Watching(CountingEngine):
        def submit(self, requests: Sequence[GenerationRequest]) -> None:
            limits.extend(request.sampling.max_new_tokens for request in requests)

        def step(self) -> list[Completion]:
            return []

    generator = GroupGenerator(Watching(), group_size=1)
    for limit in (None, 3, 300):
        generator.start(PendingGroup(replace(Lengths()[0], max_new_tokens=limit), 1), Sampling(10))
    assert limits == [10, 3, 10]


def test_the_mean_of_a_metric_is_over_the_rows_that_have_it() -> None:
    assert mean_metrics([{"a": 1.0, "b": 4.0}, {"a": 3.0}]) == {"a": 2.0, "b": 4.0}
    assert mean_metrics([]) == {}
