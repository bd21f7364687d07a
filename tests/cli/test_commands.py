"""Subcommands of plugins that are installed like a stranger's, from another distribution."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hwrl import __version__
from hwrl.cli.commands import BUILT_IN, Commands
from tests.support.plugin_files import install_plugin

PAGE = Path(__file__).parents[2] / "docs" / "hooks.md"
COMMAND = """
import hwrl
from hwrl.interfaces import Command

def run(args):
    print("ran {name}", args.times)
    return 3

@hwrl.hookimpl
def hwrl_commands():
    return [Command("{name}", "say {name}", lambda parser: parser.add_argument("--times", type=int), run)]
"""
BAD = COMMAND.format(name="bad")
FAULTS = {
    "broken": (
        "import a_framework_that_is_not_there",
        "ModuleNotFoundError: No module named 'a_framework_that_is_not_there'",
    ),
    "exiting": ("import sys; sys.exit(0)", "SystemExit: 0"),
    "misspelt": (BAD.replace("def hwrl_commands", "def hwrl_comands"), "unknown hook 'hwrl_comands'"),
    "raising": (
        BAD.replace("return [", "raise OSError('no disk')\n    return ["),
        "its hwrl_commands raised OSError: no disk",
    ),
    "wrong": (BAD.replace("return [", "return ['greet'] or ["), "its answer[0] is 'greet', not of type Command"),
    "built_in": (COMMAND.format(name="doctor"), "hwrl itself has a command of this name: doctor"),
    "twice": (
        BAD.replace('lambda parser: parser.add_argument("--times", type=int), run)]', "print, run)] * 2"),
        "it adds several commands of this name: bad",
    ),
    "nameless": (COMMAND.format(name=""), "a letter or digit first, not ''"),
    "option": (COMMAND.format(name="-x"), "a letter or digit first, not '-x'"),
    "space": (COMMAND.format(name="a b"), "a letter or digit first, not 'a b'"),
}


def hwrl(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), *filter(None, sys.path)])}
    code = "import sys; from hwrl.cli import main; sys.exit(main())"
    return subprocess.run([sys.executable, "-c", code, *words], env=env, text=True, capture_output=True, check=False)


def test_a_plugins_command_is_listed_takes_arguments_and_runs(tmp_path: Path) -> None:
    install_plugin(tmp_path, "greeting", source=COMMAND.format(name="greet"))
    listed = hwrl(tmp_path, "--help")
    assert re.search(r"^ +greet +say greet$", listed.stdout, re.MULTILINE) and not listed.stderr
    assert all(f" {name} " in listed.stdout for name in (*BUILT_IN, "report"))
    ran = hwrl(tmp_path, "greet", "--times", "2")
    assert (ran.returncode, ran.stdout, ran.stderr) == (3, "ran greet 2\n", "")
    refused = hwrl(tmp_path, "greet", "--times", "two")
    assert refused.returncode == 2 and "argument --times: invalid int value" in refused.stderr


def test_a_percent_sign_in_a_help_is_shown(tmp_path: Path) -> None:
    install_plugin(tmp_path, "greeting", source=COMMAND.format(name="greet").replace("say", "100% of %(prog)s: say"))
    listed = hwrl(tmp_path, "--help")
    assert listed.returncode == 0 and "100% of %(prog)s: say greet\n" in listed.stdout, listed.stderr


def test_the_example_in_the_docs_works(tmp_path: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)
    (example,) = [block for block in blocks if "def hwrl_commands" in block]
    install_plugin(tmp_path, "devices", source=example)
    ran = hwrl(tmp_path, "devices", "--memory")
    assert ran.returncode == 0 and re.fullmatch(r"cpu: \d+ devices\n\d+ bytes free\n", ran.stdout), ran.stderr


def test_plugins_that_fail_are_reported_and_the_other_commands_work(tmp_path: Path) -> None:
    for name, (source, _) in FAULTS.items():
        install_plugin(tmp_path, name, source=source)
    install_plugin(tmp_path, "greeting", source=COMMAND.format(name="greet"))
    listed = hwrl(tmp_path, "--help")
    assert listed.returncode == 0 and " greet " in listed.stdout and " report " in listed.stdout
    ran = hwrl(tmp_path, "greet")
    assert ran.returncode == 3
    for name, (_, reason) in FAULTS.items():
        for told in (listed.stderr, ran.stderr):
            (line,) = [line for line in told.splitlines() if re.search(rf"\b{name}\b.* \(|'{name}'", line)]
            assert reason in line


def test_two_plugins_that_claim_a_name_are_an_error_with_both(tmp_path: Path) -> None:
    for name in ("first", "second"):
        install_plugin(tmp_path, name, source=COMMAND.format(name="greet"))
    install_plugin(tmp_path, "other", source=COMMAND.format(name="wave"))
    both = "the plugins first and second all add the command 'greet'"
    refused = hwrl(tmp_path, "greet")
    assert refused.returncode == 1 and both in refused.stderr
    listed = hwrl(tmp_path, "--help")
    assert listed.returncode == 0 and both in listed.stderr and not re.search("^ +greet ", listed.stdout, re.MULTILINE)
    assert hwrl(tmp_path, "wave").returncode == 3


def test_a_built_in_command_imports_no_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = install_plugin(tmp_path, "greeting", source=COMMAND.format(name="greet"))
    monkeypatch.syspath_prepend(str(tmp_path))
    commands = Commands()
    assert commands.find("train") is not None and module not in sys.modules
    assert commands.find("greet") is not None and module in sys.modules


def test_the_version_is_printed_without_any_plugin(tmp_path: Path) -> None:
    install_plugin(tmp_path, "failing", source="import os\nos._exit(7)\n")
    printed = hwrl(tmp_path, "--version")
    assert (printed.returncode, printed.stdout, printed.stderr) == (0, f"hwrl {__version__}\n", "")


def test_two_names_of_one_plugin_give_its_commands_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = install_plugin(tmp_path, "greeting", source=COMMAND.format(name="greet"))
    entry_points = tmp_path / "stranger_greeting-1.0.dist-info" / "entry_points.txt"
    entry_points.write_text(f"[hwrl.plugins]\ngreeting = {module}\nhello = {module}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    commands = Commands()
    assert [command.name for command in commands.all()].count("greet") == 1 and not commands.problems
