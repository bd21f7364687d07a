from __future__ import annotations

import sys
import threading
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

import hwrl
from hwrl.backend import Backend, BackendInfo
from hwrl.errors import (
    BackendAlreadyChosenError,
    BackendAmbiguousError,
    BackendLoadError,
    BackendNotFoundError,
    BackendUnavailableError,
)
from hwrl.registry import GROUP, VARIABLE, Registry

SOURCE = """
import hwrl
from hwrl.backend import Backend, BackendInfo, ProbeResult

@hwrl.hookimpl
def hwrl_backend_info():
    return BackendInfo(name={name!r}, device_type="cpu", description="for a test", fallback={fallback!r})

@hwrl.hookimpl
def hwrl_probe(context):
    return ProbeResult({answer!r}, {reason!r}, evidence={evidence!r}, rank={rank!r})

@hwrl.hookimpl
def hwrl_create_backend():
    return Backend(hwrl_backend_info())
"""


class PluginFiles:
    """Real plugin modules in a folder on ``sys.path``, real entry points for them, and an environment."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.entry_points: list[EntryPoint] = []
        self.env: dict[str, str] = {}

    def add(self, name: str, *, source: str = SOURCE, aliases: tuple[str, ...] = (), **settings: Any) -> str:
        """Add one plugin, whose source is filled with ``settings``; return its module's name."""
        module = f"{self.folder.name}_plugin_{len(self.entry_points)}_{name}"
        usual = {"name": name, "answer": "yes", "reason": f"{name} ran", "evidence": (), "rank": 0, "fallback": False}
        (self.folder / f"{module}.py").write_text(source.format(**(usual | settings)))
        self.entry_points += [EntryPoint(each, module, GROUP) for each in (name, *aliases)]
        return module

    def registry(self, **env: str) -> Registry:
        self.env = dict(env)
        return Registry(entry_points=self.entry_points, env=self.env)


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PluginFiles:
    monkeypatch.syspath_prepend(str(tmp_path))
    return PluginFiles(tmp_path)


# -- HWRL_BACKEND decides alone -------------------------------------------------------------------------------------


def test_the_variable_imports_only_the_named_plugin(plugins: PluginFiles) -> None:
    wanted, other = plugins.add("slow"), plugins.add("fast", rank=100)
    assert plugins.registry(HWRL_BACKEND="slow").get_backend().info.name == "slow"
    assert wanted in sys.modules
    assert other not in sys.modules


def test_an_empty_variable_counts_as_unset(plugins: PluginFiles) -> None:
    plugins.add("only")
    assert plugins.registry(HWRL_BACKEND="").get_backend().info.name == "only"


def test_an_unknown_name_lists_the_known_ones_a_suggestion_and_every_load_failure(plugins: PluginFiles) -> None:
    plugins.add("turbo")
    plugins.add("broken", source="raise OSError('libturbo.so is missing')")
    with pytest.raises(BackendNotFoundError) as caught:
        plugins.registry(HWRL_BACKEND="trubo").get_backend()
    for part in ("'trubo'", "broken, turbo", "did you mean 'turbo'?", "OSError: libturbo.so is missing"):
        assert part in str(caught.value)


@pytest.mark.parametrize("variable", ["HWRL_BACKNED", "HRWL_BACKEND", "hwrl_backend", "HWRL_BACKENDS"])
def test_a_misspelt_variable_is_not_passed_over(plugins: PluginFiles, variable: str) -> None:
    plugins.add("turbo")
    with pytest.raises(BackendNotFoundError, match=f"(?s){variable} chooses no backend.*set HWRL_BACKEND instead"):
        plugins.registry(**{variable: "cpu"}).choose()
    assert plugins.registry(**{variable: "cpu", "HWRL_BACKEND": "turbo"}).choose().plugin.info.name == "turbo"
    assert plugins.registry(HWRL_BACKEND="", HWRL_ROOT="/", BACKEND="cpu").choose().plugin.info.name == "turbo"


def test_a_named_backend_that_cannot_run_gives_its_probes_reason_and_nothing_else_is_tried(
    plugins: PluginFiles,
) -> None:
    plugins.add("card", answer="no", reason="the card is not plugged in")
    other = plugins.add("other")
    with pytest.raises(BackendUnavailableError, match="the card is not plugged in") as caught:
        plugins.registry(HWRL_BACKEND="card").get_backend()
    assert caught.value.fix == "mend what the reason names, or choose another of other"
    assert other not in sys.modules


