"""The settings of docs/verl.md and of the GRPO run are verl's: its configuration takes each of them."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from tests.plugins.verl import actors, grpo

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="needs verl: make test-stack-verl"),
    pytest.mark.filterwarnings("default"),  # verl's own
]

PAGE = (Path(__file__).parents[3] / "docs/verl.md").read_text()


def compose(overrides: list[str]) -> Any:
    """Return verl's configuration of its trainer with actors and rollouts on devices of their own."""
    import hydra
    import verl

    folder = Path(str(verl.__file__)).parent / "experimental/one_step_off_policy/config"
    with hydra.initialize_config_dir(str(folder), version_base=None):
        return hydra.compose("one_step_off_ppo_trainer", ["hydra.searchpath=[pkg://verl.trainer.config]", *overrides])


def test_verl_knows_the_settings_of_the_page() -> None:
    blocks = "\n".join(re.findall(r"^```sh\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL))
    settings = re.findall(r"^ +(actor_rollout_ref\.\S+)", blocks, flags=re.MULTILINE)
    assert len(settings) == 6
    options = "+actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.hwrl.timeout_s=30"
    sync = compose([*settings, options]).actor_rollout_ref.rollout.checkpoint_engine
    assert (sync.backend, sync.engine_kwargs.hwrl.timeout_s) == ("hwrl", 30)
    named = set(re.findall(r"\b((?:VERL|HWRL)_\w+)=", PAGE))
    assert set(actors.ENV) >= named, "the tests set each variable that the page names"


def test_verl_composes_the_grpo_run(tmp_path: Path) -> None:
    config = compose(grpo.settings(tmp_path, actors=1, rollouts=1, steps=20))
    assert config.actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module == "hwrl_verl.checkpoint_engine"
    assert config.actor_rollout_ref.model.override_config.attn_implementation == "sdpa", "flash-attn may be missing"
    on_cpu = compose([*grpo.settings(tmp_path, actors=1, rollouts=1, steps=2), *grpo.settings_on_cpu(devices=2)])
    assert on_cpu.ray_kwargs.ray_init.num_gpus == 2
    grpo.write_inputs(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"model", "prompts.parquet", "reward.py"}


def test_verls_trainers_find_the_wait_for_the_last_save() -> None:
    code = (
        "from verl.experimental.separation.engine_workers import DetachActorWorker; "
        "from verl.single_controller.base.decorator import MAGIC_ATTR; "
        "from hwrl_verl.callback import FinishLastSave; FinishLastSave(config={}); "
        "assert hasattr(DetachActorWorker.async_calls_finalize_fn_exec, MAGIC_ATTR)"
    )
    subprocess.run([sys.executable, "-c", code], env=os.environ | actors.ENV, check=True)


def test_the_platform_is_hwrls_only_if_it_is_asked_for() -> None:
    code = (
        "from verl.plugin.platform import PlatformRegistry, get_platform; p = get_platform(); "
        "assert 'hwrl' in PlatformRegistry.registered_names() and type(p).__name__ == {expected!r}, type(p)"
    )
    for platform, expected in (("hwrl", "HwrlPlatform"), ("", "PlatformCUDA")):
        env = {**os.environ, "VERL_PLATFORM": platform, "HWRL_BACKEND": "cpu"}
        subprocess.run([sys.executable, "-c", code.format(expected=expected)], env=env, check=True)


@pytest.mark.parametrize("own", ["plugin", "checkpoint_engine/test_global_steps_on_cpu.py"])
def test_verls_own_tests_pass_with_the_plugin_installed(own: str, tmp_path: Path) -> None:
    tests = Path(sysconfig.get_path("purelib")) / "tests_of_wheels" / own  # where ci/stack puts them
    command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "--rootdir", str(tmp_path), str(tests)]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert ended.returncode == 0 and " passed" in ended.stdout, ended.stdout[-2000:]
