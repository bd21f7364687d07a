"""Packages of ``hwrl new-backend``, ``new-engine`` and ``new-transport`` install and pass the kit as they are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

import hwrl
from hwrl.cli import main
from hwrl.testing import Kind, Level, find_subject
from hwrl.testing.conformance import TrainRanksContract, run_kit
from hwrl.testing.contracts.train_engine import engine_settings
from tests.support.vulkan import EDITS, write_vulkan_package

COMMANDS = {
    "acme": ["new-backend", "acme"],
    "acme-roll": ["new-engine", "acme-roll"],
    "acme-train": ["new-engine", "acme-train", "--kind", "train"],
    "acme-wire": ["new-transport", "acme-wire"],
}
SITE = "import sysconfig; print(sysconfig.get_path('purelib'))"
COMMAND = "import sys; from hwrl.cli import main; sys.exit(main())"
RUFF = ["--isolated", "--line-length", "120", "--select", "E,F,W,B,UP,C4,SIM,RUF"]


@pytest.fixture(scope="session")  # once in a process: an imported package is in the way of a new one of its name
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the four packages."""
    folder = tmp_path_factory.mktemp("packages")
    for words in COMMANDS.values():
        assert main([*words, "--into", str(folder)]) == 0
    return folder


@pytest.fixture(scope="session")
def python(written: Path) -> Path:
    """The interpreter of an environment over this one, with the packages installed by pip."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", written / "venv"], check=True)
    fresh = written / "venv" / "bin" / "python"
    site = Path(subprocess.run([fresh, "-c", SITE], text=True, capture_output=True, check=True).stdout.strip())
    (site / "over.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    packages = [str(written / f"hwrl-{name}") for name in COMMANDS]
    offline = ["--no-deps", "--no-build-isolation", "--no-index", "--no-compile", "--disable-pip-version-check", "-qq"]
    subprocess.run([sys.executable, "-m", "pip", "--python", fresh, "install", *offline, *packages], check=True)
    return fresh


def run(python: Path, words: Sequence[str], **env: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if name != "HWRL_BACKEND"}
    env = clean | {"OMP_NUM_THREADS": "1"} | env
    return subprocess.run(
        [python, *words], env=env, cwd=python.parents[2], text=True, capture_output=True, check=False, timeout=2800
    )


def conformance(python: Path, name: str, level: str, **env: str) -> dict[str, object]:
    report = python.parents[2] / f"{name}.json"
    ended = run(python, ["-c", COMMAND, "conformance", name, "--level", level, "--json", str(report)], **env)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found: dict[str, object] = json.loads(report.read_text())
    return found


@pytest.mark.long(15)
def test_a_new_backend_passes_compute_and_device_untouched(python: Path) -> None:
    report = conformance(python, "acme", "device", HWRL_BACKEND="acme")
    assert (report["kind"], report["backend"], report["reached"]) == ("backend", "acme", "device")


@pytest.fixture
def installed_here(python: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same installed packages, in this process: it has imported torch already."""
    (site,) = (python.parents[1] / "lib").glob("python*/site-packages")
    monkeypatch.syspath_prepend(str(site))


def test_a_new_transport_passes_every_check_untouched(installed_here: None) -> None:
    report = run_kit(find_subject("acme-wire"), backend=hwrl.get_backend(), level=Level.ROLLOUT)
    assert (report.subject.kind, report.reached) == (Kind.TRANSPORT, Level.ROLLOUT)
    assert {check.outcome for check in report.checks} == {"passed"}


@pytest.mark.parametrize("name, kind", [("acme-roll", Kind.ROLLOUT_ENGINE), ("acme-train", Kind.TRAIN_ENGINE)])
def test_a_new_engine_computes_right_untouched(name: str, kind: Kind, installed_here: None) -> None:
    report = run_kit(find_subject(name), backend=hwrl.get_backend(), level=Level.COMPUTE)
    assert (report.subject.kind, report.reached) == (kind, Level.COMPUTE)


@pytest.mark.extended  # two processes, each with a model
def test_two_ranks_of_a_new_train_engine_take_the_steps_of_one(installed_here: None) -> None:
    try:
        TrainRanksContract().test_two_ranks_take_the_steps_of_one(hwrl.get_backend(), find_subject("acme-train"))
    except pytest.skip.Exception as skipped:
        pytest.fail(f"the kit skips two ranks: {skipped}")


def test_a_new_train_engines_export_changes_nothing(installed_here: None, tmp_path: Path) -> None:
    """Its parameters are float32, whatever dtype the exported model has."""
    engine = find_subject("acme-train").make_train_engine(
        engine_settings(dtype=torch.bfloat16), backend=hwrl.get_backend()
    )
    before = {name: tensor.clone() for name, tensor in engine.state_dict()["model"].items()}
    engine.export(tmp_path)
    assert all(tensor.equal(before[name]) for name, tensor in engine.state_dict()["model"].items())
    assert {tensor.dtype for tensor in load_file(tmp_path / "model.safetensors").values()} == {torch.bfloat16}


