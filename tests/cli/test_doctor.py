from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hwrl.cli import livecheck
from tests.support.card import CARD, HOST, doctor, install

BLIND = (
    "from torch.nn import functional as f; right = f.scaled_dot_product_attention; "
    "f.scaled_dot_product_attention = lambda *parts, **settings: right(*parts, **settings) * 0 + 1; "
)
MUTE = (
    "from hwrl.interfaces import Capability, Support; import hwrl_cpu\n"
    "    answers = lambda one: Support('unsupported' if one is Capability.COLLECTIVES else 'supported', 'so it is')\n"
    "    backend = hwrl_cpu.CpuBackend(hwrl_backend_info()); backend.supports = answers; return backend"
)
UNKNOWN = "cuad"  # no backend has this name: the report is whole, but for the live check, which takes seconds


def report(*, folder: Path | None = None, choose: str = "", status: int) -> dict[str, Any]:
    ended = doctor("--json", folder=folder, choose=choose)
    assert ended.returncode == status, ended.stderr
    found: dict[str, Any] = json.loads(ended.stdout)
    assert found["ok"] is (status == 0)
    return found


def test_the_text_shows_every_backend_with_its_reason_and_what_a_lack_of_collectives_means(tmp_path: Path) -> None:
    install(tmp_path, create=MUTE)
    ended = doctor(folder=tmp_path, choose="card")
    assert ended.returncode == 0, ended.stdout
    for part in ("chosen: card", "every machine has a CPU", "/dev/nvidia", "/dev/davinci", "names: ascend, npu"):
        assert part in ended.stdout
    assert re.search(r"peak in bfloat16 +unknown: a run reports no MFU\n.*fused operations +none\n", ended.stdout)
    live = ended.stdout.partition("live check of card\n")[2].partition("\n\n")[0].splitlines()
    assert all(re.fullmatch(r"  .{24} \S.*", line) for line in live), "names and answers each have a column"
    assert re.search(r"collectives +unsupported +so it is", ended.stdout)
    assert re.search(r"groups of processes +staged through the host", ended.stdout)


def test_a_misspelt_name_fails_with_a_suggestion() -> None:
    ended = doctor(choose="cuad")
    assert ended.returncode == 1
    assert "did you mean 'cuda'?" in ended.stdout
    assert "did you mean 'cuda'?" in report(choose="cuad", status=1)["fix"]


@pytest.mark.skipif(bool(list(Path("/dev").glob("nvidia[0-9]*"))), reason="this machine has a GPU")
def test_a_backend_without_its_device_fails_with_the_probes_reason() -> None:
    assert "there is no /dev/nvidia" in report(choose="cuda", status=1)["why"]


def test_a_package_from_elsewhere_is_found_and_chosen(tmp_path: Path) -> None:
    install(tmp_path)
    found = report(folder=tmp_path, status=0)
    assert found["chosen"] == "card"
    (card,) = [backend for backend in found["backends"] if backend["name"] == "card"]
    assert card["distribution"] == "hwrl-card 3.1"
    assert card["evidence"] == ["/dev/card0"]
    assert card["findings"] == [{"level": "warning", "message": "the firmware is old", "fix": "flash it"}]


def test_the_versions_of_the_vendors_packages_are_shown(tmp_path: Path) -> None:
    install(tmp_path)
    with (tmp_path / "hwrl_card-3.1.dist-info" / "METADATA").open("a") as file:
        file.write("Requires-Dist: card-runtime>=4\nRequires-Dist: no-such-thing\n")
    for name, version, points in (
        ("card-runtime", "4.2", ""),
        ("torch-card", "2.13.1", "[torch.backends]\ncard = gc:collect\n"),
    ):
        folder = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (folder / "entry_points.txt").write_text(points)
    versions = report(folder=tmp_path, choose=UNKNOWN, status=1)["versions"]
    shown = {name: versions[name] for name in ("card-runtime", "torch-card", "no-such-thing")}
    assert shown == {"card-runtime": "4.2", "torch-card": "2.13.1", "no-such-thing": "not installed"}


def test_a_plugin_that_cannot_be_imported_is_shown_and_refuses_the_fallback(tmp_path: Path) -> None:
    install(tmp_path, source="import no_such_driver")
    found = report(folder=tmp_path, status=1)
    (failure,) = found["load_failures"]
    assert failure["names"] == ["card"]
    assert "no_such_driver" in failure["reason"]
    assert found["chosen"] is None
    assert "no_such_driver" in found["why"]


