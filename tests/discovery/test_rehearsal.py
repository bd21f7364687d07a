"""Plugins of other distributions that end, block or deface the process that loads them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hwrl.discovery import Registry, rehearsal
from hwrl.errors import BackendAmbiguousError, BackendLoadError
from tests.support.faulty_packages import installed
from tests.support.plugin_files import SOURCE, install_plugin

HWRL = Path(sysconfig.get_path("scripts")) / "hwrl"
EVIL = "class Evil(Exception):\n    def __str__(self): raise SystemExit(0)\n    __repr__ = __str__\n"


def source(*, at_import: str = "", in_probe: str = "", in_doctor: str = "", reason: str = "it runs") -> str:
    text = SOURCE.format(
        name="faulty", answer="no", reason=reason, evidence=(), rank=0, fallback=False, api=(1, 0)
    ).replace("    return ProbeResult", f"    {in_probe or 'pass'}\n    return ProbeResult")
    return f"{at_import}\n{text}\n@hwrl.hookimpl\ndef hwrl_doctor(context):\n    {in_doctor or 'return []'}\n"


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Path]]:
    monkeypatch.setenv(rehearsal.REHEARSED, "")
    modules, folder = tmp_path / "from", tmp_path / "installed"
    modules.mkdir()
    folder.mkdir()
    stack = []

    def install(text: str) -> Path:
        (modules / "faulty_card.py").write_text(text)
        packages = installed(modules / "faulty_card.py", {"hwrl.backends": "faulty_card"}, folder)
        packages.__enter__()
        stack.append(packages)
        return folder

    yield install
    for packages in stack:
        packages.__exit__(None, None, None)


EXIT = "import os; os._exit(0)"
UNSAFE = {
    "exit at import": (source(at_import=EXIT), "its import ended its process with status 0"),
    "exit in the probe": (source(in_probe=EXIT), "its hwrl_probe ended its process with status 0"),
    "killed at import": (source(at_import="import os; os.kill(os.getpid(), 11)"), "its import ended its process with"),
    "closes the output": (source(at_import="import os; os.close(1)"), "its import changed the standard files"),
    "another directory": (source(in_probe="import os; os.chdir('/')"), "its hwrl_probe changed the current directory"),
    "another umask": (source(at_import="import os; os.umask(0)"), "its import changed the umask"),
    "a timer": (source(at_import="import signal; signal.alarm(9)"), "its import changed the timer"),
    "another choice": (
        source(in_probe="import os; os.environ['HWRL_BACKEND'] = 'faulty'"),
        "its hwrl_probe changed HWRL_BACKEND",
    ),
    "Ctrl-C of its own": (source(in_probe="raise KeyboardInterrupt"), "its hwrl_probe ended its process with status"),
}


@pytest.mark.parametrize("case", UNSAFE)
def test_a_plugin_that_ends_its_process_is_named_and_never_loaded_here(
    install: Callable[[str], Path], case: str
) -> None:
    text, said = UNSAFE[case]
    install(text)
    (failure,) = Registry(env={}).survey().failures
    assert (failure.names, failure.distribution) == (("faulty",), "faulty 1.0")
    assert said in failure.reason
    assert "faulty_card" not in sys.modules


def test_a_plugin_that_ends_its_process_is_an_error_if_it_is_named_and_a_doubt_if_not(
    install: Callable[[str], Path],
) -> None:
    install(source(at_import=EXIT))
    with pytest.raises(BackendAmbiguousError, match="faulty_card, from faulty"):
        Registry(env={}).choose()
    with pytest.raises(BackendLoadError, match="backend 'faulty' cannot be used"):
        Registry(env={"HWRL_BACKEND": "faulty"}).choose()


@pytest.mark.parametrize("where", ["at_import", "in_probe"])
def test_a_plugin_that_hangs_is_given_up(
    install: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.setattr(rehearsal, "LIMIT_S", 1.0)
    install(source(**{where: "import threading; threading.Event().wait()"}))
    (failure,) = Registry(env={}).survey().failures
    assert failure.reason.endswith("did not answer within 1 s: it is too slow or stuck")


def test_a_good_plugin_is_tried_once_in_a_tree_of_processes(install: Callable[[str], Path]) -> None:
    folder = install(source(at_import="print('a banner'); import threading; threading.Thread(target=input).start"))
    for _ in range(2):
        assert Registry(env={}).survey().failures == ()
    assert os.environ[rehearsal.REHEARSED] == "faulty_card/hwrl_probe"
    (folder / "faulty_card.py").write_text("import os; os._exit(3)")  # a child that tried it again would say so
    assert Registry(env={}).survey().failures == ()


@pytest.mark.parametrize("where", ["at_import", "in_probe"])
def test_an_exception_without_a_text_is_reported_by_its_type(install: Callable[[str], Path], where: str) -> None:
    install(
        source(**{where: "raise Evil"}).replace("\n", f"\n{EVIL}", 1) if where == "in_probe" else f"{EVIL}raise Evil"
    )
    survey = Registry(env={}).survey()
    said = [str(item) for item in (*survey.probed, *survey.failures) if "faulty" in str(item)]
    assert len(said) == 1 and "Evil: <Evil; its str raised SystemExit>" in said[0]


def test_texts_of_a_plugin_reach_the_terminal_without_its_control_characters(install: Callable[[str], Path]) -> None:
    install(source(reason="all is\x1b[2J well\nok: the chosen backend can run \u202e" + "x" * 10**6))
    (probed,) = [one for one in Registry(env={}).survey().probed if one.plugin.info.name == "faulty"]
    assert probed.result.reason.startswith("all is\\x1b[2J well ok: the chosen backend can run \\u202exxx")
    assert len(probed.result.reason) < 2100


@pytest.mark.parametrize("chosen", ["", "faulty", "cuad"])
def test_doctor_outlives_every_plugin(install: Callable[[str], Path], chosen: str) -> None:
    text = source(at_import=EXIT) if chosen else source(at_import="print('a banner')", in_doctor=EXIT, in_probe="1 / 0")
    env = os.environ | {"PYTHONPATH": str(install(text)), "HWRL_BACKEND": chosen, "HWRL_CASE": "a\x1b[2J"}
    ended = subprocess.run([HWRL, "doctor"], env=env, text=True, capture_output=True, timeout=120, check=False)
    assert ended.returncode == 1, ended.stderr
    assert "faulty_card" in ended.stdout and "ended its process with status 0" in ended.stdout
    assert "\x1b" not in ended.stdout and "NOT ok" in ended.stdout
    assert "\nchosen: none\n" in ended.stdout
    if not chosen:  # the plugin prints a banner
        as_json = subprocess.run([HWRL, "doctor", "--json"], env=env, capture_output=True, timeout=120, check=False)
        assert json.loads(as_json.stdout)["chosen"] is None


def test_help_outlives_a_plugin_that_ends_its_process(tmp_path: Path) -> None:
    install_plugin(tmp_path, "quits", source=EXIT)
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    ended = subprocess.run([HWRL, "--help"], env=env, text=True, capture_output=True, timeout=120, check=False)
    assert "doctor" in ended.stdout
    assert "its import ended its process with status 0" in ended.stderr
