"""The evaluator by itself: one evaluation at a time, three attempts, one answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import InvalidStateError
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest

from hwrl.errors import DataError, EngineError
from hwrl.interfaces import Sampling, Trajectory
from hwrl.rollout import (
    EvaluatedPrompt,
    Evaluation,
    Evaluator,
    PolicyClient,
    Prompt,
    WorkflowGenerator,
    WorkflowSettings,
)
from hwrl.rollout.evaluator import pass_at_k
from hwrl.rollout.generation import GroupGenerator, NoRewards, PendingGroup
from tests.support.scripted_rollout import CountingEngine, InlineScorer, Lengths

PROMPTS = [Lengths()[0], Lengths()[2]]


class Examination:
    """An evaluator, its scorer, and an engine at ``version``. A call of the reward takes one of ``scores``."""

    def __init__(self, scores: list[float | None], *, version: int = 0, **settings: Any) -> None:
        self._script: Iterator[float | None] = iter(scores)
        self._rewards = InlineScorer(self._next_score, attempts=1)
        self.evaluator = Evaluator(self._rewards, **settings)
        self._engine = CountingEngine()
        self._engine.version = version
        self._generator = GroupGenerator(self._engine, group_size=4)

    def _next_score(self, prompt: str, response: str, answer: object) -> float:
        score = next(self._script)
        if score is None:
            raise ValueError("no score today")
        return score

    def start(self) -> None:
        self.evaluator.start(lambda group: self._generator.start(group, Sampling(10)))

    def generate(self) -> list[PendingGroup]:
        """Generate and score all that is started."""
        groups = []
        while self._engine.pending():
            for group in self._generator.step():
                group.score(self._rewards)
                groups.append(group)
        return self.wait(groups)

    def wait(self, groups: list[PendingGroup]) -> list[PendingGroup]:
        for group in groups:
            assert group.scores is not None
            group.scores.result(timeout=600)
        return groups


def test_an_evaluation_waits_for_its_start_and_answers_with_means_and_the_oldest_version() -> None:
    examination = Examination([1.0, 0.0], version=7)
    answer = examination.evaluator.request(PROMPTS)
    assert examination.evaluator.is_waiting and examination.evaluator.collect(incarnation=3) == []
    examination.start()
    assert not examination.evaluator.is_waiting
    assert examination.evaluator.collect(incarnation=3) == [] and not answer.done(), "nothing is generated"
    examination.generate()
    assert examination.evaluator.collect(incarnation=3) == []
    evaluation = answer.result(timeout=0)
    assert (evaluation.version, evaluation.incarnation, evaluation.metrics()) == (7, 3, {"reward": 0.5})


def test_a_second_evaluation_is_refused_until_the_first_has_its_answer() -> None:
    examination = Examination([1.0, 1.0])
    first = examination.evaluator.request(PROMPTS)
    with pytest.raises(InvalidStateError, match="already under way"):
        examination.evaluator.request(PROMPTS).result(timeout=0)
    examination.start()
    examination.generate()
    examination.evaluator.collect(incarnation=0)
    assert first.done() and not examination.evaluator.request(PROMPTS).done()


def test_only_prompts_without_a_score_are_scored_again() -> None:
    examination = Examination([None, 1.0, 0.5])
    answer = examination.evaluator.request(PROMPTS)
    examination.start()
    first, _ = examination.generate()
    again = examination.evaluator.collect(incarnation=0)
    assert again == [first] and not answer.done()
    examination.wait(again)
    assert examination.evaluator.collect(incarnation=0) == []
    assert answer.result(timeout=0).metrics() == {"reward": 0.75}


def test_after_three_attempts_the_answer_is_an_error_with_the_reason() -> None:
    examination = Examination([None] * 6)
    answer = examination.evaluator.request(PROMPTS)
    examination.start()
    examination.generate()
    for _ in range(2):
        assert len(examination.wait(examination.evaluator.collect(incarnation=0))) == 2
    assert examination.evaluator.collect(incarnation=0) == []
    with pytest.raises(DataError, match=r"2 of 2 evaluation prompts(.|\n)*no score today"):
        answer.result(timeout=0)


def test_after_a_restart_nothing_of_what_was_generated_counts() -> None:
    examination = Examination([None, None, 1.0, 1.0])
    answer = examination.evaluator.request(PROMPTS)
    examination.start()
    examination.generate()
    examination.evaluator.restart()
    assert examination.evaluator.is_waiting and examination.evaluator.collect(incarnation=1) == []
    examination.start()
    examination.generate()
    examination.evaluator.collect(incarnation=1)
    assert answer.result(timeout=0).metrics() == {"reward": 1.0}


@pytest.mark.parametrize("begin", [lambda examination: None, Examination.start], ids=["waiting", "started"])
def test_a_closed_evaluator_fails_the_present_evaluation_and_later_ones(begin: Callable[[Examination], None]) -> None:
    examination = Examination([])
    present = examination.evaluator.request(PROMPTS)
    begin(examination)
    examination.evaluator.close()
    for answer in (present, examination.evaluator.request(PROMPTS)):
        with pytest.raises(EngineError, match="the rollouter has ended"):
            answer.result(timeout=0)


def test_an_evaluation_without_prompts_is_refused_and_the_next_one_works() -> None:
    examination = Examination([1.0, 1.0])
    with pytest.raises(DataError, match="the evaluation has no prompts"):
        examination.evaluator.request([]).result(timeout=0)
    assert not examination.evaluator.is_waiting and not examination.evaluator.request(PROMPTS).done()


def test_an_evaluation_cannot_be_cancelled_so_its_answer_is_never_an_error() -> None:
    examination = Examination([1.0, 1.0])
    answer = examination.evaluator.request(PROMPTS)
    assert not answer.cancel()
    examination.start()
    examination.generate()
    examination.evaluator.collect(incarnation=0)
    assert answer.result(timeout=0).metrics() == {"reward": 1.0}


def test_an_evaluation_whose_means_cannot_be_computed_is_answered_by_close(monkeypatch: pytest.MonkeyPatch) -> None:
    examination = Examination([1.0, 1.0])
    answer = examination.evaluator.request(PROMPTS)
    examination.start()
    examination.generate()
    monkeypatch.setattr(PendingGroup, "metrics", lambda group: [{"reward": "high"}])
    with pytest.raises(TypeError):
        examination.evaluator.collect(incarnation=0)
    examination.evaluator.close()
    with pytest.raises(EngineError, match="the rollouter has ended"):
        answer.result(timeout=0)


def test_several_samples_come_in_groups_of_the_engines_size_and_count_for_pass_at_k() -> None:
    examination = Examination([1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0], samples=5, group_size=3)
    answer = examination.evaluator.request(PROMPTS)
    examination.start()
    assert [group.size for group in examination.generate()] == [3, 2, 3, 2]
    examination.evaluator.collect(incarnation=0)
    metrics = answer.result(timeout=0).metrics()
    assert metrics == pytest.approx(
        {"reward": 0.2, "pass@1": 0.2, "pass@2": (1 - 3 / 10) / 2, "pass@4": 0.5, "pass@5": 0.5}
    )


def test_pass_at_k_is_the_share_of_all_choices_with_a_passed_response() -> None:
    for passed in range(6):
        results = [index < passed for index in range(5)] if passed <= 5 else []
        for k in range(1, 6):
            choices = list(combinations(results, k))
            assert pass_at_k(5, passed, k) == pytest.approx(sum(map(any, choices)) / len(choices))


def test_named_sets_have_metrics_of_their_own_and_parts_join_to_the_whole() -> None:
    rows = [EvaluatedPrompt("a", [{"reward": 1.0}]), EvaluatedPrompt("b", [{"reward": 0.25}]), EvaluatedPrompt("b", [])]
    whole = Evaluation.join([Evaluation(3, 2, rows[:1]), Evaluation(2, 2, rows[1:])])
    assert (whole.version, whole.incarnation) == (2, 2)
    assert whole.metrics() == {"a/reward": 1.0, "b/reward": 0.25, "b/unjudged": 1.0}
    several = Evaluation(0, 0, [EvaluatedPrompt("", [{"reward": 0.5}, {"reward": 0.4}])])
    assert several.metrics(pass_reward=0.5) == {"reward": 0.45, "pass@1": 0.5, "pass@2": 1.0}


def test_an_evaluator_that_skips_leaves_out_what_cannot_be_scored() -> None:
    examination = Examination([None, 1.0, None, None], skips=True)
    answer = examination.evaluator.request([replace(prompt, source="sums") for prompt in PROMPTS])
    examination.start()
    examination.generate()
    while again := examination.evaluator.collect(incarnation=0):
        examination.wait(again)
    assert answer.result(timeout=0).metrics() == {"sums/reward": 1.0, "sums/unjudged": 1.0}


@pytest.mark.parametrize("replicas", [1, 3])
def test_prompts_that_all_fail_in_generation_are_left_out_with_any_number_of_replicas(replicas: int) -> None:
    prompts = [Lengths()[index] for index in range(4)]
    whole = Evaluation.join([evaluate_even(prompts[part::replicas], version=7 + part) for part in range(replicas)])
    assert (whole.version, whole.metrics()) == (7, {"reward": 0.5, "unjudged": 2.0})


def test_an_evaluation_that_skips_needs_one_response_for_its_version() -> None:
    part = evaluate_even([Lengths()[1]], version=3)
    assert part.metrics() == {"unjudged": 1.0}
    with pytest.raises(DataError, match=r"no response to any of 2 evaluation prompts(.|\n)*1 is odd"):
        _ = Evaluation.join([part, part]).version


def evaluate_even(prompts: list[Prompt], *, version: int) -> Evaluation:
    """Evaluate ``prompts`` with a workflow that fails for odd ones; the others have half a reward."""

    async def evens_only(client: PolicyClient, prompt: Prompt) -> Trajectory:
        if prompt.answer % 2:
            raise ValueError(f"{prompt.answer} is odd")
        conversation = client.begin(prompt.token_ids)
        await conversation.generate()
        return conversation.finish(reward=0.5)

    engine = CountingEngine()
    engine.version = version
    settings = WorkflowSettings(group_size=1, max_samples=8, max_length=12, vocabulary=100, timeout_s=600.0)
    generator = WorkflowGenerator(engine, evens_only, tokenizer=None, settings=settings)
    evaluator = Evaluator(NoRewards(), skips=True)
    answer = evaluator.request(prompts)
    evaluator.start(lambda group: generator.start(group, Sampling(10)))
    try:
        while generator.pending():
            for group in generator.step():
                group.score(NoRewards())
    finally:
        generator.close()
    while evaluator.collect(incarnation=0):
        pass
    return answer.result(timeout=0)
