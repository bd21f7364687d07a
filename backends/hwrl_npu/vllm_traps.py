"""vLLM on NPUs, by vllm-ascend: its engine arguments for live updates, and its traps.

Only this module of hwrl knows vllm-ascend. It reads the installed sources, and imports nothing of them. The numbers
behind # are vllm-ascend's public reports.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hwrl.errors import ConfigError
from hwrl.interfaces import Finding, ProbeContext, RolloutSettings
from hwrl_npu.settings import ALLOCATOR, uses_expandable_segments, version_of

_NZ_VARIABLE = "VLLM_ASCEND_ENABLE_NZ"
_V2_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
_NO_SEGMENTS = "expandable_segments:False"
_SEGMENTS_EXCLUDE = ("max_split_size_mb", "garbage_collection_threshold")
"""Settings of the allocator. With one of them vllm-ascend leaves expandable segments off."""
_EXPERTS_WAKE_SINCE = (0, 26)
_EXPERTS = re.compile(r"(\w+_)?num_(\w+_)?experts$|n_routed_experts$")
"""Keys of a model's configuration with the number of its experts."""
_BLOCK = 128
_ALL_TO_ALL = "flashinfer_all2allv"
_TORCH, _TORCH_UNTIL = "2.10", (0, 30)
"""vllm-ascend up to this version is compiled for this torch."""
_NEEDED_MODULES = {
    "acl": "source CANN's set_env.sh: it puts pyACL on PYTHONPATH",
    "triton": "pip install the triton-ascend that vllm-ascend's metadata names",
    "torchvision": "pip install the torchvision of your torch (0.25.0 for torch 2.10): its worker imports it",
}
"""vllm-ascend imports these in any case. Each has the fix for a missing one."""


@dataclass(frozen=True)
class VllmAscend:
    """The installed vllm-ascend: its version (major, minor), and whether it is built for the inference card 310P."""

    version: tuple[int, int]
    is_310p: bool
    config_source: str

    @classmethod
    def find(cls, context: ProbeContext) -> VllmAscend | None:
        """Return the installed one, by its files; None if there is none."""
        if not context.has_module("vllm_ascend"):
            return None
        version = version_of(context, "vllm_ascend") or "0.0"
        return cls(
            (int(version.partition(".")[0]), int(version.partition(".")[2])),
            "310P" in (context.module_text("vllm_ascend", "_build_info.py") or ""),
            context.module_text("vllm_ascend", "ascend_config.py") or "",
        )

    def knows(self, key: str) -> bool:
        """Return whether ``additional_config`` may have ``key``."""
        return f'"{key}"' in self.config_source or re.search(rf"^ +{key}: ", self.config_source, re.M) is not None


@dataclass(frozen=True)
class EngineUse:
    """How vLLM is used, or for ``hwrl doctor``: may be used."""

    sleeps: bool = False
    captures: bool = False
    dtype: str = ""
    experts: bool = False
    one_block_size: bool = False
    """Whether vllm-ascend replaces the model's ``block_size`` by 128."""
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, settings: RolloutSettings | None, options: Mapping[str, Any]) -> EngineUse:
        """Return the use of a rollout engine; with None, of a vLLM that another program started."""
        if settings is None:
            return cls(options=options)
        described = _described(settings.model_directory)
        counts = [count for key, count in described.items() if _EXPERTS.match(key)]
        return cls(
            sleeps=settings.free_cache_engine,
            captures=not options.get("enforce_eager", False),
            dtype=str(settings.dtype).removeprefix("torch."),
            experts=any(isinstance(count, int) and count > 1 for count in counts),
            one_block_size=not any(re.search("mamba|linear|deepseek_v4", f"{it}") for it in described.items()),
            options=options,
        )