@pytest.mark.extended  # the levels above, with a short run of `hwrl train`; ci/wheel always runs the first
@pytest.mark.parametrize("name, backend", [("acme", "acme"), ("acme-roll", "cpu"), ("acme-train", "cpu")])
def test_what_is_new_passes_every_level_untouched(name: str, backend: str, python: Path) -> None:
    assert conformance(python, name, "full", HWRL_BACKEND=backend)["reached"] == "full"


def test_the_tests_in_the_packages_are_collected(written: Path, python: Path) -> None:
    tests = [str(written / f"hwrl-{name}" / "tests") for name in COMMANDS]
    alone = ["-p", "no:cacheprovider", "--import-mode=importlib", "-c", os.devnull, "--rootdir", str(written)]
    ended = run(python, ["-m", "pytest", "--collect-only", "-q", "-W", "error", *alone, *tests])
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert all(f"hwrl-{name}/tests/test_conformance.py::Test" in ended.stdout for name in COMMANDS)


def test_the_tests_in_a_new_backend_run_without_a_variable(written: Path, python: Path) -> None:
    tests = written / "hwrl-acme" / "tests" / "test_conformance.py"
    alone = ["-p", "no:cacheprovider", "--import-mode=importlib", "-c", os.devnull, "--rootdir", str(written)]
    ended = run(python, ["-m", "pytest", "-q", "-k", "TestCapability", *alone, str(tests)])
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_the_new_backend_is_not_chosen_by_detection(python: Path) -> None:
    """It computes on the host only where HWRL_BACKEND asks for it."""
    report = json.loads(run(python, ["-c", COMMAND, "doctor", "--json"]).stdout)
    (acme,) = [one for one in report["backends"] if one["name"] == "acme"]
    assert (acme["answer"], acme["reason"]) == (
        "no",
        "torch_acme is not installed; HWRL_BACKEND=acme would ask for the host",
    )


def test_the_packages_are_clean_and_say_which_interface_they_were_written_for(written: Path) -> None:
    pytest.importorskip("ruff", reason="ruff comes with hwrl[dev]")
    for arguments in (["check", *RUFF], ["format", "--isolated", "--line-length", "120", "--check"]):
        command = [sys.executable, "-m", "ruff", *arguments, *(str(written / f"hwrl-{name}") for name in COMMANDS)]
        ended = subprocess.run(command, text=True, capture_output=True, check=False)
        assert ended.returncode == 0, ended.stdout
    assert "api=(1, 0)," in (written / "hwrl-acme" / "hwrl_acme" / "__init__.py").read_text()


def test_the_written_ci_may_only_read(written: Path) -> None:
    for name in COMMANDS:
        workflow = (written / f"hwrl-{name}" / ".github" / "workflows" / "conformance.yml").read_text()
        assert yaml.safe_load(workflow)["permissions"] == {"contents": "read"}


def test_the_example_for_a_device_from_pypi_changes_few_lines_of_what_is_written(tmp_path: Path) -> None:
    package = write_vulkan_package(tmp_path)
    assert sum(map(len, EDITS.values())) <= 30
    for file in EDITS:
        compile((package / file).read_text(), file, "exec")


@pytest.mark.parametrize("name", ["", "Acme", "2x", "a b", "../acme", "acme-", "a--b", "a" * 41, "é"])
def test_a_malformed_name_is_refused(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new-backend", name, "--into", str(tmp_path)]) == 1
    assert "cannot be the name of a backend" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "words, owner",
    [
        (["new-backend", "cpu"], "a backend 'cpu' is installed"),
        (["new-engine", "embedded"], "a rollout-engine 'embedded' is installed"),
        (["new-transport", "host"], "a transport 'host' is installed"),
        (["new-engine", "cpu"], "a package hwrl_cpu is installed"),
        (["new-transport", "vllm"], "a package hwrl_vllm is installed"),
    ],
)
def test_a_taken_name_is_refused(
    words: list[str], owner: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "--into", str(tmp_path)]) == 1
    assert owner in capsys.readouterr().err


def test_what_exists_is_never_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "hwrl-acme").mkdir()
    (tmp_path / "hwrl-acme" / "mine").write_text("kept")
    (tmp_path / "file").write_text("kept")
    for into in (tmp_path, tmp_path / "file"):
        assert main(["new-backend", "acme", "--into", str(into)]) == 1
        assert "cannot write" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "hwrl-acme").iterdir()] == ["mine"]
