"""What a real run records and shows: samples, its log, a tracker, traces, and the page; over deaths and a resume."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hwrl.run.report import PROMPTS
from hwrl.run.report.samples import SAMPLES
from hwrl.run.report.views import EVENTS
from hwrl_report import build_page
from tests.support.plugin_files import install_plugin
from tests.support.train_run import (
    LORA,
    TWO,
    Run,
    adapter_nbytes,
    assert_adapters_travel,
    assert_whole,
    base_nbytes,
    sent,
)

pytestmark = pytest.mark.long(170)

NOTEBOOK = """
import json
import hwrl
from hwrl.interfaces import Tracker

class Notebook(Tracker):
    def __init__(self, options):
        self.options = options

    def note(self, *words):
        with open(self.options["file"], "a") as file:
            file.write(json.dumps(words) + "\\n")

    def start(self, run):
        self.note("start", run.run_id, run.name, run.resume_step, run.config["train"]["steps"])

    def log(self, metrics, *, step):
        self.note("log", step, sorted(metrics))

    def trace(self, traces):
        for trace in traces:
            self.note("trace", trace.step, trace.sequence_number, [span.name for span in trace.spans])

    def finish(self, status):
        self.note("finish", status)

@hwrl.hookimpl
def hwrl_tracker(options):
    return Notebook(options)
"""


def read(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_run_is_seen_over_deaths_and_a_resume(start: Callable[..., Run], demo: Path, tmp_path: Path) -> None:
    """It trains an adapter, on two ranks that share each pack and both send."""
    plugins = tmp_path / "plugins"
    plugins.mkdir()
    install_plugin(plugins, "notebook", source=NOTEBOOK)
    notes, run_id_file = tmp_path / "notes", tmp_path / "run" / "run_id"
    words = ["report.trackers=[notebook]", f"report.tracker_options={{notebook: {{file: {notes}}}}}", "resume=true"]
    words += ["report.run_name=sorting", "report.samples_per_step=3", "report.trace_every=2"]
    words += [*LORA, *TWO, "weights.senders=2", "train.context_parallel=2", "algorithm.loss=decoupled"]
    run = start(*words, PYTHONPATH=str(plugins))
    run.wait_for_step(6)
    assert "2 of the trainer's ranks send them: weights.senders=2" in run.output()
    before = run.metrics()[:6]
    assert run.kill("ray::RolloutActor", at_most=1) == 1
    run.wait_for_output("a new replica starts")
    assert 'class="state running"' in build_page(run.directory).decode()
    run.wait_for_step(12)
    run.kill()
    run.wait()
    assert 'class="state killed"' in build_page(run.directory).decode()
    again = start(*words, PYTHONPATH=str(plugins))
    assert again.wait() == 0, again.output()
    assert_whole(again)
    assert sum(sent(again, "base_sent")) >= 2, "each start sends the base, which then stays"
    assert all(line["sync/nbytes"] == adapter_nbytes(again) for line in again.metrics())
    assert_adapters_travel(again, before, base_nbytes(demo))
    # One share of the batch, and packs: a padded end is all that is not trained on.
    assert all(line["perf/imbalance"] == 1.0 and line["perf/padding_share"] < 0.2 for line in again.metrics())
    assert abs(before[0]["actor/mismatch_kl"]) < 1e-3
    assert not (run.directory / "tensorboard").exists(), "it was not asked for"
    assert_samples(run.directory / SAMPLES)
    assert_notes(read(notes), run_id=run_id_file.read_text().strip())
    assert_traces(read(notes), read(run.directory / PROMPTS))
    kinds = Counter(event["kind"] for event in read(run.directory / EVENTS))
    assert (kinds["start"], kinds["replica"], kinds["end"], kinds["error"]) == (2, 1, 1, 0)
    page = build_page(run.directory).decode()
    assert 'class="state finished"' in page and "<dt>replicas replaced</dt><dd>1</dd>" in page


def assert_samples(path: Path) -> None:
    samples = read(path)
    assert [sample["step"] for sample in samples] == [step for step in range(1, 25) for _ in range(3)]
    assert all(0 <= sample["age_min"] <= sample["age_max"] <= 1 for sample in samples)
    assert all(sample["prompt"].startswith("<bos>") and sample["prompt"].endswith(">") for sample in samples)
    assert all(sum(part["tokens"] for part in sample["segments"]) <= 5 for sample in samples)
    assert len({sample["sequence_number"] for sample in samples}) == len(samples)


def assert_traces(notes: list[Any], trained: list[Any]) -> None:
    """Every second prompt of the last life's steps has one trace, from its lease to its step."""
    last_life = notes[max(index for index, note in enumerate(notes) if note[0] == "start") :]
    traces = [note[1:] for note in last_life if note[0] == "trace"]
    traced_numbers = {(step, number) for step, number, _ in traces}
    resume_step = last_life[0][3]
    assert traced_numbers == {
        (line["step"], number)
        for line in trained
        if line["step"] > resume_step
        for number in line["sequence_numbers"]
        if number % 2 == 0
    }
    assert len(traces) == len(traced_numbers)
    for _, _, names in traces:
        assert names[0] == "lease" and [name for name in names if name != "generate"][1:4] == [
            "reward",
            "batch",
            "step",
        ]
        assert "generate" in names


def assert_notes(notes: list[Any], *, run_id: str) -> None:
    starts = [note for note in notes if note[0] == "start"]
    assert [note[1:3] for note in starts] == [[run_id, "sorting"]] * 2
    assert starts[0][3:] == [0, 24] and starts[1][3] in (5, 10)
    second = [note[1] for note in notes[notes.index(starts[1]) :] if note[0] == "log" and "reward/mean" in note[2]]
    assert second == list(range(starts[1][3] + 1, 25))
    assert notes[-1] == ["finish", "finished"] and any("eval/reward" in note[2] for note in notes if note[0] == "log")