def test_a_named_backend_whose_probe_does_not_know_is_tried(plugins: PluginFiles) -> None:
    plugins.add("card", answer="unknown")
    assert plugins.registry(HWRL_BACKEND="card").get_backend().info.name == "card"


def test_a_named_backend_that_cannot_be_created_never_falls_back(plugins: PluginFiles) -> None:
    plugins.add("host", fallback=True)
    plugins.add("card", source=SOURCE.replace("return Backend(", "raise RuntimeError('driver too old') or ("))
    with pytest.raises(BackendUnavailableError, match="RuntimeError: driver too old") as caught:
        plugins.registry(HWRL_BACKEND="card").get_backend()
    assert isinstance(caught.value.__cause__, RuntimeError)


# -- detection ------------------------------------------------------------------------------------------------------


def test_detection_takes_the_highest_rank_among_the_yes(plugins: PluginFiles) -> None:
    plugins.add("low", rank=1)
    plugins.add("high", rank=2)
    plugins.add("absent", answer="no", rank=3)
    assert plugins.registry().get_backend().info.name == "high"


def test_a_tie_says_to_set_the_variable(plugins: PluginFiles) -> None:
    plugins.add("left", rank=5)
    plugins.add("right", rank=5)
    with pytest.raises(BackendAmbiguousError, match="set HWRL_BACKEND to left or right"):
        plugins.registry().get_backend()


def test_a_device_beats_a_fallback_of_any_rank(plugins: PluginFiles) -> None:
    plugins.add("host", fallback=True, rank=1000)
    plugins.add("card")
    assert plugins.registry().get_backend().info.name == "card"


def test_the_fallback_is_taken_when_nothing_hints_at_a_device(plugins: PluginFiles) -> None:
    plugins.add("host", fallback=True)
    plugins.add("card", answer="no")
    assert plugins.registry().get_backend().info.name == "host"


@pytest.mark.parametrize(
    ("doubt", "said"),
    [
        ({"answer": "unknown", "reason": "the driver hangs"}, "the driver hangs"),
        ({"answer": "no", "reason": "no library", "evidence": ("/dev/card0",)}, "/dev/card0"),
        ({"source": "import no_such_vendor_library"}, "no_such_vendor_library"),
        (
            {"source": SOURCE.replace("return ProbeResult", "raise OSError('bus error')\n    dict")},
            "OSError: bus error",
        ),
        ({"source": SOURCE.replace("return ProbeResult({answer!r}, {reason!r},", "return dict(")}, "not a ProbeResult"),
    ],
    ids=["unknown", "device-files", "broken-import", "raising-probe", "no-answer"],
)
def test_any_doubt_refuses_the_fallback_with_the_reason(plugins: PluginFiles, doubt: Any, said: str) -> None:
    plugins.add("host", fallback=True)
    plugins.add("card", **doubt)
    with pytest.raises(BackendAmbiguousError) as caught:
        plugins.registry().get_backend()
    assert said in caught.value.why
    assert "set HWRL_BACKEND=host" in caught.value.fix


def test_the_remedy_for_a_refused_fallback_works(plugins: PluginFiles) -> None:
    plugins.add("host", fallback=True)
    plugins.add("card", answer="no", evidence=("/dev/card0",))
    assert plugins.registry(HWRL_BACKEND="host").get_backend().info.name == "host"


def test_no_backend_at_all_is_an_error(plugins: PluginFiles) -> None:
    with pytest.raises(BackendUnavailableError, match="no backend is installed"):
        plugins.registry().get_backend()


# -- faults of a plugin stay its own --------------------------------------------------------------------------------

