"""The command line of ``hwrl bench``: its options, and its errors before anything is measured."""

from __future__ import annotations

import subprocess
import sys

import pytest

from hwrl.cli import main
from hwrl_bench.command import BENCHMARKS


def test_overrides_of_a_benchmark_may_follow_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "async", "train.stepz=1", "--rounds", "4", "dirr=2"]) == 1
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
        ("offload --gib nan", "argument --gib: it must be a number above 0, and is 'nan'"),
        ("overhead --calls 0", "argument --calls: it must be a whole number above 0, and is '0'"),
        ("train --ways hwrl@0", "argument --ways: it must be a whole number above 0, and is '0'"),
        ("train --peak-tflops nan", "argument --peak-tflops: it must be a number above 0, and is 'nan'"),
        ("weights --receivers 0", "argument --receivers: it must be a whole number above 0, and is '0'"),
        ("weights --mib -4", "argument --mib: it must be a whole number above 0, and is '-4'"),
        ("weights --buckets two", "argument --buckets: it must be a whole number above 0, and is 'two'"),
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


def test_the_help_lists_every_benchmark_and_imports_no_torch() -> None:
    code = "import hwrl.cli, sys\ntry: hwrl.cli.main(['bench', '--help'])\nexcept SystemExit: pass\n"
    code += "print({'torch', 'numpy', 'ray', 'transformers', 'pydantic'} & set(sys.modules))"
    printed = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, check=True).stdout
    assert all(f"    {name} " in printed for name in BENCHMARKS) and printed.endswith("set()\n")
