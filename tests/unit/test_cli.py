from __future__ import annotations

import subprocess
import sys

import pytest

import hwrl
from hwrl.cli import main


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"hwrl {hwrl.__version__}\n"


@pytest.mark.parametrize("words", [[], ["doctro"], ["doctor", "--jsno"]], ids=repr)
def test_wrong_usage_is_status_2(words: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(words)


def test_what_a_command_needs_is_named_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["train"])
    assert capsys.readouterr().err.endswith("the following arguments are required: config\n")


def test_an_error_is_told_without_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conformance", "cup"]) == 1
    assert capsys.readouterr().err.startswith("hwrl: Backend")


def test_a_missing_extra_is_named() -> None:
    code = "import sys; sys.modules['pytest'] = None; from hwrl.cli import main; sys.exit(main(['conformance', 'cpu']))"
    ended = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, check=False)
    assert ended.returncode == 1
    assert (
        ended.stderr == "hwrl: this command needs pytest, which is not installed\n  fix: pip install 'hwrl[testing]'\n"
    )
