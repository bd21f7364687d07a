"""The page of ``hwrl report`` as HTML: what it says of whole, broken, large and hostile runs."""

from __future__ import annotations

import json
import math
import re
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hwrl.checkpoint import DirectoryLock
from hwrl.cli import main
from hwrl.errors import RunDirectoryError
from hwrl.run.report import METRICS, PROMPTS
from hwrl.run.report.samples import SAMPLES
from hwrl.run.report.views import EVENTS
from hwrl_report import build_page
from hwrl_report.columns import BINS, MetricColumns, read_columns, thin_out
from hwrl_report.sample_list import choose_samples
from tests.support.run_files import ATTACK, event_of, sample_of, step_line, write_lines
from tests.support.run_files import run as run

VOID = {"meta", "input", "img", "br", "link"}


class Parsed(HTMLParser):
    """A page: its elements with their attributes, and all text inside elements of each tag."""

    def __init__(self, page: bytes) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: dict[str, str] = {}
        self._open: list[str] = []
        self.feed(page.decode("utf-8"))
        assert self._open == [], "each element is closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        for tag in set(self._open):
            self.text[tag] = self.text.get(tag, "") + data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def test_the_page_holds_everything_and_nothing_of_a_sample_is_markup(run: Path) -> None:
    page = Parsed(build_page(run))
    assert not any(page.all(tag) for tag in ("img", "iframe", "link", "object")) and len(page.all("script")) == 2
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)
    assert ATTACK in page.text["article"] and "&amp;" in page.text["article"] and "�" in page.text["article"]
    assert ATTACK in page.text["table"] and "# <script>" in page.text["details"]
    assert page.text["h1"].endswith("/<b>run")
    assert [attributes["data-step"] for attributes in page.all("article")] == [str(step) for step in range(30, 0, -1)]
    titles = ("Reward", "Loss", "Entropy", "KL", "Length of responses", "Tokens per second", "Trainer", "my/own")
    assert all(title in page.text["figcaption"] for title in titles)
    assert "done after step 30 of 30" in page.text["header"]


def test_the_page_refers_to_nothing_outside(run: Path) -> None:
    page = Parsed(build_page(run))
    assert all(str(attributes["href"]).startswith("#") for attributes in page.all("a"))
    assert not any({"src", "srcset", "data", "style"} & attributes.keys() for _, attributes in page.tags)
    assert not re.search(r"url\(|@import", page.text["style"])
    (policy,) = [str(meta["content"]) for meta in page.all("meta") if "http-equiv" in meta]
    assert policy.startswith("default-src 'none'") and "unsafe" not in policy


def count_in(page: str, name: str) -> str:
    found = re.search(rf"<dt>{name}</dt><dd>(.*?)</dd>", page)
    assert found is not None, name
    return found[1]


def test_the_faults_are_counted(run: Path) -> None:
    failures = {step: {"ledger__failures": float(min(step, 3)), "ledger__filtered": 2.0 * step} for step in range(9)}
    lines = [step_line(step, sync__excluded=float(step == 4), **failures[step]) for step in range(1, 9)]
    lines[5]["actor/loss"] = math.nan
    write_lines(run / METRICS, lines)
    write_lines(run / PROMPTS, [{"step": 4, "sequence_numbers": [1], "failed": {"77": "the <i>reward</i> raised"}}])
    text = build_page(run).decode()
    named = {"trainer restarts": "1", "replicas replaced": "1", "resumes": "1", "errors that ended the run": "0"}
    named |= {"replicas excluded from a transfer": "1", "failed attempts at prompts": "3", "prompts filtered": "16"}
    assert {name: count_in(text, name) for name in named} == named
    assert "<code>actor/loss</code> in 1 steps, first in step 6" in text
    assert "1 prompts given up" in text and "the &lt;i&gt;reward&lt;/i&gt; raised" in text


def test_counts_that_begin_anew_after_a_resume_add_up() -> None:
    columns = MetricColumns({"n": np.arange(4)}, {"n": np.array([1.0, 3.0, 1.0, 1.0])})
    assert columns.added("n") == 4.0 and columns.added("other") == 0.0


