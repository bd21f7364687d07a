"""The run directory: complete lines, cut back on resume, figures that add up."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hwrl.run.actors import Taken
from hwrl.run.figures import FigureWindow
from hwrl.run.report import METRICS, PROMPTS, LiveView, PlainView, RunReport, draw_curve, read_metrics

FIGURES = {"reward/mean": 0.5, "staleness/mean": 1.0, "staleness/max": 2.0, "weights/version": 3.0}


def write_steps(directory: Path, steps: range, *, resume_step: int = 0) -> None:
    report = RunReport(directory, say=pytest.fail, resume_step=resume_step)
    for step in steps:
        report.add(step, FIGURES, prompts=[step, step + 100])
    report.close()


def test_a_resume_drops_what_came_after_its_step_and_goes_on_counting_seconds(tmp_path: Path) -> None:
    write_steps(tmp_path, range(1, 6))
    with (tmp_path / METRICS).open("a") as file:
        file.write('{"step": 6, "time')  # what a kill leaves
    seconds = read_metrics(tmp_path)[2]["time_s"]
    write_steps(tmp_path, range(4, 8), resume_step=3)
    lines = read_metrics(tmp_path)
    assert [line["step"] for line in lines] == list(range(1, 8))
    assert lines[3]["time_s"] >= seconds
    prompts = [json.loads(line) for line in (tmp_path / PROMPTS).read_text().splitlines()]
    assert [line["step"] for line in prompts] == list(range(1, 8))
    assert (tmp_path / "reward.png").read_bytes().startswith(b"\x89PNG")


def test_an_evaluation_is_added_to_the_newest_line(tmp_path: Path) -> None:
    report = RunReport(tmp_path, say=pytest.fail)
    report.add(1, FIGURES, prompts=[])
    report.add(2, FIGURES, prompts=[])
    report.amend({"eval/reward": 0.75})
    report.add(3, FIGURES, prompts=[])
    report.close()
    assert [line.get("eval/reward") for line in read_metrics(tmp_path)] == [None, 0.75, None]


@pytest.mark.parametrize(
    ("rewards", "evaluated", "inside"),
    [([0.1, 0.9], 0.5, (0.0, 1.02)), ([-3.0, 40.0], 0.5, None), ([0.5, 0.5], 7.0, None)],
)
def test_the_curve_shows_every_reward(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    rewards: list[float],
    evaluated: float,
    inside: tuple[float, float] | None,
) -> None:
    from matplotlib import pyplot

    monkeypatch.setattr(pyplot, "close", lambda figure: None)
    history = [{**FIGURES, "step": float(step), "reward/mean": reward} for step, reward in enumerate(rewards)]
    history[-1]["eval/reward"] = evaluated
    draw_curve(history, tmp_path / "reward.png")
    figure = pyplot.gcf()
    monkeypatch.undo()
    low, high = figure.axes[0].get_ylim()
    pyplot.close(figure)
    assert all(low <= value <= high for value in [*rewards, evaluated])
    assert inside is None or (low, high) == inside


def test_plain_lines_come_at_most_so_often_but_evaluations_and_the_end_always() -> None:
    stream = io.StringIO()
    view = PlainView(4, stream=stream, interval_s=1000)
    for step in range(1, 5):
        line = {"step": float(step), "time_s": 1.0, **FIGURES}
        view.show({**line, "eval/reward": 0.5} if step == 3 else line)
    shown = stream.getvalue().splitlines()
    assert [line.split(" | ")[0] for line in shown] == ["step 1/4", "step 3/4", "step 4/4"]
    assert "eval 0.500" in shown[1]


def test_the_live_view_takes_every_line_of_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    view = LiveView(2)
    view.show({"step": 1.0, "time_s": 1.0, **FIGURES})
    view.say("something happened in /tmp/a[b]c: [/b]")
    view.show({"step": 2.0, "time_s": 2.0, "eval/reward": 0.5, "eval/exact": 0.25, **FIGURES})
    view.close()
    assert "something happened in /tmp/a[b]c: [/b]" in capsys.readouterr().out


def test_a_run_goes_on_when_nobody_reads_its_lines_any_more() -> None:
    program = "import sys; from hwrl.run.report import PlainView; view = PlainView(1, stream=sys.stdout)\n"
    program += "[view.say('a line') for _ in range(3)]; print('and another')"
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb") as stdout:
        ended = subprocess.run([sys.executable, "-c", program], stdout=stdout, stderr=subprocess.PIPE, check=False)
    assert (ended.returncode, ended.stderr) == (0, b"")


def test_rates_and_idle_ratios_are_of_the_window_between_two_steps() -> None:
    def taken(tokens: float, idle_s: float, generate_s: float) -> Taken:
        totals = {"tokens": tokens, "idle_s": idle_s, "generate_s": generate_s, "reward_errors": 0.0}
        return Taken([], {"trained": 1}, {"a": totals, "b": {**totals, "tokens": 0.0}})

    trained = {"response/tokens": 10.0, "timing_s/wait": 1.0, "timing_s/train": 3.0}
    window = FigureWindow([{"response/tokens_total": 1000.0}])
    window.figures(trained, taken(100, 1.0, 1.0))
    figures = window.figures(trained, taken(150, 1.5, 2.5))
    assert figures["rollout/idle_ratio"] == pytest.approx(0.25)
    assert figures["trainer/idle_ratio"] == pytest.approx(0.25)
    assert figures["rollout/tokens_per_s"] == pytest.approx(5 * figures["trainer/tokens_per_s"], rel=1e-6)
    assert figures["response/tokens_total"] == 1020
    quiet = window.figures(trained, taken(150, 1.5, 2.5))
    assert quiet["rollout/idle_ratio"] == figures["rollout/idle_ratio"], "no replica has reported since"
