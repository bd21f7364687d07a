"""The ways to call a reward function: columns by name, batches, many async calls at once, no judgement."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hwrl.errors import DataError
from hwrl.rollout import Prompt, RewardFunction, RewardWorkers, Scores
from tests.support.sources import REPO
from tests.support.speed import slow
from tests.support.started_rewards import Start, responses_of

ONES = Scores([{"reward": 1.0}] * 3)


def score(
    workers: RewardWorkers, answer: object = None, lengths: Sequence[int] = (1, 2, 3), **row: Any
) -> Future[Scores]:
    prompt = Prompt("say", np.ones(1, dtype=np.int32), answer, row=row, source="sums")
    return workers.score(prompt, responses_of(lengths))


# -- columns --------------------------------------------------------------------------------------------------------


def test_a_function_gets_the_columns_that_it_names_and_no_others(start: Start) -> None:
    workers = start("names_columns")
    unsent = threading.Lock()  # it has no pickle
    assert score(workers, lengths=[1], level=3, unit="km", other=unsent).result(600).metrics == [
        {"reward": 3, "unit": 2}
    ]
    assert score(workers, lengths=[1], level=4).result(600).metrics == [{"reward": 4, "unit": 4}], "the default"
    assert "level" in str(score(workers).result(600).failure)


def test_a_function_with_a_double_star_gets_all_columns_and_the_name_of_the_data_set(start: Start) -> None:
    assert score(start("takes_all"), level=3, unit="km", prompt="raw").result(600) == ONES


@pytest.mark.parametrize("parameters", ["prompt", "prompt, response", "*, prompt, response, answer"])
def test_a_function_that_does_not_take_three_arguments_is_refused(parameters: str) -> None:
    scope: dict[str, Any] = {}
    exec(f"def f({parameters}): ...", scope)
    with pytest.raises(DataError, match=rf"cannot be called(.|\n)*it takes \({parameters}".replace("*,", r"\*,")):
        RewardFunction(scope["f"])


def test_functions_of_other_kinds_are_called_with_three_arguments() -> None:
    assert not RewardFunction(max).columns.required, "it tells no parameters"
    assert not RewardFunction(lambda *all_of_them: 1.0).columns.required


# -- batches --------------------------------------------------------------------------------------------------------


def test_a_batch_gets_lists_and_returns_one(start: Start) -> None:
    workers = start("rank_all", batch=True, attempts=1)
    assert score(workers, level=5).result(600).metrics == [{"reward": 5.0}, {"reward": 6.0}, {"reward": 7.0}]
    for answer in ("too few", "no list"):
        assert "no list of 3 results" in str(score(workers, answer, level=5).result(600).failure)
    assert "cannot judge" in str(score(workers, "one None", level=5).result(600).failure)


# -- no judgement ---------------------------------------------------------------------------------------------------


def test_a_response_without_a_judgement_fails_its_prompt_at_once_and_is_no_error(start: Start, tmp_path: Path) -> None:
    file = tmp_path / "calls"
    scores = score(start("cannot_judge", attempts=3), str(file)).result(600)
    assert (scores.metrics, scores.errors) == ([{"reward": 1.0}], 0)
    assert "cannot judge" in str(scores.failure) and "'1 2'" in str(scores.failure)
    assert file.read_text() == "xx", "no second attempt"


def test_a_function_may_end_its_work_by_an_alarm(start: Start) -> None:
    assert score(start("sets_an_alarm")).result(600) == ONES


def test_math_verify_works_in_a_worker(tmp_path: Path) -> None:
    pytest.importorskip("math_verify")
    path = tmp_path / "maths.py"
    path.write_text(
        "from math_verify import parse, verify\n\n"
        "def f(prompt, response, answer):\n    return float(verify(parse(answer), parse(response)))\n"
    )
    workers = RewardWorkers(f"{path}:f", decode=lambda ids: f"$\\\\frac{{{len(ids)}}}{{4}}$")
    try:
        assert [row["reward"] for row in score(workers, "$0.5$").result(600).metrics] == [0.0, 1.0, 0.0]
    finally:
        workers.close()


# -- async functions ------------------------------------------------------------------------------------------------


def test_calls_of_many_prompts_run_at_once_in_one_process_up_to_the_limit(start: Start) -> None:
    workers = start("ponder", concurrency=20, workers=4)
    workers.wait_until_ready()
    begun_s = time.monotonic()
    futures = [score(workers, slow(0.5), lengths=[1, 2]) for _ in range(10)]
    rows = [row for future in futures for row in future.result(600).metrics]
    assert [row["reward"] for row in rows] == [1.0, 2.0] * 10
    assert len({row["pid"] for row in rows}) == 1 and max(row["most"] for row in rows) == 20
    assert time.monotonic() - begun_s < slow(5.0), "twenty calls of 0.5 s"
    few = start("ponder", concurrency=3, workers=1)
    rows = [
        row for future in [score(few, 0.05, lengths=[1] * 5) for _ in range(2)] for row in future.result(600).metrics
    ]
    assert max(row["most"] for row in rows) == 3


@pytest.mark.parametrize("order", ["raise", "exit", "interrupt", "cancel", "end a generator"])
def test_an_async_call_that_raises_is_repeated_then_its_prompt_alone_has_failed(start: Start, order: str) -> None:
    workers = start("obey_later", attempts=2)
    failing, other = score(workers, order), score(workers)
    assert other.result(600) == ONES
    scores = failing.result(600)
    assert (scores.metrics, scores.errors) == ([{"reward": 1.0}], 2)
    assert "raised" in str(scores.failure) and "for the response '1 2'" in str(scores.failure)


def test_an_async_call_over_its_limit_is_cancelled_and_its_process_lives_on(start: Start) -> None:
    workers = start("obey_later", timeout_s=slow(1.0), workers=1)
    late, other = score(workers, "wait"), score(workers)
    scores = late.result(600)
    assert other.result(600) == ONES and not scores.stuck
    assert f"did not return within {slow(1):g} s for the response '1 2'" in str(scores.failure) and scores.errors == 1
    assert score(workers).result(600) == ONES
    ponder = start("ponder", timeout_s=slow(0.5), workers=1, concurrency=1)
    ponder.wait_until_ready()
    assert score(ponder, slow(0.3)).result(600).failure is None, "each call has its own limit"


@pytest.mark.parametrize("order", ["refuse to end", "hang", "hold the lock", "end the process", "crash"])
def test_what_cannot_be_cancelled_costs_its_own_prompt_only(start: Start, order: str) -> None:
    workers = start("obey_later", timeout_s=slow(1.0), workers=1)
    workers.wait_until_ready()
    before, failing, after = score(workers), score(workers, order), score(workers)
    assert failing.result(600).failure is not None
    assert before.result(600) == after.result(600) == ONES
    assert score(workers).result(600) == ONES


@pytest.mark.parametrize(
    "order", ["cancel all", "cancel all others", "cancel the oldest", "stop the loop", "exit in a task"]
)
def test_a_call_that_breaks_its_event_loop_costs_its_own_prompt_only(start: Start, order: str) -> None:
    workers = start("breaks_its_loop", workers=1)
    workers.wait_until_ready()
    before, failing, after = score(workers), score(workers, order), score(workers)
    assert "event loop was stopped or tasks of other calls were cancelled" in str(failing.result(600).failure)
    assert before.result(600) == after.result(600) == ONES


def test_a_process_with_a_call_that_does_not_end_is_replaced(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "reward.py"
    path.write_text(
        "import asyncio, os\n\n"
        "async def f(prompt, response, answer):\n"
        "    while answer:\n"
        "        try:\n            await asyncio.sleep(1e6)\n"
        "        except asyncio.CancelledError:\n            pass\n"
        "    return {'reward': 1.0, 'pid': os.getpid()}\n"
    )
    workers = RewardWorkers(f"{path}:f", decode=str, timeout_s=slow(0.5), workers=1)
    try:
        first = score(workers, None).result(600).metrics[0]["pid"]
        assert score(workers, "stay").result(600).stuck
        assert score(workers, None).result(600).metrics[0]["pid"] != first
    finally:
        workers.close()


# -- the page on rewards --------------------------------------------------------------------------------------------


def test_the_examples_of_the_docs_judge(tmp_path: Path) -> None:
    page = (REPO / "docs/rewards.md").read_text()
    plain, columns, batch = [part.split("```")[0] for part in page.split("```python\n")[1:] if "Judge(" not in part]
    numbers = Prompt("2 + 2 =", np.ones(1, dtype=np.int32), "4", row={"difficulty": 2, "unit": "km"}, source="sums")
    expected = {
        f"{plain}:score": [{"reward": 1.0, "length": 1.0}, {"reward": 0.0, "length": 4.0}],
        f"{columns}:score": [{"reward": 1.0, "right/sums": 1.0, "difficulty": 2.0}] * 2,
        f"{batch}:longest_right_answer": [{"reward": 0.0}, {"reward": 1.0}],
    }
    for number, (example, metrics) in enumerate(expected.items()):
        code, _, name = example.rpartition(":")
        (tmp_path / f"rewards{number}.py").write_text(code)
        workers = RewardWorkers(
            f"{tmp_path / f'rewards{number}.py'}:{name}",
            decode=lambda ids: "4" if len(ids) == 1 else "4 km",
            batch=name == "longest_right_answer",
        )
        try:
            responses = [np.ones(length, dtype=np.int32) for length in (1, 2)]
            assert workers.score(numbers, responses).result(600) == Scores(metrics)
        finally:
            workers.close()
