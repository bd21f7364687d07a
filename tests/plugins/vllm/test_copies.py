"""Loading by recorded copies: equal to what the loaders do, and given up where they do more than copy."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hwrl.discovery import get_backend
from hwrl_vllm.copies import CopyPlan, Recorder
from tests.plugins.vllm.linked import Linked
from tests.plugins.vllm.serving import Policy, Weights, engine_of, generate, requests_of, write_model

Loader = Callable[[Any, Weights], None]
DEVICE = get_backend().device()


class Fused(torch.nn.Module):
    """A model whose ``fused`` holds two given tensors, and whose ``padded`` has more rows than the given one."""

    def __init__(self) -> None:
        super().__init__()
        self.fused = torch.nn.Parameter(torch.full((6, 4), torch.nan, device=DEVICE), requires_grad=False)
        self.padded = torch.nn.Parameter(torch.full((5, 3), torch.nan, device=DEVICE), requires_grad=False)


def weights_of(seed: int) -> Weights:
    """Return weights that lie in one storage, with gaps, in no particular order."""
    flat = torch.rand(100, generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    return {"k": flat[50:58].view(2, 4), "q": flat[10:26].view(4, 4), "p": flat[60:84].view(4, 6)}


def load(model: Any, weights: Weights) -> None:
    """Load as tensor-parallel loaders do: a shard of each, some of them by way of another tensor."""
    staged = torch.empty_like(model.fused.data)
    staged.narrow(0, 0, 4).copy_(weights["q"])
    staged.narrow(0, 4, 2).copy_(weights["k"])
    model.fused.data.copy_(staged)
    model.padded.data[:4].copy_(weights["p"].narrow(1, 3, 3))
    model.padded.data[4:].fill_(7.0)
    model.padded.data[4:4].copy_(weights["p"].narrow(0, 4, 0).narrow(1, 3, 3))  # a worker beyond the vocabulary


def load_a_square_transposed_and_all_twice(model: Any, weights: Weights) -> None:
    """Load as into GPT-2's layers, whose weights are transposed, and as biases are loaded: again the same."""
    for _ in range(2):
        model.fused.data[:4].copy_(weights["q"].t())
        model.fused.data[4:].copy_(weights["k"])
        model.padded.data[:4].copy_(weights["p"].narrow(1, 3, 3))
        model.padded.data[4:].fill_(7.0)


def record(loader: Loader) -> tuple[Fused, CopyPlan | None, str]:
    model, weights = Fused(), weights_of(0)
    with Recorder(weights) as recorder:
        loader(model, weights)
    return model, recorder.plan(model.parameters()), recorder.obstacle


@pytest.mark.parametrize("loader", [load, load_a_square_transposed_and_all_twice])
def test_a_plan_can_be_made_before_there_are_weights(loader: Loader) -> None:
    model, forms = Fused(), weights_of(0)
    given = {name: torch.empty(tensor.shape) for name, tensor in forms.items()}
    with Recorder(given, skips_copies=True) as recorder:
        loader(model, given)
    plan = recorder.plan(model.parameters())
    assert plan is not None
    wanted = Fused()
    loader(wanted, weights_of(1))
    plan.run({name: tensor.contiguous() for name, tensor in weights_of(1).items()})
    assert all(map(torch.equal, model.parameters(), wanted.parameters()))


@pytest.mark.parametrize("loader", [load, load_a_square_transposed_and_all_twice])
def test_the_copies_do_what_the_loaders_do(loader: Loader) -> None:
    model, plan, _ = record(loader)
    assert plan is not None
    for seed in range(1, 4):
        wanted, weights = Fused(), weights_of(seed)
        loader(wanted, weights)
        for parameter in model.parameters():
            parameter.fill_(torch.nan)  # as after a sleep that kept nothing
        plan.run(weights)
        assert all(map(torch.equal, model.parameters(), wanted.parameters()))
    assert plan.suits(weights) and not plan.suits({"q": weights["q"]})


