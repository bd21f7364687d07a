"""hwrl names no framework: plugins bring them, through hooks. The packages that hwrl depends on are no frameworks."""

from __future__ import annotations

import re

import pytest

from tests.support.sources import CORE, place

FRAMEWORK = re.compile(
    r"(?i:vllm|megatron|checkpoint[-_ ]?engine|deepspeed|openrlhf|sglang|mindspeed|nemo[-_ ]?rl)"
    r"|(?<![A-Za-z])(?i:verl|trl|slime|nemo)(?![a-z])"
    r"|(?:Verl|Slime|Nemo)(?![a-z])"
)


@pytest.mark.parametrize(
    "line",
    [
        "import vllm",
        "vLLM's own",
        "class MyVerlEngine:",
        "checkpoint-engine",
        "CheckpointEngine",
        "TRL",
        "NeMo-RL",
        "verl_dir",
    ],
)
def test_the_search_for_frameworks_finds_them(line: str) -> None:
    assert FRAMEWORK.search(line)


@pytest.mark.parametrize("line", ["overlap", "several", "Ctrl-C", "control", "the checkpoint of an engine", "nemotron"])
def test_the_search_for_frameworks_finds_nothing_else(line: str) -> None:
    assert not FRAMEWORK.search(line)


def test_the_core_names_no_framework() -> None:
    found = [
        f"{place(path, number)} {match.group()}"
        for path in CORE
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if (match := FRAMEWORK.search(line))
    ]
    assert not found, "move the code to a plugin, and a fact for users to docs/"
