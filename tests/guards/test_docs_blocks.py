"""Every printed block of every page is of use: names exist, configurations load, commands parse. Nothing runs here.

Tests of the parts run the blocks of Python; :data:`RUN_BY` names them.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

import hwrl.cli
from hwrl.cli.commands import Commands
from hwrl.run.config import load_config

REPO = Path(__file__).parents[2]
PAGES = [REPO / "README.md", REPO / "CONTRIBUTING.md", REPO / "plugins/README.md", *sorted(REPO.glob("docs/**/*.md"))]
RECIPES = REPO / "plugins/hwrl_recipes/recipes"
LEAST = {"dir": "run", "model": {"path": "m"}, "data": {"train": "t.jsonl"}, "reward": {"function": "m:f"}}
RUN_BY: dict[str, tuple[int, str]] = {
    "README.md": (1, "guards/test_docs_examples.py"),
    "agents.md": (1, "support/trained_agents.py"),
    "algorithms.md": (2, "guards/test_docs_examples.py"),
    "backends.md": (2, "testing/test_documented_backend.py"),
    "checkpoints.md": (3, "guards/test_docs_examples.py"),
    "comm.md": (1, "weights/test_docs.py"),
    "conformance.md": (1, "testing/test_kit_docs.py"),
    "data.md": (1, "rollout/test_data_sets.py"),
    "engines.md": (1, "testing/test_kit_docs.py"),
    "hooks.md": (15, "guards/test_docs.py cli/test_commands.py"),  # 14 signatures, and a plugin
    "megatron.md": (1, "plugins/megatron/test_sharded.py"),
    "memory.md": (1, "guards/test_docs_examples.py"),
    "parts.md": (1, "guards/test_docs_examples.py"),
    "report.md": (1, "run/report/test_trackers.py"),
    "rewards.md": (4, "rollout/test_reward_calls.py plugins/judge/test_judge.py"),
    "stacks.md": (1, "plugins/torchtitan/test_page.py"),
    "staleness.md": (1, "guards/test_docs_examples.py"),
    "trl.md": (2, "plugins/trl/test_trainer.py plugins/trl/test_server.py"),
    "vllm.md": (2, "plugins/vllm/vllm_server.py rollout/test_embedded_engine.py"),
    "watching.md": (1, "rollout/test_tracing.py"),
    "weights.md": (7, "weights/test_docs.py"),
    "workflows.md": (1, "rollout/test_workflow.py"),
}
"""How many blocks of Python a page has, and the tests that run them as printed."""
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPO)))


def blocks(page: Path, *languages: str) -> list[str]:
    """Return the fenced blocks of the page in one of the languages."""
    found = re.findall(r"^ *```(\w*)\n(.*?)^ *```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return [block for language, block in found if language in languages]


# -- Python ---------------------------------------------------------------------------------------------------------


def imported(block: ast.Module) -> dict[str, Any]:
    """Return hwrl's names that the block imports, with what they mean."""
    names: dict[str, Any] = {}
    for node in ast.walk(block):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("hwrl"):
                    module = importlib.import_module(alias.name)
                    names[alias.asname or "hwrl"] = module if alias.asname else importlib.import_module("hwrl")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hwrl"):
            names |= {alias.asname or alias.name: member(node.module, alias.name) for alias in node.names}
    return names


def member(module: str | None, name: str) -> Any:
    """Return what ``from module import name`` gives; None for a plugin's, whose source has it: frameworks are large."""
    module = str(module)
    if module.startswith("hwrl_"):
        spec = find_spec(module)
        assert spec and spec.origin and re.search(rf"\b{name}\b", Path(spec.origin).read_text()), f"{module}.{name}"
        return None
    loaded = importlib.import_module(module)
    return getattr(loaded, name) if hasattr(loaded, name) else importlib.import_module(f"{module}.{name}")


def meaning(node: ast.expr, names: dict[str, Any]) -> Any:
    """Return the module, class or function that the expression names, or None; AttributeError: it has no such name."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute):
        owner = meaning(node.value, names)
        return getattr(owner, node.attr) if isinstance(owner, ModuleType | type) else None
    return None


def unknown_keywords(call: ast.Call, names: dict[str, Any]) -> set[str]:
    """Return the keywords of the call that its function does not take, if it is one of hwrl's."""
    function = meaning(call.func, names)
    if not (inspect.isfunction(function) or inspect.isclass(function)):
        return set()
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return set()
    return {keyword.arg for keyword in call.keywords if keyword.arg} - set(parameters)


