"""The embedded engine with an adapter, and asleep: tokens are those of transformers and PEFT on the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from peft import PeftModel

from hwrl.errors import ConfigError, EngineError, UnsupportedError
from hwrl.interfaces import LoraSettings
from hwrl.lora import add_adapter, save_adapter
from hwrl.rollout import EmbeddedEngine
from hwrl.saved_names import saved_weights
from hwrl_cpu import INFO, CpuBackend
from tests.support.adapters import LORA, Weights, expected, reference, tokens_of, trained
from tests.support.tiny_model import END, requests_of, tiny_model

BASE = 0xBA5E


def engine_with(base: Weights, adapter: Weights, *, tied: bool = False) -> EmbeddedEngine:
    model = add_adapter(tiny_model(99, tied=tied), LORA)
    engine = EmbeddedEngine(model, eos_ids=[END], max_running=4, max_length=24)
    engine.load_base(base.items(), base=BASE)
    engine.load_adapter(adapter.items(), version=1, base=BASE)
    return engine


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # PEFT asks transformers for it
def test_tokens_are_those_of_peft_on_the_same_weights(tmp_path: Any) -> None:
    (base, adapter), requests = trained(1), requests_of(20, temperature=0.0)
    engine, peft = engine_with(base, adapter), reference(base, adapter, tmp_path)
    assert tokens_of(engine, requests) == [expected(peft, request) for request in requests]
    with peft.disable_adapter():
        assert tokens_of(engine, requests) != [expected(peft, request) for request in requests]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("level", [1, 2])
def test_a_woken_engine_says_what_it_said_before(level: int, tied: bool) -> None:
    (base, adapter), requests = trained(1, tied=tied), requests_of(10, temperature=0.0)
    engine = engine_with(base, adapter, tied=tied)
    before = tokens_of(engine, requests)
    freed_nbytes = engine.sleep(level=level)
    kept = 0 if level == 1 else sum(buffer.nbytes for buffer in engine.model.buffers())
    assert freed_nbytes == _nbytes_of(engine) - kept
    assert engine.sleep(level=level) == 0, "it sleeps already"
    if level == 2:
        assert (engine.version, engine.base) == (-1, None)
        engine.wake(["weights"])
        engine.load_base(base.items(), base=BASE)
        engine.load_adapter(adapter.items(), version=1, base=BASE)
    assert (engine.version, engine.base) == (1, BASE)
    engine.wake()
    engine.wake()
    assert tokens_of(engine, requests) == before


def _nbytes_of(engine: EmbeddedEngine) -> int:
    """Return the bytes of weights, buffers and attention cache that an engine of the same form holds."""
    model = add_adapter(tiny_model(tied=engine.model.config.tie_word_embeddings), LORA)
    weights = sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()])
    config = model.config
    slots = 4 * 24 * config.num_key_value_heads * config.head_dim * 2 * config.num_hidden_layers
    return int(weights + slots * model.dtype.itemsize)


def test_a_sleeping_engine_frees_memory_by_the_backend_that_it_was_given() -> None:
    class Watched(CpuBackend):
        emptied = 0

        def empty_cache(self) -> None:
            self.emptied += 1

    backend = Watched(INFO)
    engine = EmbeddedEngine(tiny_model(), eos_ids=[END], max_running=2, max_length=8, backend=backend)
    engine.sleep(level=1)
    assert backend.emptied >= 1


def test_a_sleeping_engine_refuses_to_work() -> None:
    base, adapter = trained(1)
    engine = engine_with(base, adapter)
    engine.submit(requests_of(1, temperature=0.0))
    with pytest.raises(EngineError, match="1 requests are pending"):
        engine.sleep(level=1)
    engine.abort()
    engine.sleep(level=1)
    with pytest.raises(EngineError, match="it sleeps: kv_cache, weights"):
        engine.step()
    with pytest.raises(EngineError, match="it sleeps: weights"):
        engine.load_adapter(adapter.items(), version=2, base=BASE)


def test_an_adapter_is_served_on_its_own_base_only() -> None:
    (base, adapter), requests = trained(1), requests_of(4, temperature=0.0)
    engine = engine_with(base, adapter)
    before = tokens_of(engine, requests)
    with pytest.raises(EngineError, match="was trained on base 0x7, and the model holds 0xba5e"):
        engine.load_adapter(trained(2)[1].items(), version=2, base=7)
    assert engine.version == 1
    assert tokens_of(engine, requests) == before
    engine.load_base(trained(2)[0].items(), base=7)
    engine.submit(requests)
    with pytest.raises(EngineError, match="no weights"):
        engine.step()


def test_the_other_kind_of_weights_is_refused() -> None:
    base, adapter = trained(1)
    with pytest.raises(EngineError, match="do not belong to this model"):
        engine_with(base, {name: tensor for name, tensor in adapter.items() if "q_proj" in name})
    with pytest.raises(UnsupportedError, match="load_base, then load_adapter"):
        engine_with(base, adapter).load_weights(base.items(), version=1)
    plain = EmbeddedEngine(tiny_model(), eos_ids=[END], max_running=4, max_length=24)
    with pytest.raises(UnsupportedError, match="serves no adapter"):
        plain.load_base(base.items(), base=BASE)


def test_a_model_without_such_layers_gets_no_adapter() -> None:
    with pytest.raises(ConfigError, match=r"correct model\.target_modules"):
        add_adapter(tiny_model(), LoraSettings(rank=4, alpha=8.0, target_modules=("no_such_layer",)))


@pytest.mark.filterwarnings("ignore::FutureWarning")  # PEFT uses what is deprecated in transformers
def test_an_adapter_on_all_linear_layers_of_a_mixture_leaves_the_experts_alone(tmp_path: Path) -> None:
    model = tiny_model(experts=4)
    base = model.state_dict().keys()
    lora = LoraSettings(rank=2, alpha=4.0)
    _, adapter = saved_weights(add_adapter(model, lora))
    layers = {name.partition(".lora_")[0].rpartition(".")[2] for name in adapter}
    assert layers == {"q_proj", "k_proj", "v_proj", "o_proj"}
    save_adapter(tmp_path, adapter, config=lora.peft_config(), model_directory=tmp_path)
    loaded = PeftModel.from_pretrained(tiny_model(experts=4), tmp_path)
    names = {name for name in loaded.base_model.model.state_dict() if ".lora_" not in name}
    assert {name.replace(".base_layer.", ".") for name in names} == base


@pytest.mark.parametrize(
    ("targets", "why"),
    [
        (("gate", "q_proj"), r"experts or their router, which hwrl cannot serve: model\.layers\.0\.mlp\.gate"),
        (r".*\.down_proj", r"experts or their router, which hwrl cannot serve: model\.layers\.0\.mlp\.experts"),
        (("q_proj", "gate_up_proj"), "no layer that can have an adapter is called gate_up_proj"),
    ],
)
def test_an_adapter_on_experts_is_refused(targets: str | tuple[str, ...], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        add_adapter(tiny_model(experts=4), LoraSettings(rank=2, alpha=4.0, target_modules=targets))
