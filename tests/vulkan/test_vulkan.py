"""hwrl on a device from PyPI, which nobody of hwrl wrote: torchvulkan. ``make test-stack-vulkan`` installs it.

Mesa's llvmpipe computes on the processor, so no GPU is needed. Two files name its driver, so there are two devices.
"""

from __future__ import annotations

import ctypes.util
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hwrl.run.demo import write_demo
from hwrl.run.report import read_metrics
from tests.support.vulkan import write_vulkan_package

pytestmark = [
    pytest.mark.long(60),
    pytest.mark.skipif(
        importlib.util.find_spec("torchvulkan") is None,
        reason="torchvulkan is not installed: make test-stack-vulkan installs it, in an environment of its own",
    ),
]

HWRL = Path(sys.executable).with_name("hwrl")
DRIVERS = Path("/usr/share/vulkan/icd.d")
INSTALL = "install Vulkan's loader and Mesa's driver for the processor (apt install mesa-vulkan-drivers libvulkan1)"
SMALL = ("train.batch_groups=4", "rollout.n=4", "eval.prompts=8", "goals={}")


@pytest.fixture(scope="module")
def env(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a machine with the package installed, and with two devices of llvmpipe."""
    found = list(DRIVERS.glob("lvp_icd*.json"))
    if not found or ctypes.util.find_library("vulkan") is None:
        pytest.exit(f"{INSTALL}: there is no {DRIVERS}/lvp_icd*.json, or no libvulkan", returncode=2)
    folder = tmp_path_factory.mktemp("vulkan")
    offline = ["--no-deps", "--no-build-isolation", "--no-index", "--no-compile", "--disable-pip-version-check", "-qq"]
    package, site = write_vulkan_package(folder), folder / "site"
    subprocess.run([sys.executable, "-m", "pip", "install", *offline, "--target", site, package], check=True)
    drivers = [folder / "first.json", folder / "second.json"]
    for driver in drivers:
        driver.write_text(found[0].read_text())
    return os.environ | {
        "PYTHONPATH": os.pathsep.join([str(site), *filter(None, sys.path)]),
        "HWRL_BACKEND": "vulkan",
        "VK_DRIVER_FILES": os.pathsep.join(map(str, drivers)),
        "VK_ICD_FILENAMES": os.pathsep.join(map(str, drivers)),  # its name for loaders before 1.3.207
        "OMP_NUM_THREADS": "1",
    }


def hwrl(env: dict[str, str], *words: str) -> str:
    """Run the command and return its output; fail unless it succeeds."""
    ended = subprocess.run([HWRL, *words], env=env, text=True, capture_output=True, timeout=3000, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def test_the_doctor_finds_two_devices_and_says_what_they_lack(env: dict[str, str]) -> None:
    report = json.loads(hwrl(env, "doctor", "--json"))
    assert report["ok"]
    assert report["live"]["device_count"] == 2
    states = {name: state for name, (state, _) in report["live"]["capabilities"].items()}
    assert {states[name] for name in ("streams", "pinned_memory", "collectives", "device_ipc")} == {"unsupported"}
    assert states["memory_stats"] == "unverified"


def test_it_conforms_up_to_collectives_with_fsdp2_on_staged_groups(env: dict[str, str], tmp_path: Path) -> None:
    hwrl(env, "conformance", "vulkan", "--level", "collectives", "--json", str(tmp_path / "report.json"))
    report: dict[str, Any] = json.loads((tmp_path / "report.json").read_text())
    assert (report["backend"], report["device_count"], report["reached"]) == ("vulkan", 2, "collectives")
    outcomes = {check["name"]: check["outcome"] for check in report["checks"]}
    assert outcomes["TestComm::test_the_default_group_is_torchs"] == "passed"


def test_two_ranks_train_twenty_steps_of_the_demo(env: dict[str, str], tmp_path: Path) -> None:
    config = str(write_demo(tmp_path, seed=1, prompts=64))
    said = " ".join(hwrl(env, "train", config, "train.steps=20", "train.ranks=2", *SMALL).split())
    assert "trainer rank 0 on device 0, trainer rank 1 on device 1, replica-0 on device 0" in said
    assert [line["step"] for line in read_metrics(tmp_path / "run")] == list(range(1, 21))
