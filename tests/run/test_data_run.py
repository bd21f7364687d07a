"""A whole run on a mixture, with an async reward that uses columns, and evaluations that the replicas share."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.train_run import Run, assert_whole

pytestmark = pytest.mark.long(40)

REWARD = """\
import asyncio
from pathlib import Path

here = Path(__file__).parent


async def reward(prompt, response, answer, unit, *, source):
    if source in ("easy", "hard"):
        (here / "evaluating").touch()
        while not (here / "go").exists():
            await asyncio.sleep(0.05)
    right = float(response == answer)
    return {"reward": right, f"of/{source}": 1.0, "unit": len(unit)}
"""


def test_a_mixture_is_trained_and_a_dead_replica_costs_an_evaluation_nothing(
    start: Callable[..., Run], demo: Path
) -> None:
    (demo / "reward.py").write_text(REWARD)
    for name in ("train", "eval"):
        rows = [json.loads(line) for line in (demo / f"{name}.jsonl").read_text().splitlines()]
        changed = [{"question": row["prompt"], "answer": row["answer"], "unit": "km"} for row in rows]
        (demo / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in changed))
    sets = f"{{path: {demo}/train.jsonl, name: few}}, {{path: {demo}/train.jsonl, name: many, weight: 3}}"
    run = start(
        f"data.train=[{sets}]",
        f"data.eval={{easy: {demo}/eval.jsonl, hard: {demo}/eval.jsonl}}",
        "data.prompt_key=question",
        f"reward.function={demo / 'reward.py'}:reward",
        "rollout.replicas=2",
        "async_training.trigger_parameter_sync_step=7",  # the last three steps publish no version
        "eval.every_steps=0",
        "eval.prompts=5",
        "eval.n=6",  # more than rollout.n
        "eval.temperature=1",
        "goals={eval/easy/pass@4: 0, eval/hard/rewrad: 0}",
    )
    run.wait_until((demo / "evaluating").exists, 240.0, "evaluation")
    assert run.kill("ray::RolloutActor", at_most=1) == 1
    run.wait_for_output("a new replica starts")
    (demo / "go").touch()
    assert run.wait() == 1, run.output()
    assert "did you mean 'eval/hard/reward'?" in run.output() and run.output().count("is not the name of a metric") == 1
    assert "was lost" not in run.output()
    assert_whole(run)
    last = run.metrics()[-1]
    for name in ("easy", "hard"):
        passes = [last[f"eval/{name}/pass@{k}"] for k in (1, 2, 4, 6)]
        assert passes == sorted(passes) and last[f"eval/{name}/reward"] == pytest.approx(passes[0])
        assert last[f"eval/{name}/unit"] == 2 and last[f"eval/{name}/of/{name}"] == 1
    assert (last["weights/version"], last["eval/version"]) == (3, 4), "the last weights were evaluated"
    assert {"reward/of/few", "reward/of/many"} <= set().union(*run.metrics())
