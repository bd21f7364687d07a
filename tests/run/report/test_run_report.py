"""The run directory: complete lines, shortened on resume, with correct sums."""

from __future__ import annotations

import io
import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from hwrl.errors import RunDirectoryError, attempt_all
from hwrl.rollout import UntrainedPrompts
from hwrl.run.cluster.placement import DeviceCounts
from hwrl.run.ledger import BatchInfo
from hwrl.run.report import METRICS, PROMPTS, PlainView, read_metrics
from hwrl.run.report.run_report import RunReport
from hwrl.run.report.steps import StepRates
from hwrl.run.report.summary import summarise
from hwrl.testing.processes import run_processes
from tests.support.run_config import config_of

METRICS_OF_A_STEP = {"reward/mean": 0.5, "staleness/mean": 1.0, "staleness/max": 2.0, "weights/version": 3.0}


def write_steps(directory: Path, steps: range, *, resume_step: int = 0) -> None:
    report = RunReport(directory, log=pytest.fail, resume_step=resume_step)
    for step in steps:
        report.add(step, METRICS_OF_A_STEP, prompts=[step, step + 100])
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


def test_an_evaluation_is_added_to_the_newest_line(tmp_path: Path) -> None:
    report = RunReport(tmp_path, log=pytest.fail)
    report.add(1, METRICS_OF_A_STEP, prompts=[])
    report.add(2, METRICS_OF_A_STEP, prompts=[])
    report.amend({"eval/reward": 0.75})
    report.add(3, METRICS_OF_A_STEP, prompts=[])
    report.close()
    assert [line.get("eval/reward") for line in read_metrics(tmp_path)] == [None, 0.75, None]


@pytest.mark.parametrize(
    ("edit", "told"),
    [
        (lambda lines: [], "steps 1, 2, 3, 4, 5 of 5 missing"),
        (lambda lines: [lines[0], lines[2], lines[4]], "steps 2, 4 of 5 missing"),
        (lambda lines: [*lines[:2], lines[2][:9], *lines[3:]], "step 3 of 5 missing; line 3 damaged or out of order"),
        (
            lambda lines: [*lines[:2], '{"step": 3}', *lines[3:4]],
            "steps 3, 5 of 5 missing; line 3 damaged or out of order",
        ),
        (lambda lines: [lines[1], lines[0], "[" * 99999, *lines[2:]], "lines 2, 3 damaged or out of order"),
    ],
)
def test_a_resume_tells_which_steps_are_not_in_the_account(
    tmp_path: Path, edit: Callable[[list[str]], list[str]], told: str
) -> None:
    for name, content in ((METRICS, {"time_s": 1.0, **METRICS_OF_A_STEP}), (PROMPTS, {"sequence_numbers": [1]})):
        lines = [json.dumps({"step": step, **content}) for step in range(1, 7)]
        (tmp_path / name).write_text("".join(f"{line}\n" for line in edit(lines)))
    logged: list[str] = []
    with closing(RunReport(tmp_path, log=logged.append, resume_step=5)) as report:
        report.add(6, METRICS_OF_A_STEP, prompts=[])
    assert logged == [
        f"{tmp_path / name} is incomplete: {told}. The run continues, because weights and prompts come from the "
        "checkpoint"
        for name in (METRICS, PROMPTS)
    ]
    steps = [line["step"] for line in report.history]
    assert steps == sorted(steps) and steps[-1] == 6
    assert "after step 6" in summarise(config_of(tmp_path), report.history, interrupted=True).text


def test_the_summary_tells_the_goals_and_what_to_do_next(tmp_path: Path) -> None:
    config = config_of(tmp_path, goals={"reward/mean": 0.9})
    (tmp_path / "model").mkdir()
    told = summarise(config, [{"step": 9.0, "time_s": 1.0, "reward/mean": 0.95}], interrupted=False).text
    assert "goals reached: reward/mean is 0.95, the goal was 0.9" in told
    assert f"hwrl report {tmp_path}" in told and f"model {tmp_path / 'model'}" in told
    told = summarise(config, [{"step": 9.0, "time_s": 1.0, "reward/mean": 0.5}], interrupted=False).text
    assert "goal missed: reward/mean is 0.5" in told
    longer = 2 * config.train.steps
    assert f"hwrl train {tmp_path / 'config.yaml'} resume=true train.steps={longer}" in told