@pytest.mark.parametrize("loader", [load, load_a_square_transposed_and_all_twice])
def test_a_staged_version_changes_nothing_until_it_is_installed(loader: Loader) -> None:
    model, plan, _ = record(loader)
    assert plan is not None
    before, wanted = [one.clone() for one in model.parameters()], Fused()
    staged = plan.staged()
    staged.run(weights_of(1))
    assert all(map(torch.equal, model.parameters(), before))
    model.padded.fill_(torch.nan)  # the constants are not staged
    plan.install(staged)
    loader(wanted, weights_of(1))
    assert all(map(torch.equal, model.parameters(), wanted.parameters()))


def scales(model: Any, weights: Weights) -> None:
    load(model, {**weights, "p": weights["p"] * 2})


def scales_in_place(model: Any, weights: Weights) -> None:
    load(model, weights)
    model.fused.data.mul_(2.0)


def looks_at_a_value(model: Any, weights: Weights) -> None:
    load(model, weights)
    model.padded.data[4:].fill_(weights["k"][0, 0].item())


def leaves_a_gap(model: Any, weights: Weights) -> None:
    load(model, weights)
    model.padded = torch.nn.Parameter(torch.zeros(6, 3, device=DEVICE), requires_grad=False)
    model.padded.data[:4].copy_(weights["p"].narrow(1, 3, 3))


def writes_twice(model: Any, weights: Weights) -> None:
    load(model, weights)
    model.padded.data[:1].copy_(weights["q"][:1, :3])


def writes_something_else_over_it(model: Any, weights: Weights) -> None:
    load(model, weights)
    model.padded.data[:1].copy_(torch.ones(1, 3, device=DEVICE))


def keeps_a_copy(model: Any, weights: Weights) -> None:
    load(model, weights)
    model.other = torch.empty(4, 6, device=DEVICE)
    model.other.copy_(weights["p"])


def transposes(model: Any, weights: Weights) -> None:
    load(model, weights)
    model.fused.data[:4].T.copy_(weights["q"])


@pytest.mark.parametrize(
    ("loader", "obstacle"),
    [
        (scales, "aten.mul.Tensor computes with the weights"),
        (scales_in_place, "aten.mul_.Tensor computes with the weights"),
        (looks_at_a_value, "computes with the weights"),
        (leaves_a_gap, r"a parameter of shape \(6, 3\) is not written once and whole"),
        (writes_twice, "is not written once and whole"),
        (writes_something_else_over_it, "something else is copied over"),
        (keeps_a_copy, "are kept outside the parameters"),
        (transposes, "not contiguous"),
    ],
)
def test_what_is_not_only_copies_is_not_repeated_and_told_with_its_reason(loader: Loader, obstacle: str) -> None:
    _, plan, told = record(loader)
    assert plan is None and re.search(obstacle, told)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM: make test-vllm")
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("form", ["llama", "qwen2", "gpt2"])  # the latter two have biases
def test_vllm_serves_what_was_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    if get_backend().info.device_type == "cpu":  # vLLM packs linear layers there, for a library's kernels
        monkeypatch.setattr("vllm._custom_ops._supports_onednn", False)
    write_model(tmp_path, form)
    policy, engine = Policy(tmp_path), engine_of(tmp_path, engine_core="inline")  # a function is called in its worker
    try:
        plans = engine.vllm.collective_rpc(lambda worker: worker.hwrl_loading.copies)  # made before any weights
        assert [{part.name for _, part in plan.copies} for plan in plans] == [policy.model.state_dict().keys()]
        with Linked(engine, "device" if DEVICE.type == "cpu" else "host") as linked:
            for version in range(4):
                assert linked.update(version, policy.change())
                requests = requests_of(4)
                policy.check_greedy(requests, generate(engine, requests))
        engine.load_weights(policy.change().items(), version=4)
        policy.check_greedy(requests, generate(engine, requests))
    finally:
        engine.close()