def check_python(block: str) -> None:
    """Raise an error if the block is no Python, or names something of hwrl that does not exist."""
    try:
        tree = ast.parse(block)
    except SyntaxError:
        tree = ast.parse(f"def {block.strip()}: ...")  # a signature, as on the page on hooks
    names = imported(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            meaning(node, names)
        elif isinstance(node, ast.Call):
            assert not (unknown := unknown_keywords(node, names)), f"line {node.lineno}: no argument {unknown}"


@every_page
def test_python_names_what_exists(page: Path) -> None:
    for block in blocks(page, "python"):
        check_python(block)


def test_every_block_of_python_runs_in_a_test() -> None:
    counts = {page.name: len(blocks(page, "python")) for page in PAGES if page.parent.name != "plugins"}
    printed = {name: count for name, count in counts.items() if count}
    assert printed == {name: count for name, (count, _) in RUN_BY.items()}, "add a test that runs it, and say so here"
    for page, (_, tests) in RUN_BY.items():
        for test in tests.split():
            assert page in (REPO / "tests" / test).read_text(encoding="utf-8"), f"tests/{test} does not read {page}"


@pytest.mark.parametrize(
    "wrong",
    [
        "x = (",
        "from hwrl.memory import Offloder",
        "import hwrl\nhwrl.get_backnd()",
        "from hwrl.weights import WeightSource\nWeightSource.from_modle(1)",
        "from hwrl.weights import WeightSender\nWeightSender(store, transprt='host')",
    ],
)
def test_the_check_of_python_finds(wrong: str) -> None:
    with pytest.raises((SyntaxError, ImportError, AttributeError, AssertionError)):
        check_python(wrong)


# -- configurations and data ----------------------------------------------------------------------------------------


def merged(under: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    both = {key: merged(under[key], over[key]) for key in under.keys() & over.keys() if isinstance(over[key], dict)}
    return {**under, **over, **both}


def check_config(tmp_path: Path, tree: dict[str, Any], words: list[str] | None = None) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(merged(LEAST, tree)))
    load_config(path, words or [])


@every_page
def test_data_reads(page: Path, tmp_path: Path) -> None:
    """A block in YAML is a configuration, or a part of one."""
    for block in blocks(page, "yaml"):
        check_config(tmp_path, yaml.safe_load(block))
    for block in blocks(page, "json"):
        json.loads(block)
    for block in blocks(page, "toml"):
        tomllib.loads(block)


# -- commands -------------------------------------------------------------------------------------------------------


def commands(block: str) -> Iterator[list[str]]:
    """Yield the words of each command, without variables before it."""
    for line in block.replace("\\\n", " ").splitlines():
        words = shlex.shlex(line, posix=True, punctuation_chars="|;&")
        words.whitespace_split = True
        command: list[str] = []
        for word in [*words, ";"]:
            if set(word) <= set("|;&"):
                if command:
                    yield command
                command = []
            elif command or not re.match(r"[A-Z_]+=", word):
                command.append(word)


@cache
def subcommands() -> set[str]:
    return {command.name for command in Commands().all()}


@cache
def targets() -> set[str]:
    stacks = {f"test-stack-{file.stem}" for file in REPO.glob("ci/stacks/*.txt")}
    return stacks | set(re.findall(r"^([a-z][\w-]*):", (REPO / "Makefile").read_text(), re.MULTILINE))


def check_command(words: list[str], tmp_path: Path) -> None:
    """Raise an error, or SystemExit, if the command is hwrl's and would be refused before it does anything."""
    program, *rest = words
    if program.split("/")[-1] == "hwrl":
        args = hwrl.cli.parse(rest)
        if "overrides" in args:
            check_config(tmp_path, {}, args.overrides)
    elif program == "make":
        goals = {word for word in rest if "=" not in word and not word.startswith("-")}
        assert goals <= targets(), f"the Makefile lacks {goals - targets()}"
    elif program.split("/")[-1] == "python" and rest[0] == "-m":
        assert not rest[1].startswith(("hwrl", "tests")) or find_spec(rest[1]), f"there is no module {rest[1]}"
    elif program.split("/")[-1] == "python" or program.startswith("ci/"):
        file = rest[0] if "python" in program else program
        assert any((folder / file).is_file() for folder in (REPO, RECIPES)), words


@every_page
def test_commands_parse(page: Path, tmp_path: Path) -> None:
    for block in blocks(page, "", "sh"):
        for words in commands(block):
            check_command(words, tmp_path)
    for name in re.findall(r"`hwrl ([a-z][\w-]*) [^`]*(?:--|=|\.yaml)", page.read_text(encoding="utf-8")):
        assert name in subcommands(), f"there is no command hwrl {name}"


@pytest.mark.parametrize(
    "wrong",
    [
        "hwrl trian config.yaml",
        "X=1 .venv/bin/hwrl plan config.yaml --devises 8",
        "pip install hwrl && hwrl train config.yaml train.setps=3",
        "make demos",
        "python -m hwrl.run.demos demo",
        "python docs/demos/none.py",
        "ci/nothing hwrl",
    ],
)
def test_the_check_of_commands_finds(wrong: str, tmp_path: Path) -> None:
    with pytest.raises((SystemExit, hwrl.errors.HwrlError, AssertionError)):
        for words in commands(wrong):
            check_command(words, tmp_path)


# -- links ----------------------------------------------------------------------------------------------------------


@cache
def anchors(page: Path) -> set[str]:
    """Return the names of the page's headings, as GitHub and the site make them."""
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


@every_page
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)#?([^)\s]*)\)", text):
        path = (page.parent / target).resolve() if target else page
        assert path.exists(), f"there is no {target}"
        assert not anchor or anchor in anchors(path), f"{path.name} has no section #{anchor}"