def test_an_account_that_is_gone_is_told_of_too(tmp_path: Path) -> None:
    logged: list[str] = []
    RunReport(tmp_path, log=logged.append, resume_step=2).close()
    assert [text.partition(" of 2")[0] for text in logged] == [
        f"{tmp_path / name} is incomplete: steps 1, 2" for name in (METRICS, PROMPTS)
    ]


def delete(path: Path) -> None:
    path.unlink()


def replace(path: Path) -> None:
    path.unlink()
    path.touch()


def delete_the_directory(path: Path) -> None:
    shutil.rmtree(path.parent)


def add(report: RunReport) -> None:
    report.add(2, METRICS_OF_A_STEP, prompts=[2])


def amend(report: RunReport) -> None:
    report.amend({"eval/reward": 1.0})


@pytest.mark.parametrize("change", [delete, replace, delete_the_directory])
@pytest.mark.parametrize(
    ("act", "name"),
    [(add, METRICS), (add, PROMPTS), (RunReport.sync, METRICS), (RunReport.sync, PROMPTS), (amend, METRICS)],
)
def test_lines_that_would_be_lost_with_their_file_are_an_error(
    tmp_path: Path, name: str, change: Callable[[Path], None], act: Callable[[RunReport], object]
) -> None:
    directory = tmp_path / "run"
    directory.mkdir()
    report = RunReport(directory, log=lambda text: None)
    report.add(1, METRICS_OF_A_STEP, prompts=[1])
    change(directory / name)
    with pytest.raises(RunDirectoryError, match="cannot be written") as caught:
        act(report)
    assert caught.value.why and caught.value.fix
    report.close()


def test_a_directory_in_the_place_of_the_metrics_is_an_error(tmp_path: Path) -> None:
    (tmp_path / METRICS).mkdir()
    with pytest.raises(RunDirectoryError, match=f"{METRICS} cannot be read"):
        RunReport(tmp_path, log=pytest.fail)


def meet_a_limit_on_file_sizes(rank: int, directory: Path) -> tuple[int, list[str], list[str]]:
    """Add steps until a write fails; return that step, the error with its notes, and the log."""
    logged: list[str] = []
    report = RunReport(directory, log=logged.append)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    for step in range(1, 100):
        try:
            report.add(step, METRICS_OF_A_STEP, prompts=[step])
        except RunDirectoryError as error:
            attempt_all(report.close, after=error)
            return step, [str(error), *getattr(error, "__notes__", [])], logged
    raise AssertionError("there was no limit")


def test_a_limit_on_file_sizes_is_an_error_of_the_account(tmp_path: Path) -> None:
    step, (told, *notes), logged = run_processes(meet_a_limit_on_file_sizes, 1, tmp_path)[0]
    assert told.startswith(f"{tmp_path / METRICS} cannot be written\n  why: File too large\n") and notes == []
    assert logged == []
    assert [line["step"] for line in read_metrics(tmp_path)] == list(range(1, step))
    with closing(RunReport(tmp_path, log=pytest.fail, resume_step=step - 1)) as report:  # half a line is no damage
        assert len(report.history) == step - 1


def test_plain_lines_come_at_most_so_often_but_evaluations_and_the_end_always() -> None:
    stream = io.StringIO()
    view = PlainView(4, stream=stream, interval_s=1000)
    for step in range(1, 5):
        line = {"step": float(step), "time_s": 1.0, **METRICS_OF_A_STEP}
        view.show({**line, "eval/reward": 0.5} if step == 3 else line)
    shown = stream.getvalue().splitlines()
    assert [line.split(" | ")[0] for line in shown] == ["step 1/4", "step 3/4", "step 4/4"]
    assert "eval 0.500" in shown[1]