@pytest.mark.parametrize(
    ("events", "state"),
    [
        ([], "unknown"),
        ([event_of(0, "start", "hwrl begins")], "killed"),
        ([event_of(3, "error", "EngineError: no\n  why: x")], "failed"),
        ([event_of(3, "end", "interrupted after step 3 of 9")], "interrupted"),
    ],
)
def test_the_page_tells_how_the_run_ended(run: Path, events: list[Any], state: str) -> None:
    write_lines(run / EVENTS, events)
    assert f'class="state {state}"' in build_page(run).decode()


def test_the_page_of_a_running_run_says_so(run: Path) -> None:
    lock = DirectoryLock(run)
    try:
        for name in (METRICS, SAMPLES, EVENTS):
            with (run / name).open("a") as file:
                file.write('{"step": 31, "rew')  # it is being written
        text = build_page(run).decode()
    finally:
        lock.close()
    assert 'class="state running"' in text and "after step 30" in text


@pytest.mark.parametrize("content", [b"", b"\x00\xff not json\n[1]\n{}\n", b'{"step": "1", "time_s": 1}\n'])
def test_a_run_without_a_whole_step_has_a_page(tmp_path: Path, content: bytes) -> None:
    for name in (METRICS, SAMPLES, EVENTS, PROMPTS):
        (tmp_path / name).write_bytes(content)
    page = Parsed(build_page(tmp_path))
    assert "before its first step" in page.text["header"] and page.all("article") == []


@pytest.mark.parametrize("broken", [{"segments": 3}, {"segments": [1, {"text": None}]}, {"reward": "x", "age_min": []}])
def test_a_sample_of_another_program_does_not_break_the_page(run: Path, broken: dict[str, Any]) -> None:
    write_lines(run / SAMPLES, [{**sample_of(1), **broken}, {"step": 2}])
    assert len(Parsed(build_page(run)).all("article")) == 2


def test_samples_are_chosen_evenly_with_the_newest(tmp_path: Path) -> None:
    write_lines(tmp_path / SAMPLES, [sample_of(step) for step in range(1, 101)])
    chosen, total = choose_samples(tmp_path / SAMPLES, maximum=4)
    assert ([sample["step"] for sample in chosen], total) == ([100, 75, 50, 25], 100)


def test_many_points_become_few_and_keep_their_extremes() -> None:
    values = np.sin(np.arange(100_000) / 5000)
    values[77_777], values[3] = 99.0, math.nan
    curve = thin_out(np.arange(1, 100_001), values)
    assert len(curve.steps) == BINS and curve.steps == sorted(curve.steps)
    assert curve.maximum is not None and curve.minimum is not None
    assert max(value for value in curve.maximum if value is not None) == 99.0
    assert min(value for value in curve.minimum if value is not None) == pytest.approx(-1.0, abs=1e-3)


def test_a_large_run_gives_a_small_page_in_seconds(tmp_path: Path) -> None:
    rest = json.dumps({f"group/metric_{number}": 0.1234567 * number for number in range(60)})[1:]
    with (tmp_path / METRICS).open("w") as file:
        file.writelines(f'{{"step": {step}, "time_s": {step}.5, {rest}\n' for step in range(1, 4001))
    with (tmp_path / SAMPLES).open("w") as file:
        file.writelines(json.dumps(sample_of(step, "long " * 2000)) + "\n" for step in range(1, 1001))
    began_s = time.process_time()
    page = build_page(tmp_path)
    assert time.process_time() - began_s < 5  # 0.5 s of a processor without other work
    assert len(page) < 3e6
    assert len(read_columns(tmp_path / METRICS).values["group/metric_7"]) == 4000


def test_the_command_writes_the_page_and_says_where(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run)]) == 0
    assert f"wrote {run / 'report.html'}" in capsys.readouterr().out
    assert main(["report", str(run), "--out", str(run / "gone" / "x.html")]) == 1
    assert "--out FILE" in capsys.readouterr().err
    assert main(["report", str(run / "nothing")]) == 1
    assert "holds no run" in capsys.readouterr().err
    (run / EVENTS).unlink()
    (run / EVENTS).mkdir()
    with pytest.raises(RunDirectoryError, match="cannot be read"):
        build_page(run)
