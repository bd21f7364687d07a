"""The traps of RL on NPUs, each set on purpose: hwrl refuses it by name, avoids it, or its doctor tells the cure.

Public reports are numbers of vllm-ascend, unless another repository is named.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import hwrl_npu
from hwrl.discovery import Registry
from hwrl.errors import ConfigError
from hwrl.interfaces import Capability, Finding, RolloutSettings
from tests.support.machines import HOST_TORCH, Machine, machine

__all__ = ["machine"]  # a fixture

PLACE = "rollout.engine_options"
CONFIG = 'self.weight_nz_mode = value(additional_config, "weight_nz_mode", "VLLM_ASCEND_ENABLE_NZ")\n'
NEW_CONFIG = "class AscendConfig:\n    weight_nz_mode: int = 1\n    rl_config: RlConfig | None = None\n"
SOUND = {"ASCEND_HOME_PATH": "/usr/local/Ascend"}
SETTINGS = RolloutSettings(
    model_directory=Path("/m"), dtype=torch.bfloat16, eos_ids=[1], max_running=8, max_length=64, seed=3
)
MIXTURE = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2}


def install(machine: Machine, version: str = "0.23.0", *, device: str = "A2", config: str = CONFIG) -> Machine:
    """Install vllm-ascend as its wheels do, with all that it needs."""
    number, built = f"__version__ = version = '{version}'\n", f"__device_type__ = '{device}'"
    machine.with_module("vllm_ascend", __init__="", _version=number, _build_info=built, ascend_config=config)
    machine.with_module("vllm", _version=number).with_module("torch", HOST_TORCH.replace("2.13", "2.10"))
    for name in ("torch_npu", "acl", "triton", "torchvision"):
        machine.with_module(name, "__version__ = '2.10.0'\n")
    (machine.root / "libatb.so").touch()
    return machine.with_devices("davinci0", "davinci1")


class Engine:
    """Starts vLLM on an imitated machine, as far as its arguments."""

    def __init__(self, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.machine, self._patch = machine, monkeypatch
        for name in list(os.environ):
            if name.startswith(("VLLM_", "PYTORCH_", "TASK_", "ASCEND_")):
                monkeypatch.delenv(name)
        for name in ("VLLM_ASCEND_ENABLE_NZ", "PYTORCH_NPU_ALLOC_CONF"):  # the engine sets them
            monkeypatch.setenv(name, "")
            monkeypatch.delenv(name)

    def arguments(
        self, options: dict[str, Any] | None = None, *, model: dict[str, Any] | None = None, **settings: Any
    ) -> dict[str, Any]:
        (self.machine.root / "config.json").write_text(json.dumps(model or {"model_type": "qwen3"}))
        self._patch.setattr(sys, "path", [str(self.machine.root), *sys.path])
        registry = Registry(env={})
        registry.set_backend(hwrl_npu.NpuBackend(hwrl_npu.INFO))
        given = dataclasses.replace(SETTINGS, model_directory=self.machine.root, **settings)
        return registry.engine_args("vllm", options or {}, settings=given, key=PLACE)


@pytest.fixture
def engine(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Engine:
    return Engine(machine, monkeypatch)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    # trap: (version, device, env, options, model, settings of the engine), what hwrl says, and what to do
    "verl vllm_rollout/utils.py: weights in FRACTAL_NZ, by the variable": (
        {"env": {"VLLM_ASCEND_ENABLE_NZ": "1"}},
        r"VLLM_ASCEND_ENABLE_NZ=1 cannot be used(.|\n)*unset VLLM_ASCEND_ENABLE_NZ",
    ),
    "pages of Qwen3-30B-A3B and others: weights in FRACTAL_NZ, by the key": (
        {"options": {"additional_config": {"weight_nz_mode": 2}}},
        rf"{PLACE}\.additional_config\.weight_nz_mode=2 cannot be set(.|\n)*need 0",
    ),
    "the default 1, written out": (
        {"options": {"additional_config": {"weight_nz_mode": 1}}},
        r"weight_nz_mode=1 cannot be set",
    ),
    "a mapping as text, which cannot be merged": (
        {"options": {"additional_config": '{"enable_cpu_binding": true}'}},
        rf"{PLACE}\.additional_config='(.|\n)*write a mapping",
    ),
    "_should_trans_nz: a 310P always uses FRACTAL_NZ": ({"device": "_310P"}, r"cannot be used with hwrl on a 310P"),
    "#11548, #12226: experts are transposed in each wake": (
        {"model": MIXTURE, "settings": {"free_cache_engine": True}},
        r"mixture of experts(.|\n)*vllm-ascend 0\.23 transposes(.|\n)*0\.26 or newer",
    ),
    "the experts of a multimodal model": (
        {"version": "0.25.1rc1", "model": {"text_config": MIXTURE}, "settings": {"free_cache_engine": True}},
        r"vllm-ascend 0\.25 transposes",
    ),
    "hwrl's default dtype, which Ascend's attention does not take": (
        {"settings": {"dtype": torch.float32}},
        r"model\.dtype=float32(.|\n)*set model\.dtype=bfloat16",
    ),
    "faqs.md recommends expandable segments, camem asserts that there are none": (
        {"env": {"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True"}, "settings": {"free_cache_engine": True}},
        r"expandable_segments:True cannot be used with rollout\.free_cache_engine",
    ),
    "the platform sets a second name of the allocator's settings": (
        {"env": {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}},
        r"PYTORCH_ALLOC_CONF cannot be used(.|\n)*set PYTORCH_NPU_ALLOC_CONF instead",
    ),
    "verl perf_tuning_on_ascend.rst: the task queue's level 2 beside graphs": (
        {"env": {"TASK_QUEUE_ENABLE": "2"}},
        r"TASK_QUEUE_ENABLE=2 cannot be used with vLLM's ACL graphs(.|\n)*enforce_eager=true",
    ),
    "npu model runner v2 is in developing": (
        {"env": {"VLLM_USE_V2_MODEL_RUNNER": "1"}},
        r"VLLM_USE_V2_MODEL_RUNNER=1 cannot be used(.|\n)*unset VLLM_USE_V2_MODEL_RUNNER",
    ),
    "blocking launches beside graphs": ({"env": {"ASCEND_LAUNCH_BLOCKING": "1"}}, r"ASCEND_LAUNCH_BLOCKING=1 cannot"),
    "refresh_block_size: any size becomes 128": ({"options": {"block_size": 16}}, r"block_size=16 has no effect"),
    "verl vllm_rollout/utils.py: another way between experts": (
        {"options": {"enable_expert_parallel": True, "all2all_backend": "deepep_low_latency"}},
        r"experts cannot travel by deepep_low_latency",
    ),
    "rl_config, which this version ignores": (
        {"options": {"additional_config": {"rl_config": {"enabled": True}}}, "version": "0.26.0rc1"},
        r"rl_config has no effect(.|\n)*vllm-ascend 0\.26 does not know it",
    ),
}


@pytest.mark.parametrize("trap", REFUSED)
def test_a_trap_is_refused_by_name(trap: str, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    case, said = REFUSED[trap]
    install(engine.machine, case.get("version", "0.23.0"), device=case.get("device", "A2"))
    for name, value in case.get("env", {}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=said):
        engine.arguments(case.get("options"), model=case.get("model"), **case.get("settings", {}))


@pytest.mark.parametrize(
    ("case", "version"),
    [
        ({"model": MIXTURE, "free_cache_engine": True}, "0.26.0rc1"),
        ({"model": MIXTURE}, "0.23.0"),
        ({"model": {"num_experts": 0}, "free_cache_engine": True}, "0.23.0"),
        ({"options": {"block_size": 64}, "model": {"model_type": "deepseek_v4"}}, "0.26.0rc1"),
        ({"options": {"block_size": 128, "all2all_backend": "flashinfer_all2allv"}}, "0.26.0rc1"),
        ({"options": {"enforce_eager": True}, "env": {"TASK_QUEUE_ENABLE": "2"}}, "0.23.0"),
        ({"env": {"VLLM_ASCEND_ENABLE_NZ": "0", "TASK_QUEUE_ENABLE": "1", "VLLM_USE_V2_MODEL_RUNNER": "0"}}, "0.23.0"),
    ],
    ids=str,
)
def test_what_is_no_trap_is_not_refused(
    case: dict[str, Any], version: str, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(engine.machine, version)
    for name, value in case.pop("env", {}).items():
        monkeypatch.setenv(name, value)
    assert engine.arguments(**case)["additional_config"]["weight_nz_mode"] == 0


def test_the_users_additional_config_keeps_what_an_update_needs(engine: Engine) -> None:
    """Before, any key of the user's dropped ``weight_nz_mode: 0``, and the first wake raised an error."""
    install(engine.machine)
    given = {"additional_config": {"enable_cpu_binding": True, "weight_nz_mode": 0}, "block_size": 128}
    assert engine.arguments(given) == given
    assert engine.arguments({"additional_config": {"a": {"b": 1}}})["additional_config"] == {
        "a": {"b": 1},
        "weight_nz_mode": 0,
        "enable_cpu_binding": False,
    }


