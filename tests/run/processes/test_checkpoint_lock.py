"""A trainer that starts again waits for the process before it, which may still end on a host that was cut off."""

import logging
from pathlib import Path

import pytest

from hwrl.checkpoint import DirectoryLock
from hwrl.run.build import build_checkpoints
from hwrl.run.config import load_config
from hwrl.run.demo import write_demo


def test_the_checkpoints_of_a_run_wait_for_the_trainer_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HWRL_BACKEND", "cpu")
    config = load_config(write_demo(tmp_path, seed=1, prompts=16), [])
    (config.dir / "checkpoints").mkdir(parents=True)
    before = DirectoryLock(config.dir / "checkpoints")

    class EndsTheTrainerBefore(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            before.close()

    logger, handler = logging.getLogger("hwrl.checkpoint"), EndsTheTrainerBefore()
    logger.addHandler(handler)
    try:
        build_checkpoints(config, group=None).close()
    finally:
        logger.removeHandler(handler)
