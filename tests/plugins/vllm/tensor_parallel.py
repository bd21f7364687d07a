"""A rollout process with two tensor-parallel workers, which are processes of their own.

``python -m tests.plugins.vllm.tensor_parallel MODEL TRANSPORT...``: one engine receives by each transport in turn. With
PLAIN in the environment vLLM does not pack its linear layers, so each worker receives its shares straight into its
parameters.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from hwrl.comm import connect_store, store_address
from hwrl.errors import EngineError
from hwrl.interfaces import LoraSettings
from hwrl.rollout import INCARNATION
from hwrl.weights import WeightSender
from hwrl_vllm.engine import VllmEngine
from tests.plugins.vllm.linked import Linked, interrupted
from tests.plugins.vllm.serving import ON_HOST, Policy, Weights, engine_of, finish, generate, requests_of
from tests.support.speed import slow

PLAIN = "HWRL_TEST_PLAIN"

if os.environ.get(PLAIN) and ON_HOST:  # also in the workers, which import this module when they start
    import vllm._custom_ops

    vllm._custom_ops._supports_onednn = False


def main(model_directory: Path, transports: list[str]) -> None:
    policy, plain = Policy(model_directory), bool(os.environ.get(PLAIN))
    engine = engine_of(model_directory, tensor_parallel=2, engine_core="inline" if plain else "process")
    for transport in transports:
        with Linked(engine, transport) as linked:
            for version in range(20):
                assert linked.update(version, policy.change())
                assert linked.report is not None and linked.report.receivers in (2, 0)
                check(engine, policy, version)
            if plain:
                assert all(engine.core.call_workers(lambda worker: worker.hwrl_loading.copies is not None))
            engine.load_weights(policy.change().items(), version=20)  # as with weights.keep_old_version
            check(engine, policy, 20)
            _check_a_dead_sender(linked, policy)
            if transport == transports[-1]:
                if not plain:
                    _check_adapter(model_directory, transport)
                _check_a_dead_worker(linked, policy, inline=plain)
    engine.close()


def check(engine: VllmEngine, policy: Policy, version: int) -> None:
    requests = requests_of(4)
    responses = generate(engine, requests)
    policy.check_greedy(requests, responses)
    assert all(set(response.versions.tolist()) == {version} for response in responses.values())


def _check_a_dead_sender(linked: Linked, policy: Policy) -> None:
    """The sender dies in the middle: no mixture serves, and the next sender's version does."""
    engine = linked.engine
    assert isinstance(engine, VllmEngine)
    args = (store_address(linked.store), linked.transport, policy.change())
    dying = multiprocessing.get_context("spawn").Process(target=send_and_die, args=args)
    dying.start()
    linked.wait_for_offer()
    replacing = multiprocessing.get_context("spawn").Process(target=wait_and_depose, args=(args[0], dying.pid))
    replacing.start()
    engine.submit(requests_of(2, new=100))
    engine.step()
    assert not linked.link.update() and engine.version == -1
    with pytest.raises(EngineError, match="requests are pending, but the engine has no weights"):
        engine.step()
    dying.join()
    replacing.join()
    assert dying.exitcode == -signal.SIGKILL
    linked.sender = linked.new_sender()
    linked.link.request()
    # On a busy machine the first offer may still be what the dead sender began to store.
    assert linked.update(21, policy.change()) or linked.link.update()
    versions = {version for response in finish(engine).values() for version in response.versions.tolist()}
    assert versions == {20, 21}, "the responses went on with the new version"
    check(engine, policy, 21)


def send_and_die(address: str, transport: str, weights: Weights) -> None:
    sender = WeightSender(connect_store(address), transport=transport, bucket_nbytes=1 << 14, timeout_s=slow(5.0))
    own = {name: tensor.clone() for name, tensor in weights.items()}  # a process lends no memory that it has opened
    source = interrupted(own, lambda: os.kill(os.getpid(), signal.SIGKILL))
    sender.publish(7, source, {INCARNATION: 0})


def wait_and_depose(address: str, pid: int) -> None:
    """Begin a new sender's epoch after process ``pid`` has ended, as a restarted trainer does."""
    while Path(f"/proc/{pid}/stat").exists() and Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z":
        time.sleep(0.01)
    WeightSender(connect_store(address), transport="host")


def _check_a_dead_worker(linked: Linked, policy: Policy, *, inline: bool) -> None:
    """A worker is killed in the middle: the others end, nothing serves, and the sender is not held up for long."""
    children = [child for child in multiprocessing.active_children() if child.name != "EngineCore"]
    worker = children[0].pid if inline else _children(_core_pid())[0]
    assert worker is not None
    began_s = time.monotonic()
    source = interrupted(policy.change(), lambda: os.kill(worker, signal.SIGKILL))
    linked.sender = linked.new_sender(timeout_s=slow(5.0))
    with pytest.raises(EngineError, match=r"version 22 was not (loaded|received)|failed while finishing a step"):
        linked.update(22, source)
    assert time.monotonic() - began_s < slow(40)
    assert linked.engine.version == -1
    linked.engine.submit(requests_of(1))
    with pytest.raises(EngineError, match="the engine has no weights"):
        linked.engine.step()


def _core_pid() -> int:
    (core,) = (child for child in multiprocessing.active_children() if child.name == "EngineCore")
    assert core.pid is not None
    return core.pid


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _check_adapter(model_directory: Path, transport: str) -> None:
    lora = LoraSettings(rank=4, alpha=8.0)
    policy = Policy(model_directory, lora=lora)
    engine = engine_of(model_directory, lora=lora, tensor_parallel=2, engine_core="inline")
    with Linked(engine, transport, base=True) as linked:
        assert linked.update(1, policy.change()) and (engine.version, engine.base) == (-1, 1)
    for version in range(3):
        engine.load_adapter(policy.change_adapter().items(), version=version, base=1)
        requests = requests_of(4)
        policy.check_greedy(requests, generate(engine, requests))
    engine.submit(requests_of(2, new=40))
    engine.step()
    next(child for child in multiprocessing.active_children() if child.name.startswith("VllmWorker")).kill()
    with pytest.raises(EngineError, match="vLLM failed while generating; its 2 requests are dropped"):
        finish(engine)
    assert (engine.version, engine.base) == (-1, None)
    engine.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
