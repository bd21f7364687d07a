"""Samples of a step: which trajectories, as which text, and what a resume keeps of the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hwrl.interfaces import Ints, PromptGroup, Response, Segment, Trajectory
from hwrl.run.report import read_lines
from hwrl.run.report.run_report import RunReport
from hwrl.run.report.samples import MAX_CHARS, SAMPLES, pick_samples
from tests.support.single_turns import join_responses

METRICS_OF_A_STEP = {"reward/mean": 0.5, "staleness/mean": 1.0, "staleness/max": 2.0}


def ids(*numbers: int) -> Ints:
    return np.array(numbers, dtype=np.int32)


def decode(token_ids: Ints) -> str:
    return " ".join(map(str, token_ids))


def response(*numbers: int, version: int) -> Response:
    tokens = ids(*numbers)
    versions = np.full(len(tokens), version, dtype=np.int32)
    return Response(tokens, np.zeros(len(tokens), dtype=np.float32), versions, truncated=False)


def single_turn(number: int, *, size: int = 2) -> PromptGroup:
    return join_responses(
        [response(number, row, version=number % 3) for row in range(size)],
        sequence_number=number,
        lease_id=0,
        incarnation=0,
        prompt_ids=ids(7, number),
        rewards=[row / 4 for row in range(size)],
        metrics={"exact": 0.5},
    )


def pick(groups: list[PromptGroup], count: int, *, step: int = 5) -> list[dict[str, Any]]:
    return pick_samples(groups, step=step, version=3, count=count, decode=decode)


def test_a_sample_has_its_text_reward_and_ages() -> None:
    group = single_turn(4)
    found = {sample["sample"]: sample for sample in pick([group], 2)}
    assert found[1] == {
        "step": 5,
        "sequence_number": 4,
        "sample": 1,
        "reward": 0.25,
        "truncated": False,
        "age_max": 2,
        "age_min": 2,
        "prompt_reward_mean": 0.125,
        "prompt_metrics": {"exact": 0.5},
        "prompt": "7 4",
        "prompt_tokens": 2,
        "segments": [{"author": "policy", "tokens": 2, "text": "4 1"}],
    }


def test_a_trajectory_of_several_turns_shows_who_wrote_what() -> None:
    turns = (
        Segment(ids(1)),
        Segment.of_response(response(2, 3, version=1), reward=0.25),
        Segment(ids(8, 9)),
        Segment.of_response(response(4, version=3), reward=0.5),
    )
    group = PromptGroup.of_samples(
        [[Trajectory(turns, truncated=True)]], sequence_number=0, lease_id=0, incarnation=0, rewards=[0.75], metrics={}
    )
    (sample,) = pick([group], 9)
    assert sample["segments"] == [
        {"author": "policy", "tokens": 2, "reward": 0.25, "text": "2 3"},
        {"author": "environment", "tokens": 2, "text": "8 9"},
        {"author": "policy", "tokens": 1, "reward": 0.5, "text": "4"},
    ]
    assert (sample["age_min"], sample["age_max"], sample["truncated"]) == (0, 2, True)


@pytest.mark.parametrize(("count", "prompts"), [(0, 0), (3, 3), (5, 4), (99, 4)])
def test_prompts_differ_while_there_are_enough(count: int, prompts: int) -> None:
    samples = pick([single_turn(number) for number in range(4)], count)
    assert len(samples) == min(count, 8)
    assert len({sample["sequence_number"] for sample in samples}) == prompts
    assert len({(sample["sequence_number"], sample["sample"]) for sample in samples}) == len(samples)


def test_each_step_chooses_anew_and_always_the_same() -> None:
    groups = [single_turn(number) for number in range(40)]
    chosen = [[sample["sequence_number"] for sample in pick(groups, 3, step=step)] for step in (1, 1, 2)]
    assert chosen[0] == chosen[1] != chosen[2]


def test_a_long_text_keeps_its_beginning_and_its_end() -> None:
    long = "a" + "x" * 99999 + "z"
    (sample,) = pick_samples([single_turn(1, size=1)], step=1, version=3, count=1, decode=lambda tokens: long)
    text = sample["prompt"]
    assert text[0] == "a" and text[-1] == "z" and len(text) < MAX_CHARS + 100
    assert f"{100001 - MAX_CHARS:,} characters left out" in text


def lines(directory: Path) -> list[int]:
    return [sample["step"] for _, sample in read_lines(directory / SAMPLES) if sample is not None]


def write(directory: Path, steps: range, *, resume_step: int = 0) -> None:
    report = RunReport(directory, log=lambda text: None, resume_step=resume_step)
    for step in steps:
        report.add(step, METRICS_OF_A_STEP, prompts=[step], samples=pick([single_turn(step)], 2, step=step))
    report.close()


def test_a_resume_cuts_the_samples_after_its_step(tmp_path: Path) -> None:
    write(tmp_path, range(1, 6))
    with (tmp_path / SAMPLES).open("a") as file:
        file.write('{"step": 6, "prom')  # what a kill leaves
    write(tmp_path, range(4, 6), resume_step=3)
    assert lines(tmp_path) == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert all(json.loads(line) for line in (tmp_path / SAMPLES).read_text().splitlines())


def test_damage_in_the_middle_costs_its_line_only(tmp_path: Path) -> None:
    write(tmp_path, range(1, 4))
    content = (tmp_path / SAMPLES).read_bytes().splitlines(keepends=True)
    (tmp_path / SAMPLES).write_bytes(b"".join([content[0], b"\xff[\n", *content[1:], b"{}\n"]))
    write(tmp_path, range(3, 4), resume_step=2)
    assert lines(tmp_path) == [1, 1, 2, 2, 3, 3]


def test_samples_that_cannot_be_written_do_not_end_the_run(tmp_path: Path) -> None:
    logged: list[str] = []
    report = RunReport(tmp_path, log=logged.append)
    for step in (1, 2, 3):
        if step == 2:
            (tmp_path / SAMPLES).unlink()
        report.add(step, METRICS_OF_A_STEP, prompts=[step], samples=pick([single_turn(1)], 1, step=step))
    report.close()
    (told,) = logged
    assert f"{tmp_path / SAMPLES} can no longer be written" in told
