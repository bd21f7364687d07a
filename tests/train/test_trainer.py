"""The trainer on the real FSDP2 engine: versions, the age limit, times, and learning from rewards."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hwrl
from hwrl.errors import DataError, EngineError, MemoryStateError
from hwrl.interfaces import Batch, EngineSettings, LossInputs, Moved, PromptGroup, Response, TokenLoss, TrainEngine
from hwrl.run.demo import write_demo
from hwrl.train import (
    Algorithm,
    AsyncTrainer,
    FsdpEngine,
    LossName,
    ModelFlops,
    PolicyLoss,
    TrainedStep,
    UserLoss,
    move_metrics,
)
from tests.support.single_turns import join_responses

GOOD, BAD = 5, 9


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("demo")
    write_demo(directory, seed=3, prompts=16)
    return directory / "model"


Send = Callable[[int, TrainEngine], Mapping[str, float]]


class Sent:
    """Keeps the versions that were sent, and sends nothing."""

    def __init__(self) -> None:
        self.versions: list[int] = []

    def __call__(self, version: int, engine: TrainEngine) -> Mapping[str, float]:
        self.versions.append(version)
        return {"sync/nbytes": float(sum(tensor.nbytes for _, tensor in engine.named_weights()))}


def send_now(trainer: AsyncTrainer, send: Send) -> dict[str, float]:
    """Send the weights between two steps; return metrics."""
    with trainer.sending() as moved:
        sent = dict(send(trainer.version, trainer.engine))
    return {**sent, **move_metrics(moved)}


def step_and_send(trainer: AsyncTrainer, groups: Sequence[PromptGroup], send: Send) -> dict[str, float]:
    """Train one step and send the weights if they are due, as a trainer rank does; return the metrics of both."""
    with trainer.stepping() as moved:
        trained = trainer.step(groups)
        sent = send_now(trainer, send) if trained.publishes else {}
    return {**trained.metrics, **sent, **move_metrics(moved), **trainer.timing()}


def engine_on(model_directory: Path, *, offload: bool = False) -> FsdpEngine:
    settings = EngineSettings(
        model_directory=model_directory,
        learning_rate=3e-3,
        total_steps=100,
        param_offload=offload,
        optimizer_offload=offload,
    )
    return FsdpEngine(settings, backend=hwrl.get_backend(), group=None)


def trainer_of(model_directory: Path, **changes: Any) -> AsyncTrainer:
    settings: dict[str, Any] = {
        "algorithm": Algorithm(PolicyLoss()),
        "max_staleness": 1,
        "trigger_parameter_sync_step": 2,
    }
    return AsyncTrainer(engine_on(model_directory), **(settings | changes))


def group_of(*, version: int, logprob: float = -2.77, incarnation: int = 0) -> PromptGroup:
    """One prompt, answered once with GOOD and once with BAD."""
    responses = [
        Response(
            np.array([token], dtype=np.int32),
            np.array([logprob], dtype=np.float32),
            np.array([version], dtype=np.int32),
            truncated=False,
        )
        for token in (GOOD, BAD)
    ]
    return join_responses(
        responses,
        sequence_number=0,
        lease_id=0,
        incarnation=incarnation,
        prompt_ids=np.array([2, 3, 13], dtype=np.int32),
        rewards=[1.0, 0.0],
        metrics={"reward": 0.5, "exact": 0.25},
    )


def test_a_version_is_due_every_so_many_steps(model_directory: Path) -> None:
    sent = Sent()
    trainer = trainer_of(model_directory)
    send_now(trainer, sent)
    metrics = [step_and_send(trainer, [group_of(version=trainer.version)], sent) for _ in range(5)]
    assert sent.versions == [0, 1, 2]
    assert [row["weights/version"] for row in metrics] == [0, 1, 1, 2, 2]
    assert metrics[1]["sync/nbytes"] == 4 * 100_800
    assert metrics[0]["reward/exact"] == 0.25


def test_a_group_beyond_the_age_limit_is_never_trained_on(model_directory: Path) -> None:
    trainer = trainer_of(model_directory)
    trainer.load_state_dict({"steps_done": 8})
    before = {name: tensor.clone() for name, tensor in trainer.engine.named_weights()}
    assert trainer.step([group_of(version=3)]).metrics["staleness/max"] == 1
    with pytest.raises(EngineError, match=r"age 2 reached(.|\n)*version 4(.|\n)*staleness_threshold is 1"):
        trainer.step([group_of(version=2)])
    assert trainer.steps_done == 9
    assert any(not torch.equal(before[name], tensor) for name, tensor in trainer.engine.named_weights())


@pytest.mark.parametrize(("version", "incarnation"), [(5, 0), (4, 1), (-999_999_733, 2)])
def test_a_group_of_weights_that_this_trainer_never_published_is_never_trained_on(
    model_directory: Path, version: int, incarnation: int
) -> None:
    trainer = trainer_of(model_directory)
    trainer.load_state_dict({"steps_done": 8})
    with pytest.raises(EngineError, match=r"never published(.|\n)*trainer is at version 4, incarnation 0"):
        trainer.step([group_of(version=version, incarnation=incarnation)])
    assert trainer.steps_done == 8


def test_the_seconds_of_a_step_add_up_to_all_the_time_since_the_last(model_directory: Path) -> None:
    trainer = trainer_of(model_directory)
    begin_s = time.perf_counter()
    step_and_send(trainer, [group_of(version=0)], Sent())
    metrics = step_and_send(trainer, [group_of(version=0)], Sent())
    assert metrics["timing_s/train"] > metrics["timing_s/wait"] >= 0
    assert metrics["timing_s/sync"] > 0
    assert sum(trainer.timing().values()) < time.perf_counter() - begin_s, "only the time since the last call"


def test_a_save_between_two_steps_is_no_waiting(model_directory: Path) -> None:
    trainer = trainer_of(model_directory)
    step_and_send(trainer, [group_of(version=0)], Sent())
    begin_s = time.perf_counter()
    with trainer.saving():
        engine_on(model_directory)
    saving_s = time.perf_counter() - begin_s
    metrics = step_and_send(trainer, [group_of(version=0)], Sent())
    assert metrics["timing_s/save"] == pytest.approx(saving_s, rel=0.5)
    assert metrics["timing_s/wait"] < saving_s / 2


def test_samples_of_another_distribution_are_told_of_once(
    model_directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = trainer_of(model_directory)
    trainer.step([group_of(version=0)])
    assert not caplog.messages
    for _ in range(2):
        trainer.step([group_of(version=0, logprob=-5.0)])
    (message,) = caplog.messages
    assert message.startswith("step 2: the rollout engine samples from another distribution")


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("name", ["ppo_clip", "tis", "decoupled"])
def test_every_loss_teaches_what_was_rewarded(model_directory: Path, name: LossName, offload: bool) -> None:
    engine = engine_on(model_directory, offload=offload)
    trainer = AsyncTrainer(
        engine,
        algorithm=Algorithm(PolicyLoss(name), ppo_epochs=2, mini_batches=2),
        max_staleness=0,
    )
    for _ in range(6):
        trainer.step([group_of(version=trainer.version), group_of(version=trainer.version)])
    with engine.on_device(optimizer=False), torch.no_grad():
        chances = engine.model(torch.tensor([[2, 3, 13]])).logits[0, -1].softmax(-1)
    assert chances[GOOD] > 1.2 / 16
    assert chances[BAD] < 0.95 / 16


@pytest.mark.parametrize("offload", [False, True])
def test_what_is_offloaded_is_there_for_the_step_and_the_transfer_and_seconds_say_what_moved(
    model_directory: Path, offload: bool
) -> None:
    sent: list[dict[str, torch.Tensor]] = []

    def send(version: int, engine: TrainEngine) -> Mapping[str, float]:
        if version == 3:
            raise OSError("the wire is cut")
        sent.append({name: tensor.clone() for name, tensor in engine.named_weights()})
        return {}

    engine = engine_on(model_directory, offload=offload)
    trainer = AsyncTrainer(engine, algorithm=Algorithm(PolicyLoss()), max_staleness=0)

    def is_away() -> bool:
        try:
            engine.state_dict()
        except MemoryStateError:
            return True
        return False

    def seconds(metrics: Mapping[str, float]) -> list[float]:
        assert is_away() == offload
        return [metrics["weights/load_s"], metrics["weights/offload_s"]]

    load_s, offload_s = seconds(send_now(trainer, send))
    assert (load_s > 0, offload_s) == (offload, 0.0), "unchanged parameters are not copied to the host again"
    for _ in range(2):
        moves = seconds(step_and_send(trainer, [group_of(version=trainer.version)], send))
        assert min(moves) > 0 if offload else moves == [0.0, 0.0]
    with engine.on_device(optimizer=True):
        assert send_now(trainer, send)["weights/load_s"] == 0.0
        assert all(torch.equal(tensor, sent[-1][name]) for name, tensor in engine.named_weights())
    assert not torch.equal(*[weights["model.embed_tokens.weight"] for weights in sent[:2]])
    with pytest.raises(OSError, match="the wire is cut"):
        step_and_send(trainer, [group_of(version=trainer.version)], send)
    assert is_away() == offload


class CountingEngine(TrainEngine):
    """Trains nothing; keeps the rows of each mini-batch of one share, and returns ``metrics`` of each."""

    def __init__(self, *, share: int = 0, shares: int = 1, metrics: dict[str, float] | None = None) -> None:
        self.rows: list[int] = []
        self.scored = 0
        self._metrics = metrics or {}
        self._share, self._shares = share, shares

    @property
    def data_parallel_rank(self) -> int:
        return self._share

    @property
    def data_parallel_size(self) -> int:
        return self._shares

    def on_device(self, *, optimizer: bool) -> AbstractContextManager[Moved]:
        return nullcontext(Moved())

    def train_batch(self, batch: Batch, *, loss: TokenLoss) -> dict[str, float]:
        self.rows.append(batch.rows)
        return self._metrics

    def logprobs(self, batch: Batch) -> torch.Tensor:
        self.scored += 1
        return batch.behaviour_logprobs

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from ()

    def weights_metadata(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from ()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass

    def export(self, directory: Path) -> None:
        pass


def rows_of_ranks(*, groups: int, ranks: int, mini_batches: int) -> list[list[int]]:
    """Return the rows of each mini-batch, for every rank, when ``groups`` groups of two responses are trained on."""
    counts = []
    for rank in range(ranks):
        engine = CountingEngine(share=rank, shares=ranks)
        algorithm = Algorithm(PolicyLoss(), mini_batches=mini_batches)
        trainer = AsyncTrainer(engine, algorithm=algorithm, max_staleness=0)
        trainer.step([group_of(version=0)] * groups)
        counts.append(engine.rows)
    return counts


def test_every_rank_takes_the_same_number_of_mini_batches_and_groups_may_be_divided() -> None:
    assert rows_of_ranks(groups=5, ranks=2, mini_batches=4) == [[2, 2, 1, 1], [1, 1, 1, 1]]
    assert rows_of_ranks(groups=1, ranks=2, mini_batches=1) == [[1], [1]]


def test_too_few_responses_for_the_ranks_are_an_error_on_all_of_them_before_anything_is_trained() -> None:
    for rank in range(2):
        engine = CountingEngine(share=rank, shares=2)
        trainer = AsyncTrainer(engine, algorithm=Algorithm(PolicyLoss(), mini_batches=4), max_staleness=0)
        with pytest.raises(EngineError, match=r"too few responses(.|\n)*2 ranks(.|\n)*4 mini-batches"):
            trainer.step([group_of(version=0)] * 3)
        assert engine.rows == []
        assert trainer.steps_done == 0


def test_metrics_of_speed_are_named_apart_from_those_of_the_policy() -> None:
    engine = CountingEngine(metrics={"loss": 2.0, "padding_share": 0.25, "recompilations": 3.0})
    trainer = AsyncTrainer(engine, algorithm=Algorithm(PolicyLoss(), mini_batches=2), max_staleness=0)
    trained = trainer.step([group_of(version=0)])
    assert trained.metrics["actor/loss"] == 2.0
    assert trained.metrics["perf/padding_share"] == 0.25
    assert trained.metrics["perf/recompilations"] == 6.0
    assert (trained.tokens, trained.flops) == (2 * 4, None)


def test_the_speed_of_a_step_is_that_of_each_device_and_a_share_of_a_known_peak() -> None:
    step = TrainedStep({}, publishes=False, tokens=8000, flops=6e12)
    speed = step.speed(seconds=2.0, devices=4, peak_flops=3e12)
    assert speed["perf/train_tokens_per_s_per_device"] == 1000
    assert (speed["perf/train_flops_per_s_per_device"], speed["perf/mfu"]) == (0.75e12, 0.25)
    assert "perf/mfu" not in step.speed(seconds=2.0, devices=4, peak_flops=None)
    assert step.speed(seconds=0.0, devices=4, peak_flops=3e12) == {}
    assert replace(step, flops=None).speed(seconds=2.0, devices=4, peak_flops=3e12).keys() == {
        "perf/train_tokens_per_s_per_device"
    }


@pytest.mark.parametrize(("loss", "passes"), [("ppo_clip", 2.0), ("decoupled", 2 + 1 / 3)])
def test_the_flops_of_a_step_count_each_epoch_and_the_forward_pass_of_the_proximal_policy(
    loss: LossName, passes: float
) -> None:
    flops = ModelFlops(layer_parameters=100, output_parameters=10, full_width=2)
    trainer = AsyncTrainer(
        CountingEngine(), algorithm=Algorithm(PolicyLoss(loss), ppo_epochs=2), max_staleness=0, flops=flops
    )
    trained = trainer.step([group_of(version=0)] * 3)
    assert trained.flops == pytest.approx(passes * 6 * 6 * (100 * 4 + 10 * 1 + 2 * 4**2))
    assert trained.tokens == 2 * 6 * 4


def test_a_step_that_warms_up_the_critic_does_and_counts_no_work_of_the_policy() -> None:
    engine = CountingEngine()
    flops = ModelFlops(layer_parameters=100, output_parameters=10, full_width=2)
    algorithm = Algorithm(PolicyLoss("decoupled"), critic_warmup=1)
    trainer = AsyncTrainer(engine, algorithm=algorithm, max_staleness=1, flops=flops)
    warm = trainer.step([group_of(version=0)])
    assert (warm.tokens, warm.flops, engine.rows, engine.scored) == (0, 0.0, [], 0)
    trained = trainer.step([group_of(version=0)])
    assert (trained.tokens, engine.rows, engine.scored) == (2 * 4, [2], 1)
    assert trained.flops == pytest.approx(2 * 8 * (100 * 4 + 10 * 1 + 2 * 4**2))


def test_a_reward_metric_that_only_some_groups_have_is_averaged_over_these(model_directory: Path) -> None:
    plain, other = group_of(version=0), replace(group_of(version=0), metrics={"reward": 0.5, "format": 1.0})
    trainer = AsyncTrainer(CountingEngine(), algorithm=Algorithm(PolicyLoss()), max_staleness=0)
    metrics = trainer.step([plain, other, other]).metrics
    assert metrics["reward/format"] == 1.0
    assert metrics["reward/exact"] == 0.25


def whole_state(trainer: AsyncTrainer) -> dict[str, Any]:
    return copy.deepcopy(trainer.engine.state_dict())


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)


def test_an_update_without_a_finite_gradient_is_skipped_and_counted_up_to_a_limit(model_directory: Path) -> None:
    sent, bad, good = Sent(), group_of(version=0, logprob=float("nan")), group_of(version=0)
    trainer = trainer_of(model_directory, max_skipped_in_a_row=2, max_staleness=9)
    step_and_send(trainer, [good], sent)
    before = whole_state(trainer)
    assert trainer.step([bad]).metrics["actor/skipped_steps"] == 1.0
    assert "actor/loss" not in trainer.step([bad]).metrics and trainer.finished_step == 3
    assert equal(whole_state(trainer), before), "weights, moments, and the place in the schedule"
    metrics = trainer.step([good]).metrics
    assert metrics["actor/skipped_steps"] == 0.0 and metrics["actor/grad_norm"] > 0
    assert not equal(whole_state(trainer), before)
    for _ in range(3):
        trainer.step([bad])
    with pytest.raises(EngineError, match=r"last 3 updates of the actor(.|\n)*norm of the gradients is nan(.|\n)*loss"):
        trainer.step([good])
    assert trainer.finished_step == trainer.steps_done == 7, "the run saves it"


def test_a_step_that_failed_before_its_first_update_has_changed_nothing(model_directory: Path) -> None:
    calls: list[object] = []

    def loss(inputs: LossInputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        calls.append(inputs)
        if len(calls) in (2, 4):
            raise ValueError("the user's error")
        return -inputs.logprobs, {}

    algorithm = Algorithm(UserLoss.of(loss), mini_batches=2)
    trainer = trainer_of(model_directory, algorithm=algorithm, trigger_parameter_sync_step=1)
    trainer.steps_done = 7
    assert trainer.finished_step == 7
    groups = [group_of(version=7), group_of(version=7)]
    calls.append(None)  # the first mini-batch fails
    says = r"the loss 'loss' raised an error(.|\n)*ValueError: the user's error\n  File .*, in loss\n"
    with pytest.raises(DataError, match=says):
        trainer.step(groups)
    assert trainer.finished_step == 7
    with pytest.raises(DataError, match="the loss 'loss' raised"):  # the second one fails
        trainer.step(groups)
    assert trainer.finished_step is None
