from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import hwrl
from hwrl.cli import main
from hwrl.cli.bench import BENCHMARKS


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"hwrl {hwrl.__version__}\n"


@pytest.mark.parametrize(
    "words", [[], ["doctro"], ["doctor", "--jsno"], ["doctor", "a=b"], ["train", "c", "a=b", "--prnt"]], ids=repr
)
def test_wrong_usage_is_status_2(words: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(words)


def test_what_a_command_needs_is_named_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["train"])
    assert capsys.readouterr().err.endswith("the following arguments are required: config\n")


@pytest.mark.parametrize(
    "words", [["--print-config", "a=1", "b=2"], ["a=1", "--print-config", "b=2"], ["a=1", "b=2", "--print-config"]]
)
def test_overrides_may_stand_before_and_after_an_option(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("dir: run\nmodel: {path: m}\ndata: {train: t.jsonl}\nreward: {function: 'm:f'}\n")
    renamed = {"a=1": "train.steps=3", "b=2": "train.steps=7"}
    assert main(["train", str(config), *(renamed.get(word, word) for word in words)]) == 0
    assert "steps: 7" in capsys.readouterr().out, "the later one counts"


def test_overrides_of_a_benchmark_may_follow_its_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("{}")
    assert main(["bench", "lora", "--config", str(config), "train.stepz=1", "--rank", "4", "dirr=2"]) == 1
    told = capsys.readouterr().err
    assert "train.stepz: there is no such key" in told and "dirr: there is no such key" in told


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("async --rounds 0", "argument --rounds: it must be a whole number above 0, and is '0'"),
        ("async --staleness -1", "argument --staleness: it must be a whole number, 0 or more, and is '-1'"),
        ("checkpoint --gib -1", "argument --gib: it must be a number above 0, and is '-1'"),
        ("checkpoint --rollout-s inf", "argument --rollout-s: it must be a number of seconds, 0 or more, and is 'inf'"),
        ("checkpoint --dir /nope", "argument --dir: there is no folder '/nope'"),
        ("lora --hidden 40", "argument --hidden: it must be a multiple of 32, and is 40"),
        ("offload --gib nan", "argument --gib: it must be a number above 0, and is 'nan'"),
        ("overhead --calls 0", "argument --calls: it must be a whole number above 0, and is '0'"),
        ("weights --receivers 0", "argument --receivers: it must be a whole number above 0, and is '0'"),
        ("weights --mib -4", "argument --mib: it must be a whole number above 0, and is '-4'"),
        ("weights --slabs two", "argument --slabs: it must be a whole number above 0, and is 'two'"),
        ("overhead --json /nope/x.json", "argument --json: there is no folder '/nope'"),
        ("overhead --json /", "argument --json: '/' cannot be written"),
    ],
)
def test_a_benchmark_refuses_nonsense_before_it_measures(
    capsys: pytest.CaptureFixture[str], words: str, told: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["bench", *words.split()])
    assert capsys.readouterr().err.endswith(f"error: {told}\n")


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_says_at_once_that_its_result_cannot_be_written(
    capsys: pytest.CaptureFixture[str], name: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["bench", name, "--json", "/nope/x.json"])
    assert "there is no folder '/nope'" in capsys.readouterr().err


def test_an_error_is_told_without_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conformance", "cup"]) == 1
    assert capsys.readouterr().err.startswith("hwrl: Backend")


def test_ctrl_c_is_told_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def pressed(args: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("hwrl.cli.doctor.run", pressed)
    assert main(["doctor"]) == 130
    assert capsys.readouterr().err == "hwrl: interrupted\n"


def test_a_missing_extra_is_named() -> None:
    code = "import sys; sys.modules['pytest'] = None; from hwrl.cli import main; sys.exit(main(['conformance', 'cpu']))"
    ended = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, check=False)
    assert ended.returncode == 1
    assert (
        ended.stderr == "hwrl: this command needs pytest, which is not installed\n  fix: pip install 'hwrl[testing]'\n"
    )
