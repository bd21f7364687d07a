"""The engine over an engine core that fails or refuses; needs no vLLM."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import pickle
import queue
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hwrl.discovery import get_backend
from hwrl.errors import DeviceMemoryError, EngineError
from hwrl.interfaces import Backend, GenerationRequest, RolloutSettings, Sampling, WeightOffer
from hwrl_cpu import INFO, CpuBackend
from hwrl_vllm import engine as engine_module
from hwrl_vllm.causes import CAUSES
from hwrl_vllm.core import Core, ProcessCore
from hwrl_vllm.engine import VllmEngine
from hwrl_vllm.scheduler import NewTokens
from hwrl_vllm.worker import WeightLoading

SETTINGS = RolloutSettings(model_directory=Path("/m"), dtype=torch.float32, eos_ids=[1], max_running=8, max_length=64)
REFUSED = 13
Make = Callable[..., VllmEngine]


class DeadError(Exception):
    """As vLLM's EngineDeadError."""


class FakeCore(Core):
    """Takes requests, and gives the tokens in ``tokens``."""

    def __init__(self) -> None:
        super().__init__(None)
        self.given: list[Any] = []
        self.aborted: list[str] = []
        self.tokens: list[NewTokens] = []
        self.failing: set[str] = set()
        self.taken: list[Any] = []  # by each worker, of an offer
        self.workers: list[WeightLoading] = []
        self.called: list[str] = []  # of the workers
        self.is_closed = False

    @property
    def has_ended(self) -> bool:
        return bool(self.failing)

    def add(self, request: Any) -> None:
        self._fail("add")
        self.given.append(request)

    def abort(self, request_ids: Any) -> None:
        self._fail("abort")
        self.aborted += request_ids

    def next_tokens(self) -> list[NewTokens]:
        self._fail("next_tokens")
        return self.tokens

    def pause(self) -> list[NewTokens]:
        return []

    def call(self, method: str, *args: Any) -> Any:
        self._fail(method)
        if method != "collective_rpc":
            return None
        name, _, arguments, _ = args
        self.called.append(name)
        if name == WeightLoading.hwrl_receive.__name__:
            return self.taken
        return [getattr(worker, name)(*arguments) for worker in self.workers]

    def close(self) -> None:
        self.is_closed = True

    def _fail(self, method: str) -> None:
        if method in self.failing:
            raise DeadError("see stack trace above")


def process_inputs(name: str, prompt: dict[str, Any], *args: Any, **options: Any) -> SimpleNamespace:
    if REFUSED in prompt["prompt_token_ids"]:
        raise ValueError("no such token")
    return SimpleNamespace(request_id=name, prompt=prompt["prompt_token_ids"], cache_salt=prompt["cache_salt"])


@pytest.fixture
def core() -> FakeCore:
    return FakeCore()