def test_a_version_that_knows_only_rl_config_gets_it(engine: Engine) -> None:
    install(engine.machine, "0.31.0", config="class AscendConfig:\n    rl_config: RlConfig | None = None\n")
    given = {"additional_config": {"rl_config": {"sleep_mode_extra_cleanup": True}}}
    assert engine.arguments(given)["additional_config"]["rl_config"] == {
        "enabled": True,
        "sleep_mode_extra_cleanup": True,
    }


def test_a_version_with_both_keys_gets_the_narrower_one_and_takes_the_users_rl_config(engine: Engine) -> None:
    """``rl_config`` also opens a server's developer routes."""
    install(engine.machine, "0.30.0rc2", config=NEW_CONFIG)
    assert engine.arguments()["additional_config"] == {"weight_nz_mode": 0, "enable_cpu_binding": False}
    given = {"additional_config": {"rl_config": {"enabled": True}}}
    assert engine.arguments(given)["additional_config"]["rl_config"] == {"enabled": True}


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        (None, "expandable_segments:False"),
        ("page_size:1g", "page_size:1g,expandable_segments:False"),
        ("expandable_segments:True", "expandable_segments:True"),
        ("max_split_size_mb:64", "max_split_size_mb:64"),
    ],
)
def test_the_platform_cannot_turn_expandable_segments_on(
    said: str | None, kept: str, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vllm-ascend's platform turned them on in the replica's process; then nobody could open its memory."""
    install(engine.machine)
    if said is not None:
        monkeypatch.setenv("PYTORCH_NPU_ALLOC_CONF", said)
    engine.arguments()
    platform_sets(os.environ)
    assert os.environ["PYTORCH_NPU_ALLOC_CONF"] == kept
    ipc = hwrl_npu.NpuBackend(hwrl_npu.INFO).supports(Capability.DEVICE_IPC)
    assert ipc.usable is ("segments:True" not in kept)
    assert ipc.usable or "expandable_segments:False" in ipc.reason


def platform_sets(env: Any) -> None:
    """Do what ``NPUPlatform.check_and_update_config`` of 0.23 to 0.26 does without sleep mode."""
    said = env.get("PYTORCH_NPU_ALLOC_CONF", "expandable_segments:True")
    if not any(key in said for key in ("expandable_segments", "max_split_size_mb", "garbage_collection_threshold")):
        said += ",expandable_segments:True"
    env["PYTORCH_NPU_ALLOC_CONF"] = said


def test_a_vllm_of_another_program_gets_only_what_an_update_needs(engine: Engine) -> None:
    """The transfer backend asks. vllm-ascend's worker reads the variable at the first update, and its default is 1."""
    install(engine.machine)
    engine.arguments()
    del os.environ["VLLM_ASCEND_ENABLE_NZ"]
    assert hwrl_npu.hwrl_engine_args("vllm", None, {}) == {"additional_config": {"weight_nz_mode": 0}}
    assert os.environ["VLLM_ASCEND_ENABLE_NZ"] == "0"


def test_without_vllm_ascend_the_error_names_it(engine: Engine) -> None:
    with pytest.raises(ConfigError, match="vllm-ascend is not installed"):
        engine.arguments()
    assert hwrl_npu.hwrl_engine_args("another", None, {}) is None


# -- what doctor is told ---------------------------------------------------------------------------------------------


def warnings(machine: Machine, **env: str) -> list[Finding]:
    sound = {**SOUND, "LD_LIBRARY_PATH": str(machine.root)}
    return [one for one in hwrl_npu.hwrl_doctor(machine.context(**{**sound, **env})) if one.level != "info"]


TOLD = {
    "VLLM_ASCEND_ENABLE_NZ=2": "private format NZ",
    "PYTORCH_ALLOC_CONF=max_split_size_mb:64": "refuses to start with both",
    "PYTORCH_NPU_ALLOC_CONF=expandable_segments:True": "takes no expandable segments",
    "TASK_QUEUE_ENABLE=2": "exclude each other",
    "VLLM_USE_V2_MODEL_RUNNER=1": "model runner unfinished",
    "VLLM_ALL2ALL_BACKEND=naive": "experts cannot travel by naive",
    "LD_LIBRARY_PATH=/none": "libatb.so",
}


@pytest.mark.parametrize("setting", TOLD)
def test_doctor_is_told_of_a_trap_with_its_cure(machine: Machine, setting: str) -> None:
    name, _, value = setting.partition("=")
    (finding,) = warnings(install(machine), **{name: value})
    assert TOLD[setting] in finding.message and finding.fix


@pytest.mark.parametrize(
    ("name", "value"),
    [("HCCL_IF_BASE_PORT", "50000"), ("HCCL_HOST_SOCKET_PORT_RANGE", "60000-60050"), ("HCCL_IF_BASE_PORT", "")],
)
def test_doctor_is_told_of_fixed_ports(machine: Machine, name: str, value: str) -> None:
    """verl's pages set ranges of ports; two processes of a device then meet on the same ones."""
    found = warnings(install(machine), **{name: value})
    assert [name in one.message and "auto where processes share" in one.fix for one in found] == [True] * bool(value)


@pytest.mark.parametrize(
    ("text", "old"), [("25.2.1", True), ("25.3.rc1", False), ("26.0.rc1", False), ("24.1.0", True)]
)
def test_doctor_is_told_of_a_driver_without_memory_for_other_processes(machine: Machine, text: str, old: bool) -> None:
    file = install(machine).root / "usr/local/Ascend/driver/version.info"
    file.parent.mkdir(parents=True)
    file.write_text(f"package_name=driver\nVersion={text}\nascendhal_version=7.35\n")
    assert [text in one.message and "25.3" in one.fix for one in warnings(machine)] == [True] * old


def test_a_sound_machine_with_vllm_ascend_has_no_warning(machine: Machine) -> None:
    assert warnings(install(machine)) == []


@pytest.mark.parametrize(
    ("name", "change", "said", "fix"),
    [
        ("acl", None, "no module acl", "source CANN's set_env.sh"),
        ("triton", None, "no module triton", "triton-ascend"),
        ("torchvision", None, "no module torchvision", "0.25.0"),
        ("vllm", "0.32.0", "made for vllm 0.23, and 0.32 is installed", "install vllm 0.23.*"),
    ],
)
def test_doctor_is_told_what_vllm_ascend_lacks(
    machine: Machine, name: str, change: str | None, said: str, fix: str
) -> None:
    folder = install(machine).root / name
    for file in folder.iterdir():
        file.unlink() if change is None else file.write_text(f"__version__ = version = '{change}'\n")
    if change is None:
        folder.rmdir()
    (finding,) = warnings(machine)
    assert said in finding.message and fix in finding.fix
