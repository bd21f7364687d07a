from __future__ import annotations

import sys
import threading
from typing import Any

import pytest

import hwrl
from hwrl.discovery import BACKEND_VARIABLE, Registry
from hwrl.errors import (
    BackendAlreadyChosenError,
    BackendAmbiguousError,
    BackendError,
    BackendLoadError,
    BackendNotFoundError,
    BackendUnavailableError,
)
from hwrl.interfaces import Backend, BackendInfo
from tests.support.plugin_files import SOURCE, PluginFiles, plugins

__all__ = ["plugins"]  # a fixture


# -- the host's backend ---------------------------------------------------------------------------------------------


def test_the_host_has_the_fallback_backend_whatever_is_chosen(plugins: PluginFiles) -> None:
    plugins.add("turbo")
    with pytest.raises(BackendUnavailableError, match="no backend serves the host"):
        plugins.registry(HWRL_BACKEND="turbo").host_backend()
    plugins.add("host", fallback=True)
    registry = plugins.registry(HWRL_BACKEND="turbo")
    assert registry.get_backend().info.name == "turbo"
    assert registry.host_backend() is registry.host_backend()
    assert registry.host_backend().info.name == "host"
    chosen = plugins.registry(HWRL_BACKEND="host")
    assert chosen.get_backend() is chosen.host_backend()


@pytest.mark.parametrize("chosen_by", ["variable", "set_backend"])
def test_a_plugin_makes_one_backend_if_the_host_is_asked_for_before_the_choice(
    plugins: PluginFiles, chosen_by: str
) -> None:
    plugins.add("host", fallback=True)
    registry = plugins.registry(HWRL_BACKEND="host")
    host = registry.host_backend()
    if chosen_by == "set_backend":
        registry.set_backend("host")
    assert registry.get_backend() is host


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


@pytest.mark.parametrize("variable", ["HWRL_BACKEND_DIR", "MY_HWRL_BACKEND", "HWRL_BACKEND_2", "HWRL_VLLM_BACKEND"])
def test_another_programs_variable_with_a_longer_name_is_none_of_hwrls(plugins: PluginFiles, variable: str) -> None:
    plugins.add("turbo")
    assert plugins.registry(**{variable: "/somewhere"}).get_backend().info.name == "turbo"


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
    assert caught.value.fix == "fix what the reason names, or choose another of other"
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


WRONG = "its hwrl_probe gave a wrong answer: it is {'evidence'"


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
        ({"source": SOURCE.replace("return ProbeResult", "import sys; sys.exit(0) or dict")}, "SystemExit: 0"),
        ({"source": SOURCE.replace("import hwrl", "import sys; sys.exit(3)", 1)}, "SystemExit: 3"),
        ({"source": SOURCE.replace("return ProbeResult", "return dict").replace("{answer!r}, {reason!r},", "")}, WRONG),
        ({"answer": "Yes"}, "answer is 'Yes', not one of 'yes', 'no', 'unknown'"),
        ({"answer": "NO "}, "answer is 'NO ', not one of"),
        ({"answer": True}, "answer is True, not one of"),
        ({"answer": "no", "reason": None}, "reason is None, not of type str"),
        ({"answer": "no", "evidence": "/dev/card0"}, "evidence is '/dev/card0', not of type tuple[str, ...]"),
        ({"answer": "no", "evidence": (0,)}, "evidence[0] is 0, not of type str"),
        ({"answer": "no", "rank": "5"}, "rank is '5', not of type int"),
    ],
)
def test_any_doubt_refuses_the_fallback_with_the_reason(plugins: PluginFiles, doubt: Any, said: str) -> None:
    plugins.add("host", fallback=True)
    plugins.add("card", **doubt)
    with pytest.raises(BackendAmbiguousError) as caught:
        plugins.registry().get_backend()
    assert said in caught.value.why
    assert "card" in caught.value.why
    assert "set HWRL_BACKEND=host" in caught.value.fix


@pytest.mark.parametrize("answer", ["Yes", None, 1])
def test_a_named_backend_whose_probe_answers_wrongly_is_an_error_of_its_plugin(
    plugins: PluginFiles, answer: object
) -> None:
    module = plugins.add("card", answer=answer)
    with pytest.raises(BackendLoadError, match="backend 'card' cannot be used") as caught:
        plugins.registry(HWRL_BACKEND="card").get_backend()
    assert f"the plugin {module} of an unknown distribution is broken: its hwrl_probe gave" in caught.value.why