def arguments(
    settings: RolloutSettings | None, options: Mapping[str, Any], env: MutableMapping[str, str]
) -> dict[str, Any]:
    """Return the engine arguments for live updates on NPUs. Raises ConfigError for a trap.

    Changes ``env``, the environment of this process and of its children: vllm-ascend reads and changes variables when
    the engine is made.
    """
    installed = VllmAscend.find(ProbeContext(env=env))
    if installed is None:
        raise ConfigError(
            "vLLM cannot run on NPUs here",
            why="vllm-ascend is not installed: it brings vLLM's platform for NPUs",
            fix="install the vllm-ascend of vLLM's version (docs/npu.md has a set that fits)",
        )
    for trap in traps(env, installed, EngineUse.of(settings, options)):
        raise trap
    env.setdefault(_NZ_VARIABLE, "0")  # vllm-ascend's own weight transfer reads it, to 0.26
    _keep_segments_shareable(env)
    given = options.get("additional_config") or {}
    unset = isinstance(given, Mapping) and "enable_cpu_binding" not in given
    needed: dict[str, Any] = {"weight_nz_mode": 0}
    if not installed.knows("weight_nz_mode") and installed.knows("rl_config"):
        needed = {"rl_config": {"enabled": True}}
    # Binding would move all threads of an inline replica, and stop the machine's irqbalance. The user may want that.
    return {"additional_config": needed | ({"enable_cpu_binding": False} if unset and settings else {})}


def traps(env: Mapping[str, str], installed: VllmAscend, use: EngineUse) -> Iterator[ConfigError]:
    """Yield an error for each setting against live updates, and for each that vLLM would misread on NPUs."""
    format_mode = env.get(_NZ_VARIABLE, "0")
    if format_mode != "0":
        yield ConfigError(
            f"{_NZ_VARIABLE}={format_mode} cannot be used with hwrl",
            why="vLLM would keep weights in the NPU's private format NZ, which a live update cannot write",
            fix=f"unset {_NZ_VARIABLE}, or set it to 0",
        )
    if installed.is_310p:
        yield ConfigError(
            "vLLM cannot be used with hwrl on a 310P",
            why="vllm-ascend keeps weights in the private format NZ there, whatever it is told",
            fix="use rollout.engine=embedded, or an Atlas A2 or A3",
        )
    if env.get(_V2_RUNNER, "0") not in ("", "0"):
        yield ConfigError(
            f"{_V2_RUNNER}={env[_V2_RUNNER]} cannot be used with hwrl on NPUs",
            why="vllm-ascend calls this model runner unfinished; its log-probabilities and its weight updates were "
            "never compared with a model's",
            fix=f"unset {_V2_RUNNER}",
        )
    if use.dtype == "float32":
        yield ConfigError(
            "vLLM on NPUs cannot compute in model.dtype=float32",
            why="vllm-ascend's attention takes bfloat16 and float16 only",
            fix="set model.dtype=bfloat16, or rollout.engine=embedded",
        )
    if use.experts and use.sleeps and installed.version < _EXPERTS_WAKE_SINCE:  # #11548, #12226; fixed by #13012
        yield ConfigError(
            "rollout.free_cache_engine cannot be used with a mixture of experts here",
            why=f"vllm-ascend {'.'.join(map(str, installed.version))} transposes the experts' weights in each wake; "
            "the next pass computes with wrong shapes",
            fix="install vllm-ascend 0.26 or newer, or set rollout.free_cache_engine=false",
        )
    yield from _allocator_traps(env, use)
    yield from _graph_traps(env, use)
    yield from _option_traps(env, installed, use)


def findings(context: ProbeContext) -> Iterator[Finding]:
    """Yield lines for ``hwrl doctor`` about the installed vllm-ascend and its environment; none without one.

    They are warnings: a run without vLLM works.
    """
    installed = VllmAscend.find(context)
    if installed is None:
        return
    env, here = context.env, ".".join(map(str, installed.version))
    for trap in traps(env, installed, EngineUse(sleeps=True, captures=True)):
        yield Finding("warning", f"{trap.what}: {trap.why}", fix=trap.fix)
    for package, wanted in (("vllm", here), ("torch", _TORCH if installed.version <= _TORCH_UNTIL else "")):
        found = version_of(context, package)
        if wanted and found and found != wanted:
            message = f"vllm-ascend {here} is made for {package} {wanted}, and {found} is installed"
            yield Finding("warning", message, fix=f"install {package} {wanted}.*, in an environment for vLLM")
    missing = [(package, fix) for package, fix in _NEEDED_MODULES.items() if not context.has_module(package)]
    for package, fix in missing:
        yield Finding("warning", f"vllm-ascend cannot start: there is no module {package}", fix=fix)
    folders = env.get("LD_LIBRARY_PATH", "").split(":")
    if not any(folder and (Path(folder) / "libatb.so").is_file() for folder in folders):
        message = "vllm-ascend cannot start: libatb.so of CANN's NNAL is not on LD_LIBRARY_PATH"
        yield Finding("warning", message, fix="install NNAL, and source its set_env.sh (nnal/atb/set_env.sh), too")


