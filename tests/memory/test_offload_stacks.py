"""Offloader with optimizers, weights and trainers of other packages: the next steps are those of a twin without it.

`make test-stack-memory` installs the packages of ci/stacks/memory.txt; elsewhere the tests of missing ones are skipped.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hwrl.memory import Offloader
from hwrl_cpu import INFO, CpuBackend
from tests.support.offload_cases import Trained, check_equal_after_offloads

pytestmark = pytest.mark.filterwarnings("ignore")  # other packages' own
BACKEND = CpuBackend(INFO)
WIDTH = 128
DATA = torch.linspace(-1, 1, 4 * WIDTH).reshape(4, WIDTH)


def _needs(name: str) -> Any:
    return pytest.importorskip(name, reason=f"{name} is not installed: make test-stack-memory installs it")


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))


def _with(optimizer: Callable[..., Any]) -> Trained:
    model = _net()
    return Trained(model, optimizer(model.parameters(), lr=0.01), functools.partial(model, DATA))


def _eight_bit() -> Trained:
    return _with(functools.partial(_needs("bitsandbytes").optim.AdamW8bit, min_8bit_size=1))


def _four_bit_weights() -> Trained:
    quantized = _needs("bitsandbytes").nn
    model = _net()
    frozen = quantized.Linear4bit(WIDTH, WIDTH, compute_dtype=torch.float32, compress_statistics=True)
    frozen.load_state_dict(nn.Linear(WIDTH, WIDTH).state_dict())
    model.append(frozen.to("cpu").requires_grad_(False))
    optimizer = torch.optim.AdamW(one for one in model.parameters() if one.requires_grad)
    trained = Trained(model, optimizer, functools.partial(model, DATA))
    assert frozen.weight.quant_state.absmax.numel(), "it is quantized"
    return trained


def _torchao(name: str) -> Trained:
    return _with(getattr(_needs("torchao.optim"), name))


def _torchao_weights() -> Trained:
    quantization = _needs("torchao.quantization")
    model = _net()
    frozen = nn.Sequential(nn.Linear(WIDTH, WIDTH)).requires_grad_(False)
    quantization.quantize_(frozen, quantization.Int8WeightOnlyConfig())
    model.append(frozen)
    optimizer = torch.optim.AdamW(one for one in model.parameters() if one.requires_grad)
    return Trained(model, optimizer, functools.partial(model, DATA))


def _schedule_free() -> Trained:
    trained = _with(_needs("schedulefree").AdamWScheduleFree)
    trained.optimizer.train()
    return trained


STACKS: dict[str, Callable[[], Trained]] = {
    "bitsandbytes 8-bit AdamW": _eight_bit,
    "bitsandbytes 4-bit weights": _four_bit_weights,
    "torchao AdamW8bit": functools.partial(_torchao, "AdamW8bit"),
    "torchao AdamW4bit": functools.partial(_torchao, "AdamW4bit"),
    "torchao AdamWFp8": functools.partial(_torchao, "AdamWFp8"),
    "torchao Int8 weights": _torchao_weights,
    "schedule-free AdamW": _schedule_free,
}


@pytest.mark.parametrize("name", STACKS)
def test_the_next_steps_are_those_of_a_twin_that_was_never_offloaded(name: str) -> None:
    check_equal_after_offloads(STACKS[name], BACKEND)


def test_the_state_of_four_bit_weights_moves_too() -> None:
    trained = _four_bit_weights()
    frozen: Any = list(trained.model.modules())[-1]
    state = frozen.weight.quant_state
    tensors = [one for one in (state.absmax, state.code, state.state2.absmax, state.state2.code) if one.numel()]
    with Offloader(trained.model, trained.optimizer, backend=BACKEND) as offloader:
        offloader.offload()
        assert len(tensors) == 4 and not any(one.untyped_storage().nbytes() for one in tensors)


class _Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = _net()

    def forward(self, data: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.net(data) - labels).square().mean()}


def _weights_of_trainer(directory: Path, *, offloads: bool) -> list[torch.Tensor]:
    """Train with transformers' Trainer, with everything on the host between the steps; return the weights."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Away(TrainerCallback):  # type: ignore[misc] # transformers is not followed
        offloader: Offloader | None = None
        moved = 0

        def on_step_begin(self, *_: Any, model: nn.Module, optimizer: Any, **__: Any) -> None:
            if self.offloader is None:
                self.offloader = Offloader(model, optimizer, backend=BACKEND)
            self.offloader.load()

        def on_step_end(self, *_: Any, model: nn.Module, **__: Any) -> None:
            assert self.offloader is not None
            model.zero_grad()
            self.moved += self.offloader.offload().nbytes

        def on_train_end(self, *_: Any, **__: Any) -> None:
            assert self.offloader is not None
            self.offloader.close()

    away = Away()
    rows = [{"data": row, "labels": row.flip(0)} for row in DATA.repeat(3, 1)]
    arguments = TrainingArguments(
        str(directory), use_cpu=True, max_steps=4, report_to=[], save_strategy="no", disable_tqdm=True, seed=0
    )
    trainer = Trainer(_Regression(), arguments, train_dataset=rows, callbacks=[away] if offloads else [])
    trainer.train()
    assert away.moved > 0 or not offloads
    return [one.detach() for one in trainer.model.parameters()]


@pytest.mark.extended  # transformers' Trainer takes seconds to import; accelerate's optimizer is in the matrix
def test_transformers_trainer_learns_the_same(tmp_path: Path) -> None:
    moved = _weights_of_trainer(tmp_path / "moved", offloads=True)
    stayed = _weights_of_trainer(tmp_path / "stayed", offloads=False)
    assert all(torch.equal(one, other) for one, other in zip(moved, stayed, strict=True))
