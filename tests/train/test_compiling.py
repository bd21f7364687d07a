"""Compiled layers: the same steps, one graph for all layers and sizes, and clear words where it cannot be."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hwrl
from hwrl.errors import EngineError
from hwrl.interfaces import Capability, Support
from hwrl.train import FsdpEngine, PolicyLoss
from hwrl.train.compiling import Compiler, explained_compilation, wants_compilation
from tests.support.fsdp_training import batch_of, engine_on, groups_of
from tests.support.near import assert_near


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Any:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.parametrize(("state", "wanted"), [("supported", True), ("unverified", False), ("unsupported", False)])
def test_auto_compiles_where_the_backend_says_that_it_pays(
    monkeypatch: pytest.MonkeyPatch, state: Any, wanted: bool
) -> None:
    backend = hwrl.get_backend()
    assert wants_compilation(backend, setting=True)
    assert not wants_compilation(backend, setting=False)
    answers = {Capability.COMPILED_TRAINING: Support(state, "so")}
    monkeypatch.setattr(backend, "supports", answers.__getitem__)
    assert wants_compilation(backend, setting="auto") is wanted


class Block(nn.Module):
    """A layer with a number of its own, as in transformers."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.inner = nn.Linear(8, 8)

    def forward(self, hidden: torch.Tensor, *, scale: float) -> torch.Tensor:
        changed: torch.Tensor = hidden + scale * self.inner(hidden).tanh()
        return changed


def on_the_tracer_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trace as ever, but run the traced graph as it is: code generation takes most of the time."""
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **options: real(function, backend="eager", **options))


def test_all_layers_and_sizes_share_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    on_the_tracer_alone(monkeypatch)
    layers, compiler = [Block(number) for number in range(6)], Compiler(required=True)
    plain = [layer.forward for layer in layers]
    compiler.compile_layers(layers)
    for length in (5, 9, 30, 7):
        hidden = wanted = torch.randn(2, length, 8)
        for layer, forward in zip(layers, plain, strict=True):
            hidden, wanted = layer(hidden, scale=0.5), forward(wanted, scale=0.5)
        torch.testing.assert_close(hidden, wanted)
    assert 1 <= compiler.new_graphs() <= 2  # the first layer's input needs no gradient
    assert compiler.new_graphs() == 0


def refuse(function: Any, **options: Any) -> Any:
    """Stand in for a compiler on a machine without one."""

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise torch._dynamo.exc.TorchDynamoException("no C++ compiler was found")

    return fail


def test_a_layer_that_cannot_be_compiled_runs_uncompiled_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch, "compile", refuse)
    layers = [Block(number) for number in range(3)]
    Compiler(required=False).compile_layers(layers)
    with caplog.at_level(logging.WARNING, logger="hwrl.train"):
        for layer in layers:
            layer(torch.randn(2, 8), scale=1.0)
    (record,) = caplog.records
    assert "no C++ compiler was found" in record.getMessage()


def test_other_ranks_do_not_warn(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(torch, "compile", refuse)
    layer = Block(0)
    Compiler(required=False, level=logging.DEBUG).compile_layers([layer])
    with caplog.at_level(logging.INFO, logger="hwrl.train"):
        layer(torch.randn(2, 8), scale=1.0)
    assert not caplog.records


def test_compilation_that_is_demanded_and_fails_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", refuse)
    layer = Block(0)
    Compiler(required=True).compile_layers([layer])
    with pytest.raises(EngineError, match="cannot be compiled"):
        layer(torch.randn(2, 8), scale=1.0)


def test_a_backward_pass_that_cannot_be_compiled_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch._aot_autograd.utils import make_boxed_func
    from torch._inductor.exc import InductorError

    def fail(graph: Any, inputs: Any) -> Any:
        raise InductorError(RuntimeError("no C++ compiler was found"), None)

    half: Any = aot_autograd(fw_compiler=lambda graph, _: make_boxed_func(graph), bw_compiler=fail)
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **options: real(function, backend=half, **options))
    layer = Block(0)
    Compiler(required=False).compile_layers([layer])
    result = layer(torch.randn(2, 8, requires_grad=True), scale=1.0).sum()
    with pytest.raises(EngineError, match="backward pass cannot be compiled") as raised, explained_compilation():
        result.backward()
    assert "no C++ compiler was found" in str(raised.value) and "train.compile=false" in str(raised.value)


def steps(engine: FsdpEngine) -> list[dict[str, float]]:
    return [engine.train_batch(batch_of(groups_of(5, seed=seed)), loss=PolicyLoss()) for seed in range(3)]


@pytest.fixture(params=["model_directory", "mixture_directory"])
def directory(request: pytest.FixtureRequest) -> Path:
    found: Path = request.getfixturevalue(request.param)
    return found


def test_an_engine_traces_its_layers_once_and_takes_the_same_steps(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_the_tracer_alone(monkeypatch)
    settings: dict[str, Any] = {"micro_batch_tokens": 40, "activation_checkpointing": True}
    plain, compiled = (engine_on(directory, None, compile=wanted, **settings) for wanted in (False, True))
    wanted, found = steps(plain), steps(compiled)
    assert [row.pop("recompilations") for row in found][1:] == [0, 0]
    assert found == [pytest.approx(row, rel=1e-4, abs=1e-6) for row in wanted]
    assert all("recompilations" not in row for row in wanted)


@pytest.mark.extended
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler uses deprecated parts of torch
def test_compiled_layers_compute_what_plain_ones_do(directory: Path) -> None:
    plain, compiled = (engine_on(directory, None, compile=wanted) for wanted in (False, True))
    batch = batch_of(groups_of(5, seed=0))
    assert_near(compiled.logprobs(batch), plain.logprobs(batch))
    losses = [engine.train_batch(batch, loss=PolicyLoss())["loss"] for engine in (plain, compiled)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4, abs=1e-5)
