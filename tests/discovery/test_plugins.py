from __future__ import annotations

import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from hwrl.discovery import PLUGIN_ENTRY_POINTS, load_hook
from hwrl.errors import ConfigError, EngineError

GOOD = "import hwrl\n@hwrl.hookimpl\ndef hwrl_train_engine(settings, options): return settings, options\n"
WITHOUT = "import hwrl\n"
BROKEN = "import a_framework_that_is_not_there\n"
EXITING = "import sys\nsys.exit(0)\n"
FAILING = GOOD.replace("return settings, options", "raise {}")
MISSPELT = "import hwrl\n@hwrl.hookimpl\ndef hwrl_train_engin(settings): return settings\n"


@pytest.fixture
def entry_points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[EntryPoint]:
    monkeypatch.syspath_prepend(str(tmp_path))
    sources = {"good": GOOD, "without": WITHOUT, "broken": BROKEN, "misspelt": MISSPELT, "exiting": EXITING}
    sources |= {"quits": FAILING.format("SystemExit(0)"), "raises": FAILING.format("OSError('no device')")}
    modules = {name: f"{tmp_path.name}_{name}" for name in sources}
    for name, source in sources.items():
        (tmp_path / f"{modules[name]}.py").write_text(source)
    return [EntryPoint(name, module, PLUGIN_ENTRY_POINTS) for name, module in modules.items()]


def load(name: str, entry_points: list[EntryPoint]) -> object:
    call = load_hook(name, "hwrl_train_engine", asked_by="train.engine", built_in=["fsdp"], entry_points=entry_points)
    return call(settings=1, options=2, backend=None, group=None)


def test_only_the_plugin_that_is_asked_for_is_imported(entry_points: list[EntryPoint]) -> None:
    assert load("good", entry_points) == (1, 2)
    assert [entry.name for entry in entry_points if entry.value in sys.modules] == ["good"]


def test_an_optional_hook_may_be_missing(entry_points: list[EntryPoint]) -> None:
    check = load_hook("good", "hwrl_check_engine", asked_by="train.engine", optional=True, entry_points=entry_points)
    check(asked_by="train.engine", options={})


def test_an_unknown_name_is_told_with_the_known_ones_and_the_likely_one(entry_points: list[EntryPoint]) -> None:
    with pytest.raises(ConfigError) as caught:
        load("goood", entry_points)
    assert caught.value.what == "train.engine=goood is not possible"
    assert caught.value.why == "the installed names are broken, exiting, fsdp, good, misspelt, quits, raises"
    assert "did you mean 'good'?" in caught.value.fix


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("broken", "ModuleNotFoundError: No module named 'a_framework_that_is_not_there'"),
        ("misspelt", "unknown hook 'hwrl_train_engin'"),
        ("exiting", "SystemExit: 0"),
        ("quits", "its hwrl_train_engine raised SystemExit: 0"),
        ("raises", "its hwrl_train_engine raised OSError: no device"),
        ("without", "the plugin 'without' does not have the hook hwrl_train_engine"),
    ],
)
def test_a_plugin_that_cannot_be_used_is_told_with_the_reason(
    entry_points: list[EntryPoint], name: str, why: str
) -> None:
    with pytest.raises(EngineError) as caught:
        load(name, entry_points)
    assert caught.value.what == f"train.engine={name} cannot be used"
    assert why in caught.value.why
    assert name != "without" or caught.value.fix == "choose one of broken, exiting, fsdp, good, misspelt, quits, raises"
