"""Importing hwrl.rollout or hwrl.train costs nothing, and neither do their parts that need no torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

import hwrl.rollout


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'missing'"):
        hwrl.rollout.missing  # noqa: B018 - reading it is the test


def test_the_packages_and_their_light_parts_import_no_torch() -> None:
    code = (
        "import sys, hwrl.rollout, hwrl.train\n"
        "from hwrl.rollout import PromptLedger, check_prompts, load_reward\n"
        "from hwrl.train import LossName\n"
        "print({'torch', 'transformers', 'ray'} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, check=True).stdout == "set()\n"