@pytest.mark.parametrize(
    ("create", "said"),
    [
        ("raise OSError('no firmware')", "OSError: no firmware"),
        ("import os; os.write(2, b'driver panic'); os.abort()", "driver panic"),
        (HOST.replace("return ", "b = ") + "; b.device_count = lambda: 0; return b", "sees no device"),
        (BLIND + HOST, "the gradient of query in torch.float32 is off by"),
        (HOST.replace("return ", "b = ") + "; b.pinned_empty = lambda n: __import__('torch').empty(n); return b", ""),
    ],
    ids=["raises", "kills the process", "no device", "wrong attention", "wrong memory"],
)
def test_a_chosen_backend_that_cannot_run_fails_and_says_why(tmp_path: Path, create: str, said: str) -> None:
    install(tmp_path, create="print('vendor banner'); " + create)
    found = report(folder=tmp_path, choose="card", status=1)
    assert found["live"]["ok"] is False
    assert said in found["live"]["why"] != ""


def test_an_error_that_the_backend_finds_fails_the_check(tmp_path: Path) -> None:
    install(tmp_path, level="error")
    assert report(folder=tmp_path, choose="card", status=1)["live"]["ok"] is True


def test_a_faulty_doctor_hook_does_not_stop_doctor(tmp_path: Path) -> None:
    install(tmp_path, source=CARD.replace("yield Finding", "raise KeyError('slot')\n    yield Finding"))
    (card,) = [b for b in report(folder=tmp_path, choose=UNKNOWN, status=1)["backends"] if b["name"] == "card"]
    assert "KeyError: 'slot'" in card["findings"][0]["message"]


def test_a_backend_that_runs_is_ok_and_what_another_plugin_does_wrong_is_shown(tmp_path: Path) -> None:
    install(tmp_path, source=CARD.replace("yield Finding", "raise SystemExit(0)\n    yield Finding"), probe="None")
    (tmp_path / "hwrl_quits.py").write_text("import sys\nsys.exit(0)\n")
    with (tmp_path / "hwrl_card-3.1.dist-info" / "entry_points.txt").open("a") as file:
        file.write("quits = hwrl_quits\n")
    found = report(folder=tmp_path, choose="cpu", status=0)
    assert found["chosen"] == found["environment"]["HWRL_BACKEND"] == "cpu"
    assert found["live"]["device_count"] == 1
    assert found["live"]["capabilities"]["pinned_memory"][0] == "supported"
    assert found["versions"]["torch"] == importlib.metadata.version("torch")
    (card,) = [backend for backend in found["backends"] if backend["name"] == "card"]
    assert card["answer"] == "unknown"
    assert "its hwrl_probe gave a wrong answer: it is None" in card["reason"]
    assert [found["message"] for found in card["findings"]] == ["hwrl_doctor of hwrl_card raised SystemExit: 0"]
    assert [failure["reason"] for failure in found["load_failures"]] == ["SystemExit: 0"]


def test_a_finding_that_is_none_is_shown_in_words(tmp_path: Path) -> None:
    install(tmp_path, source=CARD.replace("yield Finding", "yield 'the slot is dusty'\n    yield Finding"), level="bad")
    found = report(folder=tmp_path, choose=UNKNOWN, status=1)
    (card,) = [backend for backend in found["backends"] if backend["name"] == "card"]
    assert [found["message"].partition("wrong answer: ")[2] for found in card["findings"]] == [
        "a finding is 'the slot is dusty', not of type Finding",
        "level is 'bad', not one of 'info', 'warning', 'error'",
    ]


def test_a_driver_that_hangs_is_killed_and_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, create="import threading; threading.Event().wait()")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("HWRL_TIMEOUT_SCALE", "0.5")
    found = livecheck.check("card", timeout_s=2.0)
    why = "the check did not end within 1 s, and was killed: it is too slow or stuck"
    assert found == {"ok": False, "slow": True, "why": why}


def test_doctor_imports_no_torch_into_its_own_process() -> None:
    code = "import sys; from hwrl.cli import main; main(['doctor']); assert 'torch' not in sys.modules"
    env = os.environ | {"HWRL_BACKEND": "cuad"}
    assert subprocess.run([sys.executable, "-c", code], env=env, stdout=subprocess.DEVNULL, check=False).returncode == 0
