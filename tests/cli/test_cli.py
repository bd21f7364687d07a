from __future__ import annotations

import subprocess
import sys
from importlib.metadata import EntryPoints, entry_points
from pathlib import Path

import pytest

import hwrl
from hwrl.cli import main
from hwrl.run.invocation import invoked


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"hwrl {hwrl.__version__}\n"


def test_a_command_for_developers_says_where_it_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In an environment of the wheel it is missing; here its plugin is hidden."""
    found = [entry for entry in entry_points(group="hwrl.plugins") if entry.name != "bench"]
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: EntryPoints(found))
    assert main(["bench", "weights"]) == 1
    told = capsys.readouterr().err
    assert "hwrl bench is not installed" in told and "pip install -e . -e plugins/hwrl_bench" in told


@pytest.mark.parametrize(
    "words", [[], ["doctro"], ["doctor", "--jsno"], ["doctor", "a=b"], ["train", "c", "a=b", "--prnt"]], ids=repr
)
def test_wrong_usage_is_status_2(words: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(words)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["train", "--resume", "c"], "a setting has no dashes: resume=…"),
        (["train", "c", "--train.steps=5"], "a setting has no dashes: train.steps=5\n"),
        (["plan", "c", "--devices=8", "--memory=80GiB", "--bandwidth=0.5"], "'0.5' is not a number of bytes"),
        ([], "checkpoints"),
    ],
    ids=repr,
)
def test_wrong_usage_tells_the_right_one(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(words)
    assert told in capsys.readouterr().err


def test_advice_names_the_command_as_it_was_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = tmp_path / "a folder" / "hwrl"
    started.parent.mkdir()
    started.touch(mode=0o755)
    monkeypatch.setattr(sys, "argv", [str(started), "train"])
    monkeypatch.setenv("PATH", str(tmp_path))
    assert invoked() == f"'{started}'"
    monkeypatch.setenv("PATH", str(started.parent))
    assert invoked() == "hwrl"
    monkeypatch.setattr(sys, "argv", ["-c"])
    assert invoked() == "hwrl"


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


def test_an_error_is_told_without_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conformance", "cup"]) == 1
    assert capsys.readouterr().err.startswith("hwrl: ConfigError: there is no backend, engine or transport 'cup'")


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
