"""A rollout process holds one model and its receive buffers, and does not read the trainer's files."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch

from hwrl.comm import serve_store, store_address
from hwrl.errors import CommError, ConfigError, DataError
from hwrl.interfaces import PromptGroup
from hwrl.models import build_model, load_model
from hwrl.rollout import INCARNATION, EmbeddedEngine, PromptLease, Rollouter
from hwrl.run.build import build_rollouter, run_tokenizer, training_prompts
from hwrl.run.config import Config, load_config
from hwrl.run.demo import write_demo
from hwrl.run.identity import identify_inputs
from hwrl.testing.processes import Processes
from hwrl.weights import WeightSender

SLACK_NBYTES = 60 << 20
"""Memory for generation, connections and the allocator, beside the weights."""


class OnePrompt:
    """A ledger with one prompt. It keeps the finished group."""

    def __init__(self) -> None:
        self.groups: list[PromptGroup] = []
        self._given = False

    def lease(self, count: int) -> Future[list[PromptLease]]:
        answer: Future[list[PromptLease]] = Future()
        if not self._given:
            answer.set_result([PromptLease(0, 0, 2, 0)])
        self._given = True
        return answer

    def complete(self, groups: Sequence[PromptGroup], stats: dict[str, float]) -> None:
        self.groups += groups

    def fail(self, lease: PromptLease, reason: str) -> None:
        raise AssertionError(reason)

    def renew(self, leases: Sequence[PromptLease]) -> None:
        pass


def memory_nbytes(name: str) -> int:
    """Return this process's memory: ``VmRSS`` now, ``VmHWM`` at its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(f"{name}:")).split()[1])


def built(config: Config, *, address: str, ledger: OnePrompt) -> Rollouter:
    inputs = identify_inputs(config)
    tokenizer = run_tokenizer(config, inputs)
    return build_rollouter(
        config, inputs=inputs, replica="r0", seed=1, store_address=address, ledger=ledger, tokenizer=tokenizer
    )


def roll_out(rank: int, config: Config, address: str) -> tuple[int, list[str]]:
    """Receive two versions and generate a group; return the growth of peak memory, and the opened files."""
    build_model(config.model.path, dtype=torch.float32)  # imports first, so that they do not count
    torch.set_num_threads(1)
    before_nbytes = memory_nbytes("VmRSS")
    opened: list[str] = []
    sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)
    ledger = OnePrompt()
    rollouter = built(config, address=address, ledger=ledger)
    while not ledger.groups:
        rollouter.step()
    assert rollouter.engine.version == 2
    return memory_nbytes("VmHWM") - before_nbytes, opened


def test_the_first_replica_checks_all_prompts_and_the_others_those_that_they_get(tmp_path: Path) -> None:
    config = load_config(write_demo(tmp_path, seed=1, prompts=16), ["data.max_prompt_tokens=4"])
    inputs = identify_inputs(config)
    tokenizer = run_tokenizer(config, inputs)
    with pytest.raises(DataError, match=r"line \d+ has a prompt of \d tokens"):
        training_prompts(config, inputs, tokenizer, check=True)
    stream = training_prompts(config, inputs, tokenizer)
    with pytest.raises(DataError, match=r"line \d+ has a prompt of \d tokens"):
        for number in range(16):
            assert len(stream[number].token_ids) <= 4


def test_an_end_of_sequence_token_outside_the_vocabulary_is_refused(tmp_path: Path) -> None:
    config = load_config(write_demo(tmp_path, seed=1, prompts=16))
    (config.model.path / "generation_config.json").write_text('{"eos_token_id": [1, 999]}')
    with pytest.raises(ConfigError, match=r"token 999 ends a response, and the model has \d+ tokens \(vocab_size"):
        built(config, address="", ledger=OnePrompt())


def test_a_replica_that_cannot_join_the_link_leaves_no_process_and_no_open_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(address: str) -> None:
        raise CommError("no store", why="a test", fix="none")

    closed: list[EmbeddedEngine] = []
    monkeypatch.setattr("hwrl.run.build.connect_store", refuse)
    monkeypatch.setattr(EmbeddedEngine, "close", lambda engine: closed.append(engine))
    config = load_config(write_demo(tmp_path, seed=1, prompts=16))
    with pytest.raises(CommError, match="no store"):
        built(config, address="", ledger=OnePrompt())
    assert len(closed) == 1
    assert "reward" not in [thread.name for thread in threading.enumerate()], "it ends with its processes"


@pytest.mark.parametrize(("transport", "models"), [("device", 3), ("host", 5)])
def test_a_rollout_process_holds_one_model_and_its_rooms_and_reads_no_weights(
    tmp_path: Path, transport: str, models: int
) -> None:
    """``models`` counts the engine's, buffers for two versions, and the host store's two in the trainer's memory."""
    path = write_demo(tmp_path, seed=1, prompts=16, hidden=512, layers=8)
    config = load_config(path, ["rollout.max_running=16"])
    weights = load_model(config.model.path, dtype=torch.float32).state_dict()
    model_nbytes = sum(tensor.nbytes for tensor in weights.values())
    (config.model.path / "model.safetensors").unlink()  # reading it would fail
    (config.dir / "checkpoints").mkdir(parents=True)
    store = serve_store()
    with (
        WeightSender(store, transport=transport) as sender,
        Processes(roll_out, 1, config, store_address(store), timeout_s=1200.0) as processes,
    ):
        sender.wait_for_receivers(1, timeout_s=900.0)
        for version in (1, 2):
            sender.publish(version, weights.items(), {INCARNATION: 0})
        outcome = processes.wait(0)
    assert outcome.error is None, outcome.error
    peak_nbytes, opened = outcome.value
    assert (models - 1) * model_nbytes < peak_nbytes < models * model_nbytes + SLACK_NBYTES
    assert any("config.json" in name for name in opened)
    assert not [name for name in opened if name.startswith(str(config.dir))]