def test_a_run_goes_on_when_nobody_reads_its_lines_any_more() -> None:
    program = "import sys; from hwrl.run.report import PlainView; view = PlainView(1, stream=sys.stdout)\n"
    program += "[view.log('a line') for _ in range(3)]; print('and another')"
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb") as stdout:
        ended = subprocess.run([sys.executable, "-c", program], stdout=stdout, stderr=subprocess.PIPE, check=False)
    assert (ended.returncode, ended.stderr) == (0, b"")


@pytest.mark.parametrize(("encoding", "shown"), [("ascii", r"3 \xd7 2\u2026 /\udcff"), ("utf-8", r"3 × 2… /\udcff")])
def test_a_run_goes_on_when_its_output_cannot_show_a_character(encoding: str, shown: str) -> None:
    program = r"from hwrl.run.report import make_view; make_view(1).log('3 \u00d7 2\u2026 /\udcff')"
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, env=environment, check=False)
    assert (ended.stdout.decode(encoding), ended.stderr) == (f"{shown}\n", b"")


def test_rates_and_idle_ratios_are_of_the_window_between_two_steps() -> None:
    def batch(tokens: float, idle_s: float, generate_s: float) -> BatchInfo:
        totals = {"tokens": tokens, "idle_s": idle_s, "generate_s": generate_s, "reward_errors": 0.0}
        return BatchInfo([], {"trained": 1}, {"a": totals, "b": {**totals, "tokens": 0.0}})

    trained = {"response/tokens": 10.0, "timing_s/wait": 1.0, "timing_s/train": 3.0}
    rates = StepRates([{"response/tokens_total": 1000.0}])
    devices = DeviceCounts(2, 3)
    rates.metrics(trained, batch(100, 1.0, 1.0), devices=devices)
    metrics = rates.metrics(trained, batch(150, 1.5, 2.5), devices=devices)
    assert metrics["rollout/idle_ratio"] == pytest.approx(0.25)
    assert metrics["trainer/idle_ratio"] == pytest.approx(0.25)
    assert metrics["rollout/tokens_per_s"] == pytest.approx(5 * metrics["trainer/tokens_per_s"], rel=1e-6)
    assert metrics["response/tokens_total"] == 1020
    quiet = rates.metrics(trained, batch(150, 1.5, 2.5), devices=devices)
    assert quiet["rollout/idle_ratio"] == metrics["rollout/idle_ratio"], "no replica has reported since"


def test_the_prompts_settled_without_training_are_in_the_line_and_in_the_metrics(tmp_path: Path) -> None:
    untrained = UntrainedPrompts(filtered=[0, 4], failed={2: "no judge"})
    with closing(RunReport(tmp_path, log=pytest.fail)) as report:
        report.add(1, METRICS_OF_A_STEP, prompts=[1, 3], untrained=untrained)
        report.add(2, METRICS_OF_A_STEP, prompts=[5, 6], untrained=UntrainedPrompts())
    first, second = (json.loads(line) for line in (tmp_path / PROMPTS).read_text().splitlines())
    assert first == {"step": 1, "sequence_numbers": [1, 3], "filtered": [0, 4], "failed": {"2": "no judge"}}
    assert second == {"step": 2, "sequence_numbers": [5, 6]}
    batch = BatchInfo([1, 3], {"filtered": 2, "failed": 1}, {}, untrained)
    trained = {"response/tokens": 1.0, "timing_s/wait": 1.0}
    metrics = StepRates([]).metrics(trained, batch, devices=DeviceCounts(1, 1))
    assert {name: value for name, value in metrics.items() if name.startswith("groups/")} == {
        "groups/filtered": 2.0,
        "groups/filtered_ratio": 0.5,
        "groups/failed": 1.0,
    }


def test_what_comes_after_a_step_whose_line_was_lost_has_a_line_of_its_own(tmp_path: Path) -> None:
    """After all steps the records were deleted, and ``resume=true`` evaluates once more."""
    report = RunReport(tmp_path, log=lambda text: None, resume_step=7)
    line = report.amend({"eval/reward": 0.5})
    report.close()
    assert line["step"] == 7 and read_metrics(tmp_path) == [line]
    PlainView(7, stream=io.StringIO()).show(line)
