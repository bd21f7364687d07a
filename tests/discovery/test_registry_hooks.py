"""The hooks that the registry calls on the chosen backend's plugin."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hwrl.discovery import Registry
from hwrl.errors import BackendLoadError, BackendUnavailableError
from hwrl.interfaces import Backend, BackendInfo, Kernels, RolloutSettings
from tests.support.plugin_files import SOURCE, PluginFiles, plugins

__all__ = ["plugins"]  # a fixture

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


HOOKS: dict[str, tuple[str, Callable[[Registry], object]]] = {
    "hwrl_process_env": ("role", lambda registry: registry.process_env("trainer")),
    "hwrl_engine_args": ("framework", lambda registry: registry.engine_args("engine")),
    "hwrl_kernels": ("", lambda registry: registry.kernels()),
    "hwrl_bootstrap": ("framework", lambda registry: registry.bootstrap("engine")),
}


@pytest.mark.parametrize(
    ("hook", "body", "said"),
    [
        ("hwrl_process_env", "return dict(PORT=1)", "it['PORT'] is 1, not of type str"),
        ("hwrl_process_env", "return 'PORT=1'", "gave a wrong answer: it is 'PORT=1', not"),
        ("hwrl_engine_args", "return ['--fast']", "gave a wrong answer: it is ['--fast'], not"),
        (
            "hwrl_kernels",
            "return dict(rms_norm=len)",
            "gave a wrong answer: it is {'rms_norm': <built-in function len>}",
        ),
        (
            "hwrl_kernels",
            "import hwrl.interfaces\n    return hwrl.interfaces.Kernels(swiglu='fast')",
            "swiglu is 'fast'",
        ),
        *((hook, "raise OSError('no bus')", f"its {hook} raised OSError: no bus") for hook in HOOKS),
        *((hook, "raise SystemExit(0)", f"its {hook} raised SystemExit: 0") for hook in HOOKS),
    ],
)
def test_what_a_hook_does_wrong_is_told_with_its_plugin(plugins: PluginFiles, hook: str, body: str, said: str) -> None:
    argument, ask = HOOKS[hook]
    plugins.add("card", source=f"{SOURCE}\n@hwrl.hookimpl\ndef {hook}({argument}):\n    {body}\n")
    with pytest.raises(BackendLoadError, match="backend 'card' cannot be used") as caught:
        ask(plugins.registry())
    assert said in caught.value.why


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


def test_the_backend_sees_the_engine_that_will_be_made(plugins: PluginFiles) -> None:
    hook = (
        "\n\n@hwrl.hookimpl\ndef hwrl_engine_args(settings, options):\n    return dict(settings=settings, **options)\n"
    )
    plugins.add("chosen", source=SOURCE + hook)
    settings = RolloutSettings(
        model_directory=Path("/m"), dtype=torch.float32, eos_ids=[1], max_running=1, max_length=8
    )
    registry = plugins.registry(HWRL_BACKEND="chosen")
    assert registry.engine_args("engine", {"mode": "fast"}, settings=settings) == {"mode": "fast", "settings": settings}
    assert registry.engine_args("engine") == {"settings": None}


def test_engines_get_the_arguments_that_the_chosen_backend_knows_for_them(plugins: PluginFiles) -> None:
    plugins.add("chosen", source=SOURCE + ENGINE_ARGS)
    plugins.add("other")
    registry = plugins.registry(HWRL_BACKEND="chosen")
    assert registry.engine_args("engine") == {"mode": "safe"}
    assert registry.engine_args("another") == {}
    assert plugins.registry(HWRL_BACKEND="other").engine_args("engine") == {}


# -- fused operations -----------------------------------------------------------------------------------------------

KERNELS = """

@hwrl.hookimpl
def hwrl_kernels():
    from hwrl.interfaces import Kernels

    return Kernels(swiglu=max)
"""


def test_the_chosen_backend_brings_its_fused_operations(plugins: PluginFiles) -> None:
    plugins.add("chosen", source=SOURCE + KERNELS)
    plugins.add("other")
    assert plugins.registry(HWRL_BACKEND="chosen").kernels() == Kernels(swiglu=max)
    assert plugins.registry(HWRL_BACKEND="other").kernels() == Kernels()
    by_hand = plugins.registry()
    by_hand.set_backend(Backend(BackendInfo(name="mine", device_type="cpu", description="")))
    assert by_hand.kernels() == Kernels()
