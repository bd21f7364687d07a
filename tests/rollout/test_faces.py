"""What hwrl.rollout and hwrl.train export: every name exists, and importing the package costs nothing."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType

import pytest

import hwrl.rollout
import hwrl.train

PACKAGES = [hwrl.rollout, hwrl.train]


@pytest.mark.parametrize("package", PACKAGES)
def test_every_exported_name_exists(package: ModuleType) -> None:
    assert sorted(package.__all__) == sorted(set(package.__all__)) == dir(package)
    assert all(getattr(package, name) is not None for name in package.__all__)
    with pytest.raises(AttributeError, match="no attribute 'missing'"):
        package.missing  # noqa: B018 - reading it is the test


def test_the_packages_and_their_light_parts_import_no_torch() -> None:
    code = (
        "import sys, hwrl.rollout, hwrl.train\n"
        "from hwrl.rollout import PromptLedger, check_prompts, load_reward\n"
        "from hwrl.train import LossName\n"
        "print({'torch', 'transformers', 'ray'} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, check=True).stdout == "set()\n"
