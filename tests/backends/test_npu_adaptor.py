"""What must be imported before Megatron on NPUs, with imitated packages in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ADAPTOR = "import sys\nprint('patched with', sys.argv[1:])\n"
BOOTSTRAP = "import hwrl_npu; hwrl_npu.hwrl_bootstrap(framework='megatron')\n"


def run(folder: Path, code: str, *packages: str) -> subprocess.CompletedProcess[str]:
    """Run ``code``, called with arguments, where ``packages`` are installed beside ``megatron.core``."""
    for package in ("megatron", "megatron/core", *packages):
        (folder / package).mkdir(exist_ok=True)
        (folder / package / "__init__.py").write_text(ADAPTOR if package == "megatron_adaptor" else "")
    if "mindspeed" in packages:
        (folder / "mindspeed" / "megatron_adaptor.py").write_text(ADAPTOR)
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), *filter(None, sys.path)])}
    command = [sys.executable, "-c", code, "--steps", "3"]
    return subprocess.run(command, env=env, text=True, capture_output=True, timeout=600, check=False)


@pytest.mark.parametrize("package", ["mindspeed", "megatron_adaptor"])
def test_the_installed_adaptor_is_imported_and_sees_no_arguments(tmp_path: Path, package: str) -> None:
    code = BOOTSTRAP + "import megatron.core, sys; print(sys.argv[1:])"
    ended = run(tmp_path, code, package)
    assert ended.stdout.splitlines() == ["patched with []", "['--steps', '3']"], ended.stderr


def test_without_an_adaptor_the_error_says_what_to_install(tmp_path: Path) -> None:
    ended = run(tmp_path, BOOTSTRAP)
    assert "none of mindspeed, megatron_adaptor is installed" in ended.stderr


def test_an_adaptor_that_does_not_fit_is_told_by_name(tmp_path: Path) -> None:
    """The package ``mindspeed`` of PyPI is a placeholder without the adaptor."""
    (tmp_path / "mindspeed").mkdir()
    (tmp_path / "mindspeed" / "__init__.py").write_text("")
    ended = run(tmp_path, BOOTSTRAP)
    assert "import mindspeed.megatron_adaptor raised ModuleNotFoundError" in ended.stderr
    assert "PyPI has a placeholder" in ended.stderr


def test_other_frameworks_need_nothing(tmp_path: Path) -> None:
    code = BOOTSTRAP.replace("megatron", "transformers") + "import sys; print('torch' in sys.modules)"
    assert run(tmp_path, code, "mindspeed").stdout.strip() == "False"
