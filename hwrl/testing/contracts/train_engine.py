"""The contracts of train engines, by level. The fixture ``subject`` names the engine."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from hwrl.checkpoint import CheckpointManager
from hwrl.comm import Comm, connect_store
from hwrl.errors import ConfigError, EngineError, UnsupportedError
from hwrl.interfaces import Backend, Batch, EngineSettings, LossInputs, TrainEngine
from hwrl.testing.contracts.model import (
    VOCABULARY,
    model_directory,
    model_weights,
    reference_logprobs,
    reference_model,
)
from hwrl.testing.contracts.need import need_two_ranks, skipping_refused
from hwrl.testing.contracts.pair import StoreAddress, backend_of_rank
from hwrl.testing.levels import Level
from hwrl.testing.limits import scaled
from hwrl.testing.processes import run_processes
from hwrl.testing.subject import Subject

_TEMPERATURE = 0.7
_LOGPROBS_OFF = 2e-2
_STEP_OFF = 0.15
"""Adam's first steps are the signs of the gradients, and rounding flips the sign of some small gradients."""
_SAME_OFF = 1e-3


class GradientOfAdvantage:
    """The plain policy gradient: a token's loss is its log-probability times its negative advantage."""

    token_local = True
    needs_proximal = needs_reference = needs_entropy_gradient = False

    def __call__(self, inputs: LossInputs, /) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the loss of each token, and no metrics."""
        return -inputs.advantages * inputs.logprobs, {}


class InfiniteLoss(GradientOfAdvantage):
    """A loss without a finite gradient."""

    def __call__(self, inputs: LossInputs, /) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return an infinite loss of each token, and no metrics."""
        return inputs.logprobs * float("inf"), {}


class _OfTrainEngine:
    """Makes engines of the subject, one at a time, and closes them."""

    level: ClassVar[Level]

    @pytest.fixture
    def make(self, backend: Backend, subject: Subject) -> Iterator[Callable[..., TrainEngine]]:
        """A function that returns a new engine; its arguments change the settings.

        It closes the engine before, because a process has one train engine at a time.
        """
        with contextlib.ExitStack() as open_engine:

            def make(**changes: Any) -> TrainEngine:
                open_engine.close()
                with skipping_refused():
                    engine = subject.make_train_engine(engine_settings(**changes), backend=backend)
                open_engine.callback(engine.close)
                return engine

            yield make


class TrainNumbersContract(_OfTrainEngine):
    """Log-probabilities and steps are those of the model in double precision, up to rounding."""

    level = Level.COMPUTE

    def test_logprobs_are_the_models(self, make: Callable[..., TrainEngine]) -> None:
        """At the sampling temperature, for the tokens in the mask; 0 for all others, such as padding."""
        batch = make_batch(rows=5)
        with (engine := make()).on_device(optimizer=False):
            found = engine.logprobs(batch)
        wanted = torch.zeros(batch.tokens.shape)
        wanted[:, 1:] = reference_logprobs(reference_model(), batch.tokens, temperature=_TEMPERATURE).detach()
        assert (found.dtype, found.device.type) == (torch.float32, "cpu")
        assert bool((found[~batch.mask] == 0).all()), "a token off the mask has a log-probability"
        assert _off(found, torch.where(batch.mask, wanted, 0)) < _LOGPROBS_OFF

    def test_two_steps_are_those_of_adamw(self, make: Callable[..., TrainEngine]) -> None:
        """The loss is the mean over all tokens of the batch, weighted by row, for any micro-batches.

        The learning rate is that of the warm-up.
        """
        engine, batches = make(), [make_batch(rows=5, seed=seed) for seed in (1, 2)]
        with engine.on_device(optimizer=True):
            for batch in batches:
                engine.train_batch(batch, loss=GradientOfAdvantage())
            found = _whole(engine)
        before, wanted = model_weights(), _trained_reference(batches)
        wrong = {name: _off(found[name] - before[name], wanted[name] - before[name]) for name in wanted}
        assert {name: off for name, off in wrong.items() if not off < _STEP_OFF} == {}

    def test_a_gradient_that_is_not_finite_changes_nothing(self, make: Callable[..., TrainEngine]) -> None:
        """The step raises EngineError, the weights stay, and the next step works."""
        engine, batch = make(), make_batch(rows=3)
        with engine.on_device(optimizer=True):
            before = _whole(engine)
            with pytest.raises(EngineError):
                engine.train_batch(batch, loss=InfiniteLoss())
            assert _differ(_whole(engine), before, at_most=0.0) == []
            engine.train_batch(batch, loss=GradientOfAdvantage())
            assert _differ(_whole(engine), before, at_most=0.0) != []


