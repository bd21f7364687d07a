"""Base and adapter on two links by ipc, between two processes; test_sync_plan.py has the other transports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hwrl.comm import await_keys, connect_store, serve_store, store_address
from hwrl.testing.processes import run_processes
from tests.support.adapter_link import REQUESTS, Replica, Trainer
from tests.support.adapters import expected, reference, tokens_of
from tests.support.weight_link import opened_memories

VERSIONS = range(1, 7)


def _train_and_serve(rank: int, address: str, directory: Path) -> Any:
    store = connect_store(address)
    if rank == 0:
        trainer, plans, left = Trainer(store, "ipc"), [], []
        for version in VERSIONS:
            assert not await_keys(store, [f"wants {version}"], timeout_s=300.0)
            left.append((store.num_keys() - version, opened_memories()))
            plans.append(trainer.publish(version).plan.what)
        trainer.sender.close()
        return plans, left
    replica, trainer = Replica(store), Trainer(serve_store(), "ipc")
    opened = []
    for version in VERSIONS:
        store.set(f"wants {version}", "")
        while replica.engine.version != version:
            replica.catch_up()
        model = reference(trainer.base, trainer.adapter(version), directory)
        assert tokens_of(replica.engine, REQUESTS) == [expected(model, request) for request in REQUESTS], version
        opened.append(opened_memories())
        if version % 2 == 0:
            replica.engine.sleep(level=2)
            replica.updater.release()
            replica.engine.wake()
    return opened


def test_a_base_and_its_adapters_come_by_two_links_at_once(tmp_path: Path) -> None:
    store = serve_store()
    (plans, left), opened = run_processes(_train_and_serve, 2, store_address(store), tmp_path)
    assert plans == ["base + adapter", "adapter"] * 3
    assert left[4:] == left[2:4], "the store, or what the trainer shares, grows"
    assert opened == [0] * 6, "the trainer cannot free what a replica has open"
