"""Layers are recomputed in the backward pass as memory needs it, and no step changes."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
import torch

from hwrl.interfaces import EngineSettings, MemoryInfo
from hwrl.run.demo import write_demo
from hwrl.train import FsdpEngine, PolicyLoss
from hwrl.train.activations import ActivationCheckpointing, layers_to_recompute, usable_nbytes
from tests.support.fsdp_training import batch_of, groups_of
from tests.support.roomy import Roomy

LAYERS = 4
_EVERY = batch_of(groups_of(60, seed=0))
BATCH = _EVERY.select((2 * _EVERY.lengths() > _EVERY.lengths().max()).nonzero()[:, 0])  # one pass


@pytest.mark.parametrize(
    ("tokens", "room", "recomputed"),
    [
        (100, 10**9, 0),
        (100, 60_000, 0),  # 10 layers, and twice one for the backward pass
        (100, 59_999, 1),
        (100, 55_500, 1),  # a recomputed layer saves 45 bytes a token
        (100, 55_499, 2),
        (100, 15_000, 10),
        (100, -1, 10),
        (200, 60_000, 7),
        (0, 0, 0),
    ],
)
def test_as_few_layers_are_recomputed_as_fit(tokens: int, room: int, recomputed: int) -> None:
    found = layers_to_recompute(10, tokens, kept_nbytes=50, input_nbytes=5, room_nbytes=room)
    assert found == recomputed


def test_a_layer_that_keeps_no_more_than_its_input_is_not_recomputed() -> None:
    assert layers_to_recompute(10, 100, kept_nbytes=5, input_nbytes=5, room_nbytes=0) == 0


INFO = MemoryInfo(free_nbytes=500, total_nbytes=1600, allocated_nbytes=900, reserved_nbytes=1000, peak_nbytes=1100)


def test_usable_memory_is_the_free_one_with_the_allocators_cache_and_without_a_reserve() -> None:
    assert usable_nbytes(INFO) == 500 + 100 - 100
    assert usable_nbytes(INFO, ranks=2) == 250 + 100 - 50
    assert usable_nbytes(INFO, scores_nbytes=99) == 500 + 100 - 100
    assert usable_nbytes(INFO, scores_nbytes=700) == 500 + 100 - 700


class Scripted(Roomy):
    """Reports what ``allocated`` says, one number a call."""

    def __init__(self, *allocated: int) -> None:
        super().__init__()
        self.allocated = iter(allocated)

    def memory_info(self) -> MemoryInfo:
        return MemoryInfo(0, 0, next(self.allocated), 0, 0)


def test_the_largest_measure_counts_and_one_below_the_output_does_not() -> None:
    layers = [torch.nn.Linear(2, 2) for _ in range(4)]
    # A layer's output has 8 bytes a token. A longer pass measures each layer that it does not recompute.
    backend = Scripted(100, 30, 0, 400, 0, 160, 0, 600)
    asked: list[int] = []

    def agree(wanted: int) -> int:
        asked.append(wanted)
        return 3

    chosen = ActivationCheckpointing(layers, setting="auto", backend=backend, room_nbytes=lambda: 2600, agree=agree)
    model = torch.nn.Sequential(*layers)
    for tokens in (10, 10, 20, 30):
        model(torch.zeros(tokens, 2))
        assert chosen.recomputed == 3  # as all ranks agreed, and asked once a pass
    # 40 bytes a token, though the third measure was 8: (4 + 2) layers of 30 tokens keep 7200 bytes, one saves 960.
    assert asked == [3, 3, 4, 4]


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("deep")
    write_demo(directory, seed=3, prompts=16, layers=LAYERS, hidden=128)
    return directory / "model"


class Limited(Roomy):
    """Has ``usable`` bytes left, whatever is allocated."""

    usable = 1 << 40

    def memory_info(self) -> MemoryInfo:
        real = super().memory_info()
        free = self.usable + real.total_nbytes // 16 - real.reserved_nbytes + real.allocated_nbytes
        return MemoryInfo(free, real.total_nbytes, real.allocated_nbytes, real.reserved_nbytes, real.peak_nbytes)


def engine_with(model_directory: Path, setting: Literal["auto"] | bool, backend: Limited | None = None) -> FsdpEngine:
    settings = EngineSettings(
        model_directory=model_directory,
        learning_rate=1e-2,
        total_steps=10,
        micro_batch_tokens=1 << 14,
        activation_checkpointing=setting,
    )
    return FsdpEngine(settings, backend=backend or Limited(), group=None)


def layer_nbytes(engine: FsdpEngine) -> int:
    """Return the bytes that one layer keeps for the backward pass over the batch."""
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    own = {parameter.untyped_storage().data_ptr() for parameter in engine.model.parameters()}
    layer = engine.model.model.layers[1]
    forward = layer.forward

    def watched(*args: object, **kwargs: object) -> object:
        shared = {one.untyped_storage().data_ptr() for one in _tensors([*args, *kwargs.values()])}
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            result = forward(*args, **kwargs)
        for place in own | shared:
            kept.pop(place, None)
        return result

    layer.forward = watched
    engine.forward(engine.plan(BATCH)[0])
    del layer.forward
    return sum(kept.values())


def _tensors(values: list[object]) -> list[torch.Tensor]:
    return [
        one for value in values for one in (value if isinstance(value, tuple) else (value,)) if torch.is_tensor(one)
    ]


def test_auto_measures_a_layer_and_recomputes_as_the_room_needs(model_directory: Path) -> None:
    backend = Limited()
    engine = engine_with(model_directory, "auto", backend)
    chosen = engine.checkpointing
    engine.train_batch(BATCH, loss=PolicyLoss())
    assert chosen.recomputed == LAYERS - 1  # the first pass measures the last layer
    engine.train_batch(BATCH, loss=PolicyLoss())
    assert chosen.recomputed == 0
    layer = layer_nbytes(engine_with(model_directory, False))
    found = []
    for layers in (LAYERS + 2.5, LAYERS + 0.9, 1):
        backend.usable = engine.owed_nbytes() + int(layer * layers)
        engine.train_batch(BATCH, loss=PolicyLoss())
        found.append(chosen.recomputed)
    assert found[0] == 0 < found[1] < LAYERS == found[2]


@pytest.mark.parametrize("setting", ["auto", True])
def test_the_choice_changes_no_step(model_directory: Path, setting: Literal["auto"] | bool) -> None:
    plain, lean = engine_with(model_directory, False), engine_with(model_directory, setting)
    for engine in (plain, lean):
        engine.train_batch(BATCH, loss=PolicyLoss())
    assert lean.checkpointing.recomputed >= LAYERS - 1
    for (name, one), (_, other) in zip(plain.named_weights(), lean.named_weights(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, msg=name)
