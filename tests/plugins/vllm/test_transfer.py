"""A real ``vllm serve`` whose weights come from transformers' model in another process, through the backend "hwrl"."""

from __future__ import annotations

import copy
import importlib.util
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hwrl.discovery import get_backend
from hwrl.errors import EngineError
from hwrl.weights import WeightSource
from hwrl_vllm import LocalClient, ServerClient, TransferTrainer, TransferTrainerInit
from tests.plugins.vllm.serving import BLOCK, DTYPE, LONGEST, ON_HOST, Policy
from tests.plugins.vllm.vllm_server import PLAIN, REPO, VllmServer, of_page, on_device, vllm_server
from tests.support.speed import slow

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM: make test-vllm"),
    pytest.mark.filterwarnings("default"),
]
TRANSPORT = "device" if ON_HOST else "ipc"  # a device has room for one process of NCCL


@pytest.fixture(scope="module", params=[1, 2], ids=["one worker", "two workers"])
def server(
    model_directory: Path, policy: Policy, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[VllmServer]:
    """With one worker vLLM's loaders pack the layers (on CPUs), with two they only copy."""
    if not ON_HOST and torch.accelerator.device_count() < request.param:
        pytest.skip(f"needs {request.param} devices")
    log = tmp_path_factory.mktemp("server") / "log"
    options = [] if request.param == 1 else ["--tensor-parallel-size", "2", *PLAIN]
    with vllm_server(model_directory, log, *options) as server:
        server.check(Policy(model_directory))  # the weights of the directory
        yield server


@pytest.fixture(scope="module")
def trained(policy: Policy) -> Any:
    """A plain transformers model on this process's device, with the policy's weights after each :func:`change`."""
    return copy.deepcopy(policy.model).to(get_backend().device())


def change(policy: Policy, trained: Any) -> None:
    policy.change()
    trained.load_state_dict(policy.model.state_dict())


def trainer_for(server: VllmServer, source: Any, **settings: Any) -> TransferTrainer:
    settings = {"transport": TRANSPORT, **settings}
    return TransferTrainer(TransferTrainerInit(**settings), client=ServerClient(server.url), source=source)


def update(server: VllmServer, trainer: TransferTrainer) -> None:
    """Send a version as a trainer does, which empties the cache of prefixes."""
    client = ServerClient(server.url)
    client.pause()
    try:
        trainer.send_weights()
    finally:
        client.resume()


def test_tokens_and_log_probabilities_are_transformers_after_each_update_by_vllms_own_trainer_api(
    server: VllmServer, policy: Policy, trained: Any
) -> None:
    from vllm.distributed.weight_transfer import base

    if not hasattr(base, "ModuleSource"):
        pytest.skip("vLLM's own trainer API came with 0.28")
    from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    client, source = HTTPVLLMWeightSyncClient(server.url), base.ModuleSource(trained)
    trainer = WeightTransferTrainerFactory.trainer_init(
        TransferTrainerInit(transport=TRANSPORT), client=client, source=source
    )
    for _ in range(4):
        change(policy, trained)
        update(server, trainer)
        server.check(policy)
    trainer.shutdown()


@pytest.mark.skipif(not ON_HOST, reason="the page's trainer has a device of its own")
def test_the_page_updates_it(server: VllmServer, policy: Policy, trained: Any) -> None:
    block = of_page(r"```python\n(from hwrl.weights import WeightSource\nfrom hwrl_vllm .*?)```")
    change(policy, trained)
    exec(compile(block.replace("http://127.0.0.1:8000", server.url), "vllm.md", "exec"), {"model": trained})
    server.check(policy)


@pytest.mark.parametrize("transport", ["device", "ipc", "host"] if ON_HOST else ["ipc", "host"])
@pytest.mark.parametrize("keep_old_version", [True, False], ids=["staged", "in place"])
def test_every_transport_updates_it(
    server: VllmServer, policy: Policy, trained: Any, transport: str, keep_old_version: bool
) -> None:
    source = WeightSource.from_module(trained)
    trainer = trainer_for(server, source, transport=transport, keep_old_version=keep_old_version)
    for _ in range(2):
        change(policy, trained)
        update(server, trainer)
        server.check(policy)
    trainer.shutdown()


@pytest.mark.parametrize("keeps", ["keep", "lose"])
def test_after_a_trainer_was_killed_in_a_transfer_the_next_one_updates_it(
    server: VllmServer, policy: Policy, trained: Any, model_directory: Path, keeps: str
) -> None:
    change(policy, trained)
    source = WeightSource.from_module(trained)
    update(server, trainer_for(server, source))
    command = [sys.executable, "-m", "tests.plugins.vllm.killed_trainer", server.url, str(model_directory), keeps]
    assert subprocess.run(command, cwd=REPO, check=False).returncode == -signal.SIGKILL
    if keeps == "keep":
        server.check(policy)
    change(policy, trained)
    update(server, trainer_for(server, source))
    server.check(policy)


def test_a_failed_update_leaves_the_old_version_and_a_server_that_takes_the_next(
    server: VllmServer, policy: Policy, trained: Any
) -> None:
    change(policy, trained)
    fails = [False]

    def read() -> Iterator[tuple[str, torch.Tensor]]:
        for number, (name, tensor) in enumerate(trained.named_parameters()):
            if fails[0] and number == 3:
                raise RuntimeError("the trainer's error")
            yield name, tensor.detach()

    trainer = trainer_for(server, WeightSource(trained.named_parameters, read), timeout_s=slow(5.0))
    trainer.send_weights()
    fails[0] = True
    with pytest.raises(RuntimeError, match="the trainer's error"):
        update(server, trainer)
    server.check(policy)
    fails[0] = False
    change(policy, trained)
    update(server, trainer)
    server.check(policy)


def test_the_weights_of_another_model_are_refused_and_the_old_version_serves(
    server: VllmServer, policy: Policy, trained: Any
) -> None:
    change(policy, trained)
    update(server, trainer_for(server, WeightSource.from_module(trained)))
    other = trainer_for(server, WeightSource.from_module(torch.nn.Linear(2, 2)))
    for _ in range(2):
        with pytest.raises(EngineError, match=r"the old version serves(.|\n)*unknown: \['bias', 'weight'\]"):
            update(server, other)
    server.check(policy)


@pytest.mark.parametrize("workers", [1, 2])
def test_an_llm_in_the_trainers_process_is_updated(
    policy: Policy, trained: Any, model_directory: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    """As with :func:`server`: one worker packs the layers (on CPUs), two only copy."""
    from vllm import LLM, SamplingParams

    if not ON_HOST and torch.accelerator.device_count() < workers:
        pytest.skip(f"needs {workers} devices")
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # this process has threads
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    settings: dict[str, Any] = {"max_model_len": LONGEST, "block_size": BLOCK, "kv_cache_memory_bytes": 64 << 20}
    settings |= {"enforce_eager": True} | on_device()
    settings |= {} if workers == 1 else {"tensor_parallel_size": workers, "worker_extension_cls": PLAIN[1]}
    llm = LLM(
        str(model_directory),
        dtype=str(DTYPE).removeprefix("torch."),
        enable_prefix_caching=False,
        weight_transfer_config={"backend": "hwrl"},
        **settings,
    )
    source = WeightSource.from_module(trained)
    trainer = TransferTrainer(TransferTrainerInit(transport=TRANSPORT), client=LocalClient(llm), source=source)
    sampling = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    for _ in range(3):
        change(policy, trained)
        trainer.send_weights()
        (output,) = llm.generate([{"prompt_token_ids": [5, 6, 7]}], sampling, use_tqdm=False)
        with torch.no_grad():
            wanted = policy.model(torch.tensor([[5, 6, 7]])).logits[0, -1].argmax()
        assert list(output.outputs[0].token_ids) == [int(wanted)]
    trainer.shutdown()
    llm.llm_engine.engine_core.shutdown()  # its workers would live as long as pytest