def test_a_broken_probe_does_not_stop_another_device(plugins: PluginFiles) -> None:
    plugins.add("card")
    plugins.add("bad", answer="Yes", rank=9)
    assert plugins.registry().get_backend().info.name == "card"


def test_ctrl_c_in_a_plugin_is_the_users(plugins: PluginFiles) -> None:
    plugins.add("card", source=SOURCE.replace("return ProbeResult", "raise KeyboardInterrupt; dict"))
    with pytest.raises(KeyboardInterrupt):
        plugins.registry().survey()


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
        SOURCE.replace("{api!r}", "(2, 0)") + "\n@hwrl.hookimpl\ndef hwrl_from_api_2(): ...\n",
        "plugin API 2.0",
    ),
    "newer minor API": (SOURCE.replace("{api!r}", "(1, 99)"), "plugin API 1.99, newer than this"),
    "no API": (SOURCE.replace("api={api!r}, ", ""), "does not say for which plugin API"),
    "API as text": (SOURCE.replace("{api!r}", "'1.0'"), "api is '1.0', not of type tuple[int, int]"),
    "API of one figure": (SOURCE.replace("{api!r}", "(1,)"), "api is (1,), not of type"),
    "wrong info": (SOURCE.replace('device_type="cpu"', "device_type=None"), "device_type is None, not of type str"),
    "capital name": (SOURCE.replace("{name!r}", "'Bad'"), "calls itself 'Bad', but a name has only small letters"),
    "raising info": (SOURCE.replace("return BackendInfo(", "raise OSError('no bus')\n    dict("), "OSError: no bus"),
    "exiting info": (SOURCE.replace("return BackendInfo(", "raise SystemExit(4)\n    dict("), "SystemExit: 4"),
    "exiting import": ("import sys; sys.exit('no licence')", "SystemExit: no licence"),
    "panicking import": ("class Panic(BaseException): ...\nraise Panic('at the driver')", "Panic: at the driver"),
    "refusing import": (
        "from hwrl import errors\nraise errors.UnsupportedError('no', why='old chip')",
        "UnsupportedError: no: old chip",
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
    assert plugins.env[BACKEND_VARIABLE] == "card"
    plugins.registry(HWRL_BACKEND="karte").get_backend()
    assert plugins.env[BACKEND_VARIABLE] == "card"


@pytest.mark.parametrize(
    ("made", "said"),
    [
        ("return 'a backend'", "its hwrl_create_backend gave a wrong answer: it is 'a backend', not of type Backend"),
        ("return Backend(BackendInfo('other', 'cpu', '', api=(1, 0)))", "has another info"),
        ("return object.__new__(Backend)", "has another info"),
        ("raise SystemExit(1)", "SystemExit: 1"),
    ],
)
def test_a_plugin_that_makes_no_backend_of_its_own_is_named(plugins: PluginFiles, made: str, said: str) -> None:
    plugins.add("card", source=SOURCE.replace("return Backend(hwrl_backend_info())", made))
    with pytest.raises(BackendError, match="backend 'card' cannot be") as caught:
        plugins.registry(HWRL_BACKEND="card").get_backend()
    assert said in caught.value.why


def test_set_backend_comes_before_the_variable(plugins: PluginFiles) -> None:
    plugins.add("one")
    plugins.add("two")
    registry = plugins.registry(HWRL_BACKEND="one")
    registry.set_backend("two")
    assert registry.get_backend().info.name == "two"
    assert plugins.env[BACKEND_VARIABLE] == "two"


def test_set_backend_takes_an_object(plugins: PluginFiles) -> None:
    mine = Backend(BackendInfo(name="mine", device_type="cpu", description="made here"))
    registry = plugins.registry()
    registry.set_backend(mine)
    registry.set_backend(mine)
    assert registry.get_backend() is mine
    with pytest.raises(BackendAlreadyChosenError):
        registry.set_backend(Backend(mine.info))
    assert BACKEND_VARIABLE not in plugins.env, "a child process could not find it"


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
    plugins.env[BACKEND_VARIABLE] = "card"
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
