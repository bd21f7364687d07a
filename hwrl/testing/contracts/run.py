"""The contract of a whole run: ``hwrl train`` with the subject, for a few steps."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import pytest

from hwrl.interfaces import Backend
from hwrl.run import read_metrics
from hwrl.run.demo import write_demo
from hwrl.testing.levels import Kind, Level
from hwrl.testing.limits import scaled
from hwrl.testing.subject import Subject

_STEPS = 3
_TIMEOUT_S = 600.0
_NEEDED = ("ray", "pydantic", "transformers", "tensorboard")
_COMMAND = "import sys; from hwrl.cli import main; sys.exit(main())"
_SHORT = (
    f"train.steps={_STEPS}",
    "train.batch_groups=4",
    "rollout.n=4",
    "rollout.max_running=16",
    f"checkpoint.save_every_steps={_STEPS}",
    f"eval.every_steps={_STEPS}",
    "eval.prompts=16",
    "goals={}",
)


class RunContract:
    """A run trains, publishes weights to its replica, evaluates, and saves a checkpoint."""

    level: ClassVar[Level] = Level.FULL

    def test_a_short_run_ends_well(self, backend: Backend, subject: Subject, tmp_path: Path) -> None:
        """``hwrl train`` of the demo ends with status 0, with all steps in its metrics and a complete checkpoint."""
        missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
        if missing:
            pytest.skip(f"a run needs {', '.join(missing)}: pip install 'hwrl[train]'")
        config = write_demo(tmp_path, seed=1, prompts=64)
        words = [*_SHORT, *_engine_words(subject)]
        ended = _run([sys.executable, "-P", "-c", _COMMAND, "train", str(config), *words], backend, tmp_path)
        assert ended.returncode == 0, "\n".join([ended.stdout[-4000:], ended.stderr[-4000:]])
        assert [row["step"] for row in read_metrics(tmp_path / "run")] == list(range(1, _STEPS + 1))
        assert (tmp_path / "run" / "checkpoints" / f"global_step_{_STEPS}" / "MANIFEST.json").is_file()


def _engine_words(subject: Subject) -> Sequence[str]:
    part = {Kind.TRAIN_ENGINE: "train", Kind.ROLLOUT_ENGINE: "rollout"}.get(subject.kind)
    if part is None:
        return ()
    options = [f"{part}.engine_options={json.dumps(dict(subject.options))}"] if subject.options else []
    return (f"{part}.engine={subject.name}", *options)


def _run(command: Sequence[str], backend: Backend, folder: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, sys.path))
    env = os.environ | {"HWRL_BACKEND": backend.info.name, "PYTHONPATH": path}
    return subprocess.run(
        command, env=env, cwd=folder, text=True, capture_output=True, check=False, timeout=scaled(_TIMEOUT_S)
    )
