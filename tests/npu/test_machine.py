"""What ``hwrl doctor`` says on a machine with NPUs: which backend is chosen, and what is wrong with the environment."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import pytest

HWRL = Path(sysconfig.get_path("scripts")) / "hwrl"
TROUBLES = {
    "both allocator settings": (
        {"PYTORCH_ALLOC_CONF": "", "PYTORCH_NPU_ALLOC_CONF": ""},
        "PYTORCH_NPU_ALLOC_CONF and PYTORCH_ALLOC_CONF are both set",
        "unset PYTORCH_ALLOC_CONF",
    ),
    "descending devices": (
        {"ASCEND_RT_VISIBLE_DEVICES": "1,0"},
        "ASCEND_RT_VISIBLE_DEVICES='1,0' shows no device",
        "set ASCEND_RT_VISIBLE_DEVICES=0,1",
    ),
}


def doctor(**env: str) -> dict[str, Any]:
    command = [str(HWRL), "doctor", "--json"]
    ended = subprocess.run(command, env=os.environ | env, text=True, capture_output=True, timeout=1200, check=False)
    report: dict[str, Any] = json.loads(ended.stdout)
    assert ended.returncode == (0 if report["ok"] else 1), ended.stderr
    return report


def test_npus_are_detected_and_run_and_only_visible_ones_are_counted() -> None:
    report = doctor(HWRL_BACKEND="", ASCEND_RT_VISIBLE_DEVICES="1,3")
    assert (report["chosen"], report["ok"]) == ("npu", True), report
    assert report["why"].startswith("detected; npu says yes: 4 NPU device files")
    assert report["live"]["device_count"] == 2


@pytest.mark.parametrize("trouble", TROUBLES)
def test_a_wrong_environment_is_named_with_its_remedy_and_stops_torch_npu(trouble: str) -> None:
    env, said, fix = TROUBLES[trouble]
    report = doctor(**env)
    assert not report["ok"]
    (npu,) = [backend for backend in report["backends"] if backend["name"] == "npu"]
    (error,) = [finding for finding in npu["findings"] if finding["level"] == "error"]
    assert said in error["message"]
    assert error["fix"] == fix
    assert not report["live"]["ok"], "the vendor's library accepts it: doctor need not call it an error"


def test_a_torch_npu_without_cann_is_named_with_its_remedy(tmp_path: Path) -> None:
    spec = importlib.util.find_spec("torch_npu")
    assert spec is not None and spec.origin is not None
    # Its libraries look for CANN beside the folder that they lie in: a folder of links has the simulated one not there.
    shutil.copytree(Path(spec.origin).parent, tmp_path / "torch_npu", copy_function=os.symlink)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    report = doctor(PYTHONPATH=path)
    assert not report["ok"]
    assert "cannot open shared object file" in report["live"]["why"]
    assert "source CANN's set_env.sh" in report["live"]["why"]