class TrainOffloadContract(_OfTrainEngine):
    """Parameters and optimizer state leave the device and come back."""

    level = Level.DEVICE

    def test_offloading_changes_no_step(self, make: Callable[..., TrainEngine]) -> None:
        """Two steps in two visits to the device, with log-probabilities between them, equal those without offload."""
        with skipping_refused(ConfigError):
            engine = make(param_offload=True, optimizer_offload=True)
        found = self._after_two_visits(engine)
        assert _differ(found, self._after_two_visits(make()), at_most=_SAME_OFF) == []

    def _after_two_visits(self, engine: TrainEngine) -> dict[str, torch.Tensor]:
        for seed in (1, 2):
            with engine.on_device(optimizer=True):
                engine.train_batch(make_batch(rows=4, seed=seed), loss=GradientOfAdvantage())
            with engine.on_device(optimizer=False):
                engine.logprobs(make_batch(rows=2))
        with engine.on_device(optimizer=False):
            return _whole(engine)

    def test_without_offload_nothing_moves(self, make: Callable[..., TrainEngine]) -> None:
        """The reported bytes and seconds are 0."""
        with make().on_device(optimizer=True) as moved:
            pass
        assert (moved.load.nbytes, moved.load.seconds, moved.offload.nbytes, moved.offload.seconds) == (0, 0.0, 0, 0.0)


class TrainRanksContract:
    """Two ranks take the step of one."""

    level: ClassVar[Level] = Level.COLLECTIVES

    def test_two_ranks_take_the_steps_of_one(self, backend: Backend, subject: Subject) -> None:
        """Each rank trains on its rows. Only the first one yields the weights; both exhaust the iterator."""
        need_two_ranks(backend)
        address = StoreAddress()
        model_directory()  # before the processes: they get its path
        pair = run_processes(_train_on_rank, 2, backend.info.name, str(address), subject, str(model_directory()))
        if isinstance(pair[0], str):
            pytest.skip(pair[0])
        (whole, logprobs), (rest, same) = pair
        alone = subject.make_train_engine(engine_settings(), backend=backend)
        with contextlib.closing(alone), alone.on_device(optimizer=True):
            for seed in (1, 2):
                alone.train_batch(make_batch(rows=5, seed=seed), loss=GradientOfAdvantage())
            wanted = _whole(alone)
        assert rest == {}, "the second rank yields weights"
        before = model_weights()
        wrong = {name: _off(whole[name] - before[name], wanted[name] - before[name]) for name in wanted}
        assert {name: off for name, off in wrong.items() if not off < _STEP_OFF} == {}
        assert torch.allclose(logprobs, same, atol=_SAME_OFF), "the ranks' models differ"


class TrainStateContract(_OfTrainEngine):
    """The engine's weights have the model's names, a restored state continues, and training learns."""

    level = Level.TRAIN

    def test_its_weights_are_those_of_the_files(self, make: Callable[..., TrainEngine]) -> None:
        """Names, shapes and values equal those of the files; the metadata describes the same tensors."""
        with (engine := make()).on_device(optimizer=False):
            found = _whole(engine)
            described = {name: (tuple(one.shape), one.dtype) for name, one in engine.weights_metadata()}
        assert _differ(found, model_weights(), at_most=0.0) == []
        assert described == {name: (tuple(one.shape), one.dtype) for name, one in found.items()}

    def test_a_restored_engine_continues(self, make: Callable[..., TrainEngine], tmp_path: Path) -> None:
        """A new engine resumes a checkpoint: its next step is the same, with the same learning rate and moments."""
        engine = make()
        with CheckpointManager(tmp_path) as checkpoints:
            _weights_after_step(engine, seed=1)
            with engine.saved_state() as (state, offloader):
                checkpoints.save(1, state, offloader=offloader)
            wanted = _weights_after_step(engine, seed=2)
            engine = make()
            with engine.on_device(optimizer=True):
                fresh = engine.state_dict()
                assert checkpoints.resume(fresh) is not None
                engine.load_state_dict(fresh)
            assert _differ(_weights_after_step(engine, seed=2), wanted, at_most=_SAME_OFF) == []

    def test_an_export_is_a_model(self, make: Callable[..., TrainEngine], tmp_path: Path) -> None:
        """transformers loads it, with the trained weights."""
        from hwrl.models import load_model

        engine = make()
        with engine.on_device(optimizer=True):
            engine.train_batch(make_batch(rows=4), loss=GradientOfAdvantage())
            engine.export(tmp_path / "exported")
            wanted = _whole(engine)
        found = dict(load_model(tmp_path / "exported", dtype=torch.float32).state_dict())
        assert _differ(found, wanted, at_most=0.0) == []

    def test_it_learns(self, make: Callable[..., TrainEngine]) -> None:
        """Tokens with an advantage become likely: after 30 steps their log-probability is a quarter, or closer to 0."""
        engine = make(learning_rate=3e-3, warmup_steps=0)
        batch = replace(make_batch(rows=4), advantages=torch.ones(4), weights=None)
        with engine.on_device(optimizer=True):
            before = engine.logprobs(batch).sum()
            for _ in range(30):
                engine.train_batch(batch, loss=GradientOfAdvantage())
            assert float(engine.logprobs(batch).sum()) > float(before) / 4