def _allocator_traps(env: Mapping[str, str], use: EngineUse) -> Iterator[ConfigError]:
    own, general = ALLOCATOR
    if general in env:
        yield ConfigError(
            f"{general} cannot be used with vLLM on NPUs",
            why=f"vllm-ascend sets {own} beside it, and torch_npu refuses to start with both",
            fix=f"set {own} instead, to the same value",
        )
    if use.sleeps and uses_expandable_segments(env):
        yield ConfigError(
            f"{own}={env.get(own, '')} cannot be used with rollout.free_cache_engine",
            why="vllm-ascend's memory pool for sleeping engines takes no expandable segments",
            fix=f"unset {own}: a trainer gets expandable segments without it",
        )


def _graph_traps(env: Mapping[str, str], use: EngineUse) -> Iterator[ConfigError]:
    for name, value, why in (
        ("TASK_QUEUE_ENABLE", "2", "torch_npu's task queue of level 2 and captured graphs exclude each other"),
        ("ASCEND_LAUNCH_BLOCKING", "1", "vllm-ascend captures no graphs while each launch blocks"),
    ):
        if use.captures and env.get(name) == value:
            yield ConfigError(
                f"{name}={value} cannot be used with vLLM's ACL graphs",
                why=why,
                fix=f"unset {name}, or set rollout.engine_options.enforce_eager=true",
            )


def _option_traps(env: Mapping[str, str], installed: VllmAscend, use: EngineUse) -> Iterator[ConfigError]:
    block = use.options.get("block_size", _BLOCK)
    if block != _BLOCK and use.one_block_size:
        yield ConfigError(
            f"rollout.engine_options.block_size={block} has no effect on NPUs",
            why=f"vllm-ascend would use {_BLOCK} without an error",
            fix="remove it",
        )
    to_all = use.options.get("all2all_backend", env.get("VLLM_ALL2ALL_BACKEND", _ALL_TO_ALL))
    if to_all != _ALL_TO_ALL:
        yield ConfigError(
            f"experts cannot travel by {to_all} on NPUs",
            why=f"vllm-ascend uses {_ALL_TO_ALL} without an error; its experts are wrong with vLLM's other ways",
            fix="remove all2all_backend from rollout.engine_options, and unset VLLM_ALL2ALL_BACKEND",
        )
    given = use.options.get("additional_config")
    if isinstance(given, Mapping) and "rl_config" in given and not installed.knows("rl_config"):
        yield ConfigError(
            "rollout.engine_options.additional_config.rl_config has no effect",
            why=f"vllm-ascend {'.'.join(map(str, installed.version))} does not know it, and ignores it",
            fix="remove it; enable_sleep_mode_extra_cleanup=true frees graphs and groups in a sleep",
        )


def _keep_segments_shareable(env: MutableMapping[str, str]) -> None:
    """Say that expandable segments are off, unless the user says something about them.

    Without a word vllm-ascend turns them on, except for sleeping engines. Then other processes cannot open this
    process's memory, by which vLLM's processes get weights.
    """
    name = ALLOCATOR[0]
    said = env.get(name, "")
    if "expandable_segments" not in said and not any(other in said for other in _SEGMENTS_EXCLUDE):
        env[name] = ",".join(filter(None, [said, _NO_SEGMENTS]))


def _described(directory: Path) -> dict[str, Any]:
    """Return the keys of the model's config.json, with those of its text model; none without the file."""
    file = directory / "config.json"
    found = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return {**found, **(found.get("text_config") or {})}