@pytest.fixture
def make(core: FakeCore, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Return a maker of engines without weights; the workers are in this process if ``engine_core`` is inline."""
    vllm = SimpleNamespace(engine_core=None, input_processor=SimpleNamespace(process_inputs=process_inputs))
    monkeypatch.setenv(CAUSES, "")  # so that its value comes back
    monkeypatch.setattr(engine_module, "build_model", lambda *args, **options: torch.nn.Linear(2, 2))
    monkeypatch.setattr(engine_module, "start_vllm", lambda *args, **options: vllm)
    monkeypatch.setattr(engine_module, "vllm_sampling", lambda *args: None)
    monkeypatch.setattr(engine_module, "core_of", lambda client: core)
    with contextlib.ExitStack() as made:

        def engine_of(engine_core: str, *, backend: Backend | None = None, **settings: Any) -> VllmEngine:
            options = {"engine_core": engine_core}
            engine = VllmEngine(replace(SETTINGS, **settings), options=options, backend=backend or get_backend())
            made.callback(engine.close)
            return engine

        yield engine_of


@pytest.fixture
def engine(make: Make) -> VllmEngine:
    return make("inline")


def load(engine: VllmEngine, version: int) -> None:
    engine.load_weights(torch.nn.Linear(2, 2).state_dict().items(), version=version)


def offer(version: int, members: tuple[int | None, ...] = (1,)) -> WeightOffer:
    return WeightOffer(
        store="", link="policy", proposal=version, version=version, members=members, timeout_s=1.0, limit_s=9.0
    )


def request(number: int, token: int = 3) -> GenerationRequest:
    return GenerationRequest(number, np.array([token], np.int32), Sampling(8))


def test_an_engine_serves_only_what_all_its_workers_hold(make: Make, core: FakeCore) -> None:
    engine = make("process", tensor_parallel=2)
    engine.submit([request(1)])
    core.taken = [[7, 1, 5, "", False], [0, 0, -1, "the bytes were others", False]]  # as they come through msgpack
    assert engine.receive_weights(offer(5, (1, 2))) is None and engine.version == -1 and not core.given
    core.taken = [None, [8, 1, 5, "", False]]
    assert engine.receive_weights(offer(5, (None, 3))) == 8 and engine.version == 5 and len(core.given) == 1
    core.taken = [[9, 1, 6, "", False], [0, 0, -1, "ValueError: no room", True]]
    with pytest.raises(EngineError, match="receiver 1: ValueError: no room"):
        engine.receive_weights(offer(6, (1, 3)))
    assert engine.version == -1


def test_weights_that_were_lost_are_not_counted_as_held(engine: VllmEngine, core: FakeCore) -> None:
    core.taken = [[7, 1, 5, "", False]]
    assert engine.receive_weights(offer(5)) == 7 and engine.version == 5
    core.failing = {"next_tokens"}
    engine.submit([request(1)])
    with pytest.raises(EngineError, match="while generating"):
        engine.step()
    core.failing, core.taken = set(), [None]
    assert engine.receive_weights(offer(5, (None,))) is None and engine.version == -1


def test_each_call_of_a_worker_is_one_of_its_methods(make: Make, core: FakeCore) -> None:
    engine = make("process", free_cache_engine=True)
    load(engine, 1)
    assert core.called == ["hwrl_follow_logprobs_mode", "hwrl_record", "hwrl_prepare_sleep", "hwrl_load_lent"]
    engine.receive_weights(offer(5, (None,)))
    engine.sleep(level=1)
    assert set(core.called) - {"hwrl_record", "hwrl_load_lent"} >= {"hwrl_receive", "hwrl_free_nbytes"}
    assert [name for name in core.called if not callable(getattr(WeightLoading, name, None))] == []


class Noting(WeightLoading):
    """A worker that notes what it loads."""

    def __init__(self) -> None:
        self.loaded: list[Any] = []

    def hwrl_load(self, weights: Any, adapter: Any) -> None:
        self.loaded.append((set(weights), adapter))


class Opened:
    """In place of LentWeights, which only another process can open."""

    def open(self, backend: Any) -> dict[str, torch.Tensor]:
        return {"lent": torch.ones(2)}


@pytest.mark.parametrize("form", [None, {"r": 4}])
def test_a_worker_loads_a_model_or_an_adapter_which_keeps_the_base(
    form: dict[str, Any] | None, engine: VllmEngine, core: FakeCore
) -> None:
    core.workers = [worker := Noting()]
    engine.base = 7
    engine._replace({"a": torch.ones(2)}, name="version 2", adapter=form)
    worker.hwrl_load_lent(pickle.dumps((Opened(), form)))
    assert worker.loaded == [({"a"}, form), ({"lent"}, form)] and engine.base == (7 if form else None)


def test_workers_that_do_not_answer_leave_no_version(engine: VllmEngine, core: FakeCore) -> None:
    load(engine, 1)
    core.failing = {"collective_rpc"}
    with pytest.raises(EngineError, match=r"version 5 was not loaded, and the version before is gone"):
        engine.receive_weights(offer(5))
    assert engine.version == -1


class FullBackend(CpuBackend):
    """A device that is ``full`` later, and then beside the host."""

    full = False

    def device(self, index: int | None = None) -> torch.device:
        return torch.device("meta") if self.full else super().device(index)


def test_weights_that_do_not_fit_beside_the_version_in_use_leave_it_in_use(
    make: Make, core: FakeCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def to(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        raise torch.OutOfMemoryError("tried 1 GiB")

    backend = FullBackend(INFO)
    engine = make("process", backend=backend)
    load(engine, 1)
    engine.submit([request(7)])
    backend.full = True
    with (
        monkeypatch.context() as full,
        pytest.raises(DeviceMemoryError, match="the copy of version 2 for vLLM's workers"),
    ):
        full.setattr(torch.Tensor, "to", to)
        load(engine, 2)
    core.tokens = [NewTokens(core.given[0].request_id, [4], [-1.0], "LENGTH")]
    assert engine.version == 1 and [done.request_id for done in engine.step()] == [7]


@pytest.mark.parametrize("end", ["ABORT", "ERROR", "REPETITION"])
def test_a_request_that_vllm_ends_without_finishing_is_no_response(
    end: str, engine: VllmEngine, core: FakeCore
) -> None:
    load(engine, 1)
    engine.submit([request(7), request(8)])
    core.tokens = [NewTokens(core.given[0].request_id, [4], [-1.0], end)]
    with pytest.raises(EngineError, match=rf"did not finish request 7(.|\n)*ended with {end} after 1 tokens"):
        engine.step()
    assert (engine.version, engine.pending()) == (-1, 0)


@pytest.mark.parametrize(("end", "token"), [("STOP", 1), ("LENGTH", 4)])
def test_a_request_that_vllm_finishes_is_a_response_and_an_aborted_one_is_ignored(
    end: str, token: int, engine: VllmEngine, core: FakeCore
) -> None:
    load(engine, 1)
    engine.submit([request(7)])
    core.tokens = [NewTokens("6-0", [], [], "ABORT"), NewTokens(core.given[0].request_id, [token], [-1.0], end)]
    (done,) = engine.step()
    assert done.request_id == 7 and done.response.truncated == (end == "LENGTH")


@pytest.mark.parametrize("has_weights", [False, True])
def test_a_refused_request_is_told_at_once_and_nothing_of_its_call_is_taken(
    has_weights: bool, engine: VllmEngine, core: FakeCore
) -> None:
    if has_weights:
        load(engine, 1)
    with pytest.raises(EngineError, match=r"vLLM refuses request 2(.|\n)*no such token"):
        engine.submit([request(1), request(2, REFUSED), request(3)])
    assert engine.pending() == 0 and not core.given


def test_waiting_and_restarted_requests_get_the_salt_of_the_weights_that_run_them(
    engine: VllmEngine, core: FakeCore
) -> None:
    engine.submit([request(1)])
    assert not core.given
    load(engine, 1)
    engine.submit([request(2)])
    first = list(core.given)
    load(engine, 2)
    again = core.given[2:]
    assert [one.prompt for one in again] == [[3], [3]] and engine.pending() == 2
    assert core.aborted == [one.request_id for one in first]
    assert len({one.request_id for one in core.given}) == 4
    assert {one.cache_salt for one in first}.isdisjoint(one.cache_salt for one in again)


@pytest.mark.parametrize(
    ("method", "activity"),
    [
        ("next_tokens", "generating"),
        ("add", "taking requests"),
        ("abort", "dropping requests"),
        ("resume_scheduler", "continuing after an update"),
    ],
)
def test_an_error_of_the_engine_core_leaves_the_engine_as_hwrls(
    method: str, activity: str, engine: VllmEngine, core: FakeCore
) -> None:
    load(engine, 1)
    engine.submit([request(1)])
    core.failing = {method}
    calls = {"next_tokens": engine.step, "add": lambda: engine.submit([request(2)]), "abort": engine.abort}
    with pytest.raises(
        EngineError, match=rf"vLLM failed while {activity}(.|\n)*DeadError(.|\n)*make a new engine"
    ) as e:
        calls.get(method, lambda: load(engine, 2))()
    assert "in a run the replica is replaced" in e.value.fix
    assert (engine.version, engine.pending()) == (-1, 0)


def test_an_engine_whose_process_dies_at_the_end_is_closed_all_the_same(engine: VllmEngine, core: FakeCore) -> None:
    """vLLM's client may notice the death between its own check and the message."""
    load(engine, 1)
    engine.submit([request(1)])
    core.failing = {"abort"}
    with pytest.raises(EngineError, match="while dropping requests"):
        engine.close()
    assert core.is_closed and not Path(os.environ[CAUSES]).exists()


def test_the_reason_of_a_failed_step_is_the_error_of_vllms_process(engine: VllmEngine, core: FakeCore) -> None:
    load(engine, 1)
    engine.submit([request(1)])
    core.failing = {"next_tokens"}
    path = Path(os.environ[CAUSES])
    path.write_text('[["IndexError"], "IndexError: row 9"]\n')
    with pytest.raises(EngineError) as raised:
        engine.step()
    assert raised.value.why == "IndexError: row 9"
    core.failing = set()
    load(engine, 2)
    engine.submit([request(2)])
    core.failing = {"next_tokens"}
    path.write_text('[["OutOfMemoryError"], "OutOfMemoryError: tried 1 GiB"]\n')
    with pytest.raises(torch.OutOfMemoryError, match="tried 1 GiB"):
        engine.step()


class FakeClient:
    """vLLM's client after its thread has ended, with ``left`` in the queue; vLLM's process lives."""

    def __init__(self, left: Exception | None) -> None:
        self.utility_results: dict[int, concurrent.futures.Future[Any]] = {}
        self.outputs_queue: queue.Queue[Any] = queue.Queue()
        self.output_queue_thread = SimpleNamespace(is_alive=lambda: False)
        if left is not None:
            self.outputs_queue.put(left)

    def ensure_alive(self) -> None:
        pass

    def _send_input(self, kind: Any, request: Any) -> None:
        pass


@pytest.mark.parametrize("left", [None, OSError("a broken message")])
def test_a_wait_ends_when_nobody_reads_the_answers(left: Exception | None, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = SimpleNamespace(EngineCoreRequestType=SimpleNamespace(UTILITY=b"\x03"))
    monkeypatch.setitem(sys.modules, "vllm.v1.engine", kinds)
    told = "a broken message" if left else "thread that reads the answers"
    with pytest.raises((OSError, RuntimeError), match=told):
        ProcessCore(FakeClient(left), look_s=0.01).call("pause_scheduler")
    with pytest.raises((OSError, RuntimeError), match=told):
        ProcessCore(FakeClient(left), look_s=0.01).next_tokens()
