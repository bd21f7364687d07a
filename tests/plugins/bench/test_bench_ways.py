"""The parts that all benchmarks share: the turns of a plan, the packages of ways, values between processes."""

from __future__ import annotations

import json

import pytest

from hwrl import get_backend
from hwrl.comm import connect_store, serve_store, store_address
from hwrl.testing import run_processes
from hwrl_bench.ways import BenchPlan, Way
from hwrl_bench.worker import BenchWorker


class Missing(Way):
    package, module = "some-package", "a_module_that_is_not_there"


def test_the_ways_take_turns_and_warm_up_rounds_do_not_count() -> None:
    calls: list[tuple[str, int]] = []

    def measure(way: str, number: int) -> int:
        calls.append((way, number))
        return number

    rows = BenchPlan(("a", "b"), rounds=2, warm_up=1).take_turns(measure)
    assert calls == [("a", 0), ("b", 0), ("a", 1), ("b", 1), ("a", 2), ("b", 2)]
    assert rows == {"a": [1, 2], "b": [1, 2]}


def test_ways_of_their_own_processes_are_measured_one_by_one_in_the_order_of_the_plan() -> None:
    calls: list[str] = []
    assert BenchPlan(("b", "a"), rounds=2).one_by_one(calls.append) == {"b": None, "a": None} and calls == ["b", "a"]


def test_a_way_without_its_package_says_so() -> None:
    assert Missing.why_not() == "some-package is not installed"
    assert Way.why_not() is None, "hwrl and torch are there"


def exchange(rank: int, address: str) -> tuple[object, object, tuple[str, int]]:
    worker = BenchWorker.connect(rank, 2, address, get_backend())
    worker.put(f"from/{rank}", {"seconds": [0.5, rank], "done": None})
    worker.barrier()
    worker.barrier()
    return worker.get("from/0"), worker.get("from/1"), worker.free_endpoint()


def test_processes_exchange_json_and_agree_on_an_endpoint() -> None:
    store = serve_store()
    first, second = run_processes(exchange, 2, store_address(store))
    assert first == second and first[2][0] == "127.0.0.1"
    assert first[:2] == ({"seconds": [0.5, 0], "done": None}, {"seconds": [0.5, 1], "done": None})
    raw = connect_store(store_address(store)).get("bench/from/1")
    assert json.loads(raw) == first[1], "any reader of the store may read it; nothing in it is executed"


def test_a_value_that_is_no_json_is_refused() -> None:
    worker = BenchWorker(0, 1, serve_store(), get_backend())
    with pytest.raises(TypeError, match="not JSON serializable"):
        worker.put("tensor", object())
