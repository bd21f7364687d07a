"""How a replica gets its weights: straight into the engine, or through room for two versions."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hwrl.comm import serve_store, store_address
from hwrl.interfaces import LoraSettings
from hwrl.rollout import AdapterUpdater, EngineModels, ReceivedModels
from hwrl.run.build import build_model_link, build_updater
from hwrl.weights import POLICY, POLICY_BASE
from tests.support.scripted_rollout import CountingEngine


def config_of(*, keep_old_version: bool, lora: LoraSettings | None) -> Any:
    return SimpleNamespace(
        weights=SimpleNamespace(timeout_s=5.0, keep_old_version=keep_old_version),
        async_training=SimpleNamespace(partial_rollout=True),
        model=SimpleNamespace(lora=lora),
    )


@pytest.mark.parametrize("lora", [None, LoraSettings(rank=4, alpha=8.0)])
@pytest.mark.parametrize(
    ("receivers", "keep_old_version", "link"),
    [(1, False, EngineModels), (2, False, EngineModels), (2, True, ReceivedModels), (0, False, ReceivedModels)],
)
def test_the_engine_receives_itself_if_it_can_and_the_old_version_need_not_stay(
    receivers: int, keep_old_version: bool, link: Any, lora: LoraSettings | None
) -> None:
    store, engine = serve_store(), CountingEngine()
    engine.receivers = receivers
    config = config_of(keep_old_version=keep_old_version, lora=lora)
    updater = build_updater(config, engine, store_address=store_address(store), replica="r0")
    assert type(updater) is (link if lora is None else AdapterUpdater)
    name = POLICY if lora is None else POLICY_BASE
    made = build_model_link(config, engine, name=name, store_address=store_address(store), replica="r1")
    assert type(made) is link
    made.close()
