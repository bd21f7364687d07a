"""A trainer that is killed in the middle of a transfer: ``python -m … URL MODEL keep|lose``."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from hwrl_vllm import ServerClient, TransferTrainer, TransferTrainerInit
from tests.plugins.vllm.linked import interrupted
from tests.plugins.vllm.serving import ON_HOST, Policy


def main(url: str, model_directory: Path, *, keep_old_version: bool) -> None:
    weights = Policy(model_directory).change()
    source = interrupted(weights, lambda: os.kill(os.getpid(), signal.SIGKILL))
    settings = TransferTrainerInit(
        keep_old_version=keep_old_version,
        transport="device" if ON_HOST else "ipc",
        bucket_nbytes=1 << 14,  # many buckets, so that some are sent
        timeout_s=200.0,
    )
    TransferTrainer(settings, client=ServerClient(url), source=source).send_weights()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), keep_old_version=sys.argv[3] == "keep")