FAULTS = {
    "broken import": ("import no_such_module", "no_such_module"),
    "raising import": ("raise RuntimeError('bad build')", "RuntimeError: bad build"),
    "misspelt hook": (SOURCE + "\n@hwrl.hookimpl\ndef hwrl_docter(context): ...\n", "hwrl_docter"),
    "misspelt mandatory hook": (SOURCE.replace("hwrl_probe", "hwrl_prob"), "hwrl_prob"),
    "bad signature": (SOURCE.replace("hwrl_probe(context)", "hwrl_probe(context, devices)"), "devices"),
    "undecorated hook": (SOURCE.replace("@hwrl.hookimpl\ndef hwrl_probe", "def hwrl_probe"), "gives no hwrl_probe"),
    "missing hook": (SOURCE.partition("@hwrl.hookimpl\ndef hwrl_create")[0], "gives no hwrl_create_backend"),
    "not an info": (SOURCE.replace("return BackendInfo(", "return dict("), "does not return a hwrl.BackendInfo"),
    "another's name": (SOURCE.replace("name={name!r}", "name='good'"), "calls itself 'good'"),
    "newer API": (
        SOURCE.replace("fallback=", "api=(2, 0), fallback=") + "\n@hwrl.hookimpl\ndef hwrl_from_api_2(): ...\n",
        "plugin API 2.0",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_plugin_is_reported_and_hurts_no_other(plugins: PluginFiles, fault: str) -> None:
    source, said = FAULTS[fault]
    plugins.add("bad", source=source)
    plugins.add("good")
    registry = plugins.registry()
    (failure,) = registry.survey().failures
    assert failure.names == ("bad",)
    assert said in failure.reason
    assert registry.get_backend().info.name == "good"


@pytest.mark.parametrize("fault", FAULTS)
def test_asking_for_a_faulty_plugin_gives_the_reason(plugins: PluginFiles, fault: str) -> None:
    source, said = FAULTS[fault]
    plugins.add("bad", source=source)
    with pytest.raises(BackendLoadError) as caught:
        plugins.registry(HWRL_BACKEND="bad").get_backend()
    assert said in caught.value.why


def test_another_api_version_is_told_before_its_unknown_hooks(plugins: PluginFiles) -> None:
    plugins.add("bad", source=FAULTS["newer API"][0])
    assert "hwrl_from_api_2" not in plugins.registry().survey().failures[0].reason


def test_two_plugins_of_one_name_are_both_refused_without_import(plugins: PluginFiles) -> None:
    modules = [plugins.add("twin"), plugins.add("twin")]
    with pytest.raises(BackendLoadError) as caught:
        plugins.registry(HWRL_BACKEND="twin").get_backend()
    assert all(module in caught.value.why and module not in sys.modules for module in modules)


def test_two_plugins_of_one_name_refuse_the_fallback(plugins: PluginFiles) -> None:
    plugins.add("host", fallback=True)
    plugins.add("twin")
    plugins.add("twin")
    with pytest.raises(BackendAmbiguousError, match="2 entry points have this name"):
        plugins.registry().get_backend()


# -- names, export and use once -------------------------------------------------------------------------------------


def test_an_alias_is_another_name_of_the_same_backend(plugins: PluginFiles) -> None:
    plugins.add("card", aliases=("karte",))
    registry = plugins.registry(HWRL_BACKEND="karte")
    assert registry.get_backend().info.name == "card"
    assert [probed.plugin.names for probed in registry.survey().probed] == [("card", "karte")]
    registry.set_backend("karte")
    registry.set_backend("card")


def test_the_choice_is_exported_to_child_processes(plugins: PluginFiles) -> None:
    plugins.add("card", aliases=("karte",))
    plugins.registry().get_backend()
    assert plugins.env[VARIABLE] == "card"
    plugins.registry(HWRL_BACKEND="karte").get_backend()
    assert plugins.env[VARIABLE] == "card"


def test_set_backend_comes_before_the_variable(plugins: PluginFiles) -> None:
    plugins.add("one")
    plugins.add("two")
    registry = plugins.registry(HWRL_BACKEND="one")
    registry.set_backend("two")
    assert registry.get_backend().info.name == "two"
    assert plugins.env[VARIABLE] == "two"


def test_set_backend_takes_an_object(plugins: PluginFiles) -> None:
    mine = Backend(BackendInfo(name="mine", device_type="cpu", description="made here"))
    registry = plugins.registry()
    registry.set_backend(mine)
    registry.set_backend(mine)
    assert registry.get_backend() is mine
    with pytest.raises(BackendAlreadyChosenError):
        registry.set_backend(Backend(mine.info))


def test_a_second_different_choice_is_an_error(plugins: PluginFiles) -> None:
    plugins.add("one", rank=1)
    plugins.add("two")
    registry = plugins.registry()
    registry.get_backend()
    registry.set_backend("one")
    for other in ("two", "unheard-of"):
        with pytest.raises(BackendAlreadyChosenError, match=other):
            registry.set_backend(other)


def test_set_backend_refuses_an_unknown_name(plugins: PluginFiles) -> None:
    plugins.add("card")
    with pytest.raises(BackendNotFoundError, match="set_backend asks for it"):
        plugins.registry().set_backend("crad")


def test_a_failed_choice_can_be_mended_in_the_same_process(plugins: PluginFiles) -> None:
    plugins.add("card")
    registry = plugins.registry(HWRL_BACKEND="crad")
    with pytest.raises(BackendNotFoundError):
        registry.get_backend()
    plugins.env[VARIABLE] = "card"
    assert registry.get_backend().info.name == "card"


def test_threads_that_ask_at_once_get_one_backend(plugins: PluginFiles) -> None:
    plugins.add("card", source=SOURCE.replace("return Backend(", "made.append(1); return Backend(") + "\nmade = []\n")
    registry = plugins.registry()
    start = threading.Barrier(8)
    found: list[Backend] = []

    def ask() -> None:
        start.wait()
        found.append(registry.get_backend())

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(map(id, found))) == 1
    assert sys.modules[plugins.entry_points[0].value].made == [1]


def test_the_installed_backends_are_found() -> None:
    names = {name for probed in Registry(env={}).survey().probed for name in probed.plugin.names}
    assert {"cpu", "cuda", "npu", "ascend"} <= names
    assert Registry(env={}).survey().failures == ()


def test_the_process_has_one_backend() -> None:
    assert hwrl.get_backend() is hwrl.get_backend()


WANTS = """
@hwrl.hookimpl
def hwrl_process_env(role, env, shares_device):
    return {{"KEPT": "the backend's", "WANTED": role, "SHARED": str(shares_device)}}
"""


def test_a_worker_gets_what_its_backend_wants_and_nobody_has_set(plugins: PluginFiles) -> None:
    plugins.add("sim", source=SOURCE + WANTS)
    assert plugins.registry(KEPT="the user's").process_env("trainer") == {"WANTED": "trainer", "SHARED": "False"}
    assert plugins.registry().process_env("rollout", shares_device=True)["SHARED"] == "True"


def test_a_worker_of_a_backend_that_wants_nothing_gets_nothing(plugins: PluginFiles) -> None:
    plugins.add("sim")
    assert plugins.registry().process_env("trainer") == {}
    by_hand = plugins.registry()
    by_hand.set_backend(Backend(BackendInfo(name="mine", device_type="cpu", description="no plugin made it")))
    assert by_hand.process_env("rollout") == {}


# -- preparing a process for a framework ----------------------------------------------------------------------------

BOOTSTRAP = """

@hwrl.hookimpl
def hwrl_bootstrap(framework):
    import sys
    prepared = sys.modules[__name__].__dict__.setdefault("prepared", [])
    prepared.append(framework)
"""


def test_a_framework_is_prepared_once_by_the_chosen_backend_alone(plugins: PluginFiles) -> None:
    chosen = plugins.add("chosen", source=SOURCE + BOOTSTRAP)
    other = plugins.add("other", source=SOURCE + BOOTSTRAP)
    registry = plugins.registry(HWRL_BACKEND="chosen")
    registry.bootstrap("somewhere")
    registry.bootstrap("somewhere")
    assert sys.modules[chosen].prepared == ["somewhere"]
    assert other not in sys.modules


def test_it_is_too_late_when_the_framework_has_been_imported(plugins: PluginFiles) -> None:
    module = plugins.add("chosen", source=SOURCE + BOOTSTRAP)
    registry = plugins.registry(HWRL_BACKEND="chosen")
    with pytest.raises(BackendUnavailableError, match="json cannot be prepared for backend 'chosen'"):
        registry.bootstrap("json")
    assert not hasattr(sys.modules[module], "prepared")


def test_a_backend_that_prepares_nothing_takes_any_framework(plugins: PluginFiles) -> None:
    plugins.add("only")
    plugins.registry().bootstrap("json")
    by_hand = plugins.registry()
    by_hand.set_backend(Backend(BackendInfo(name="mine", device_type="cpu", description="")))
    by_hand.bootstrap("json")


# -- what engines need on a device ----------------------------------------------------------------------------------

ENGINE_ARGS = """

@hwrl.hookimpl
def hwrl_engine_args(framework):
    return dict(mode="safe") if framework == "engine" else None
"""


def test_engines_get_the_arguments_that_the_chosen_backend_knows_for_them(plugins: PluginFiles) -> None:
    plugins.add("chosen", source=SOURCE + ENGINE_ARGS)
    plugins.add("other")
    registry = plugins.registry(HWRL_BACKEND="chosen")
    assert registry.engine_args("engine") == {"mode": "safe"}
    assert registry.engine_args("another") == {}
    assert plugins.registry(HWRL_BACKEND="other").engine_args("engine") == {}
