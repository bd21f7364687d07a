"""An evaluation in parts, with stand-ins for the replicas: each part is done once, whatever happens to a replica."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, cast

import pytest
from ray.exceptions import RayActorError

from hwrl.errors import DataError, EngineError
from hwrl.rollout import EvaluatedPrompt, Evaluation
from hwrl.run.evaluation import ShardedEvaluation

ENDED = EngineError("there is no evaluation", why="the rollouter has ended")


class StandInReplica:
    """Notes its parts. A test answers them."""

    def __init__(self) -> None:
        self.parts: list[int] = []
        self.leaving = False
        self.answer: Future[Evaluation | None] = Future()

    def call(self, method: object, part: int, parts: int, *, alone: bool) -> Future[Evaluation | None]:
        """Take the place of a call of ``Replica.evaluate``."""
        self.parts.append(part)
        self.answer = Future()
        return self.answer

    def finish(self, *, version: int = 1) -> None:
        prompt = EvaluatedPrompt("", [{"reward": float(self.parts[-1])}])
        self.answer.set_result(Evaluation(version, 0, [prompt]))


@pytest.fixture(autouse=True)
def _answers_are_futures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hwrl.run.evaluation.is_ready", lambda answer: answer.done())
    monkeypatch.setattr("hwrl.run.evaluation.value_of", lambda answer: answer.result())


def spread(replicas: dict[str, StandInReplica], *, limit_s: float = 600.0) -> ShardedEvaluation:
    staying = lambda: [name for name, one in replicas.items() if not one.leaving]  # noqa: E731 - a call with the names
    return ShardedEvaluation(lambda: cast(Any, replicas), staying=staying, limit_s=limit_s)


def test_each_replica_gets_a_part_and_the_parts_are_joined() -> None:
    replicas = {name: StandInReplica() for name in ("a", "b", "c")}
    evaluation = spread(replicas)
    assert sorted(part for one in replicas.values() for part in one.parts) == [0, 1, 2]
    replicas["a"].finish(version=3)
    replicas["b"].finish(version=2)
    evaluation.poll()
    assert not evaluation.is_over and len(evaluation.answers) == 1
    replicas["c"].answer.set_result(None)  # a part without prompts
    evaluation.poll()
    whole = evaluation.result()
    assert evaluation.is_over and whole is not None and (whole.version, len(whole.prompts)) == (2, 2)


def test_a_replica_that_leaves_finishes_its_part_and_gets_no_other() -> None:
    replicas = {name: StandInReplica() for name in ("leaves", "dies", "stays")}
    evaluation = spread(replicas)
    replicas["leaves"].leaving = True
    replicas["dies"].answer.set_exception(RayActorError())
    replicas["leaves"].finish()
    evaluation.poll()
    assert [one.parts for one in replicas.values()] == [[0], [1], [2]]
    replicas["stays"].finish()
    evaluation.poll()
    replicas["stays"].finish()
    evaluation.poll()
    whole = evaluation.result()
    assert evaluation.is_over and whole is not None and len(whole.prompts) == 3


@pytest.mark.parametrize("error", [RayActorError(), ENDED, None], ids=["died", "ended", "gone"])
def test_a_part_that_is_lost_goes_to_another_replica_and_the_other_part_stays(error: Exception | None) -> None:
    replicas = {"a": StandInReplica(), "b": StandInReplica()}
    evaluation = spread(replicas)
    lost = replicas["a"].parts[0]
    if error is None:
        del replicas["a"]
    else:
        replicas["a"].answer.set_exception(error)
    evaluation.poll()
    assert not evaluation.is_over and replicas["b"].parts == [1 - lost], "it is busy"
    replicas["b"].finish()
    evaluation.poll()
    assert replicas["b"].parts == [1 - lost, lost]
    replicas["b"].finish()
    evaluation.poll()
    whole = evaluation.result()
    assert whole is not None and whole.metrics()["reward"] == 0.5


def test_a_part_waits_for_a_replacement_and_is_given_up_after_three_losses() -> None:
    replicas = {"a#0": StandInReplica()}
    evaluation = spread(replicas)
    for life in range(3):
        replicas[f"a#{life}"].answer.set_exception(ENDED)
        evaluation.poll()
        if life < 2:
            assert not evaluation.answers and not evaluation.is_over, "the replica that has failed gets it no more"
            replicas.clear()
            replicas[f"a#{life + 1}"] = StandInReplica()
            evaluation.poll()
    assert evaluation.is_over and evaluation.result() is None


def test_an_error_of_the_reward_ends_it() -> None:
    replicas = {"a": StandInReplica(), "b": StandInReplica()}
    evaluation = spread(replicas)
    replicas["a"].answer.set_exception(DataError("1 of 1 evaluation prompts could not be scored"))
    evaluation.poll()
    assert evaluation.is_over
    with pytest.raises(DataError, match="1 of 1"):
        evaluation.result()


def test_a_late_part_is_told() -> None:
    replicas = {"a": StandInReplica(), "b": StandInReplica()}
    evaluation = spread(replicas, limit_s=0.0)
    replicas["b"].finish()
    assert evaluation.stuck() == {"a": "its part of an evaluation was not finished within timeouts.evaluation_s=0 s"}