# -- inputs ---------------------------------------------------------------------------------------------------------


def engine_settings(directory: Path | None = None, **changes: Any) -> EngineSettings:
    """Return settings with warm-up, and micro-batches smaller than a batch."""
    settings = EngineSettings(
        model_directory=directory or model_directory(),
        learning_rate=1e-3,
        total_steps=100,
        warmup_steps=4,
        micro_batch_tokens=24,
        temperature=_TEMPERATURE,
        compile=False,
    )
    return replace(settings, **changes)


def make_batch(*, rows: int, seed: int = 0) -> Batch:
    """Return rows of different lengths. The mask leaves out prompts, and a few tokens in the middle."""
    generator = torch.Generator().manual_seed(seed)
    lengths = 6 + 3 * torch.arange(rows)
    tokens = torch.randint(3, VOCABULARY, (rows, int(lengths.max())), generator=generator)
    places = torch.arange(tokens.shape[1])
    mask = (places >= 2) & (places < lengths[:, None]) & (places % 7 != 5)
    return Batch(
        tokens=tokens,
        mask=mask,
        behaviour_logprobs=torch.where(mask, -2.0, 0.0),
        advantages=torch.randn(rows, generator=generator),
        weights=1 + torch.rand(rows, generator=generator),
    )


# -- reference ------------------------------------------------------------------------------------------------------


def _trained_reference(batches: list[Batch]) -> dict[str, torch.Tensor]:
    settings, model = engine_settings(), reference_model()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=settings.learning_rate, betas=settings.betas, weight_decay=settings.weight_decay
    )
    for step, batch in enumerate(batches):
        assert batch.weights is not None, "make_batch gives them"
        logprobs = reference_logprobs(model, batch.tokens, temperature=settings.temperature)
        weights = batch.weights[:, None] * batch.advantages[:, None] * batch.mask
        (-(logprobs * weights[:, 1:]).sum() / batch.trained_tokens).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm)
        optimizer.param_groups[0]["lr"] = settings.learning_rate_at(step)
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def _train_on_rank(rank: int, name: str, address: str, subject: Subject, directory: str) -> Any:
    """Return the weights of this rank and its log-probabilities; the reason, if the engine refuses several ranks."""
    backend = backend_of_rank(rank, name)
    with Comm(backend).init_default(store=connect_store(address), rank=rank, size=2, timeout_s=scaled(60.0)) as group:
        try:
            engine = subject.make_train_engine(engine_settings(Path(directory)), backend=backend, group=group)
        except UnsupportedError as error:
            return f"{error.what}: {error.why}"
        share = torch.arange(5)[engine.data_parallel_rank :: engine.data_parallel_size]
        with engine.on_device(optimizer=True):
            for seed in (1, 2):
                engine.train_batch(make_batch(rows=5, seed=seed).select(share), loss=GradientOfAdvantage())
            found = _whole(engine), engine.logprobs(make_batch(rows=3))
        engine.close()
        return found


def _weights_after_step(engine: TrainEngine, *, seed: int) -> dict[str, torch.Tensor]:
    with engine.on_device(optimizer=True):
        engine.train_batch(make_batch(rows=4, seed=seed), loss=GradientOfAdvantage())
        return _whole(engine)


def _whole(engine: TrainEngine) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in engine.named_weights()}


def _off(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the distance from ``wanted``, relative to its norm."""
    return float((found.double() - wanted.double()).norm() / wanted.double().norm().clamp(min=1e-12))


def _differ(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], *, at_most: float) -> list[str]:
    """Return the names of tensors that are missing, unknown, of another shape, or further apart than ``at_most``."""
    names = sorted(found.keys() ^ wanted.keys())
    return names + [
        name
        for name in found.keys() & wanted.keys()
        if found[name].shape != wanted[name].shape or not _off(found[name], wanted[name]) <= at_most
    ]
