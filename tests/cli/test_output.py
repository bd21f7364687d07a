"""What the command prints: nothing steers the terminal, and output that is lost is no success."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hwrl.cli import main
from hwrl.output import printable
from tests.support.run_files import step_line, write_lines

STEERING = "\x1b]0;owned\x07 \x1b[2J \x9b31m \b\b \u202e \udcff end\r> "


def hwrl(*words: str, stdout: int, unbuffered: bool = False) -> tuple[int, bytes]:
    """Run the command, and return its status and what it writes to standard error."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1" if unbuffered else ""}
    environment |= {"HWRL_BACKEND": "cuad"} if words[0] == "doctor" else {}  # without the live check, of seconds
    command = [sys.executable, "-m", "hwrl", *words]
    ended = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, env=environment, check=False)
    return ended.returncode, ended.stderr


def test_text_of_people_stays_as_it_is() -> None:
    text = "Zoë 的 準確率 ×2 👩‍🔬 \t|\n"
    assert printable(text) == text
    assert printable("\r 50%|█") == "\r 50%|█", "a progress bar draws itself again"


@pytest.mark.parametrize("action", ["checkpoints ls", "report", "scale --replicas=1"])
def test_an_error_shows_the_escapes_of_a_name(action: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command, *options = action.split()
    assert main([command, *options, f"{tmp_path}/{STEERING}"]) == 1
    shown = capsys.readouterr().err
    assert r"\x1b]0;owned\x07 \x1b[2J \x9b31m" in shown and r"\u202e \udcff end\r>" in shown
    assert shown == printable(shown)


@pytest.mark.parametrize("words", [["doctor", STEERING], [STEERING]], ids=repr)
def test_wrong_usage_shows_the_escapes_of_a_word(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(words)
    shown = capsys.readouterr().err
    assert r"\x1b]0;owned" in shown and shown == printable(shown)


def test_a_name_that_the_system_refuses_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["checkpoints", "ls"], ["report"], ["train"], ["scale", "--replicas=1"]):
        assert main([*words, str(tmp_path / ("x" * 300))]) == 1
        assert "File name too long" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "unbuffered"),
    [
        ("--help", False),
        ("--help", True),
        ("doctor", False),
        ("checkpoints ls {run}", False),
        ("train {config} --print-config", False),
        ("simulate {config} --devices=8 --steps=3", True),
        ("report {run}", False),
    ],
)
def test_a_full_disk_is_an_error_and_a_closed_pipe_is_a_quiet_end(
    words: str, unbuffered: bool, files: dict[str, str]
) -> None:
    arguments = words.format(**files).split()
    with open("/dev/full", "wb") as full:
        ended = hwrl(*arguments, stdout=full.fileno(), unbuffered=unbuffered)
    assert ended == (1, b"hwrl: the output cannot be written: No space left on device\n")
    read, write = os.pipe()
    os.close(read)
    try:
        ended = hwrl(*arguments, stdout=write, unbuffered=unbuffered)
    finally:
        os.close(write)
    assert ended == (141, b"")


def test_a_closed_standard_output_is_an_error() -> None:
    ended = subprocess.run(
        ["/bin/sh", "-c", f"'{sys.executable}' -m hwrl --version <&- >&-"], stderr=subprocess.PIPE, check=False
    )
    assert (ended.returncode, ended.stderr) == (1, b"hwrl: the output cannot be written: Bad file descriptor\n")
    ended = subprocess.run(["/bin/sh", "-c", f"'{sys.executable}' -m hwrl report /none 2>&-"], check=False)
    assert ended.returncode == 1, "and without standard error the status tells"


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "checkpoints" / "global_step_1").mkdir(parents=True)
    write_lines(tmp_path / "metrics.jsonl", [step_line(1)])
    config = tmp_path / "c.yaml"
    config.write_text("dir: run\nmodel: {path: m}\ndata: {train: t.jsonl}\nreward: {function: 'm:f'}\n")
    return {"run": str(tmp_path), "config": str(config)}
