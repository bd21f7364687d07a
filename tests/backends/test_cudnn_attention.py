"""The padding around cuDNN's attention, with torch's attention in place of the kernel, which needs a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hwrl import Backend, BackendInfo
from hwrl_cuda import cudnn

GENERIC = Backend(BackendInfo("generic", "cpu", "for any device"))
LENGTHS = ([5, 4, 4], [7], [3, 3, 0, 2])


def parts(query: Any, key: Any, value: Any, scale: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the causal scores, and key and value with a head for each of the query's."""
    shared = query.shape[1] // key.shape[1]
    keys, values = key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1)
    scores = (query @ keys.transpose(-1, -2)) * scale
    return scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf), keys, values


def forward(query: Any, key: Any, value: Any, *_: Any, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what cuDNN's kernel returns: the attention, and the logarithm of the sum of exponentials."""
    scores, _keys, value = parts(query, key, value, scale)
    return scores.softmax(-1) @ value, scores.logsumexp(-1)[..., None]


def backward(gradient: Any, query: Any, key: Any, value: Any, out: Any, logsumexp: Any, *_: Any, scale: float) -> Any:
    """Return the gradients from what the forward pass kept, as cuDNN's kernel does."""
    scores, keys, values = parts(query, key, value, scale)
    weights = (scores - logsumexp).exp()
    of_weights = gradient @ values.transpose(-1, -2)
    of_scores = weights * (of_weights - (gradient * out).sum(-1, keepdim=True)) * scale
    shared = (key.shape[1], query.shape[1] // key.shape[1])
    of_key = (of_scores.transpose(-1, -2) @ query).unflatten(1, shared).sum(2)
    of_value = (weights.transpose(-1, -2) @ gradient).unflatten(1, shared).sum(2)
    return of_scores @ keys, of_key, of_value


@pytest.fixture(autouse=True)
def without_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudnn, "forward_kernel", forward)
    monkeypatch.setattr(cudnn, "backward_kernel", backward)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_values_and_gradients_are_those_of_each_sequence(lengths: list[int]) -> None:
    torch.manual_seed(0)
    tokens = sum(lengths)
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    inputs = [torch.randn(tokens, heads, 8, requires_grad=True) for heads in (4, 2, 2)]
    weights = torch.randn(tokens, 4, 8)
    found = []
    for attend in (cudnn.attend, GENERIC.varlen_attention):
        out = attend(*inputs, cu_seqlens=cu_seqlens, max_length=max(lengths) + 1, scale=None)
        found.append([out, *torch.autograd.grad((out * weights).sum(), inputs)])
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


def test_boundaries_that_changed_in_place_are_read_again() -> None:
    cu_seqlens = torch.tensor([0, 4, 6], dtype=torch.int32)
    inputs = [torch.randn(6, heads, 8) for heads in (4, 2, 2)]
    cudnn.attend(*inputs, cu_seqlens=cu_seqlens, max_length=4, scale=None)
    cu_seqlens[1] = 2
    wanted = GENERIC.varlen_attention(*inputs, cu_seqlens=cu_seqlens.clone(), max_length=4)
    torch.testing.assert_close(cudnn.attend(*inputs, cu_seqlens=cu_seqlens, max_length=4, scale=None), wanted)


def test_the_trial_finds_a_wrong_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cudnn.error_of_trial("cpu") < 0.02

    def without_scale(*args: Any, scale: float) -> Any:
        return backward(*args, scale=1.0)

    monkeypatch.setattr(cudnn, "backward_kernel", without_scale)
    assert cudnn.error_of_trial("cpu") > 0.1


def test_rows_of_very_different_lengths_are_not_padded_and_short_ones_neither(monkeypatch: pytest.MonkeyPatch) -> None:
    def pays(rows: int, max_length: int, *, dtype: torch.dtype = torch.bfloat16, size: int = 64) -> bool:
        query, value = (torch.zeros(1000, heads, size, dtype=dtype) for heads in (4, 2))
        return cudnn.pays(query, value, rows=rows, max_length=max_length)

    assert not pays(10, 120), "no device here has the kernel"
    monkeypatch.setattr(cudnn, "_RUNS", True)
    assert pays(10, 120)
    assert not pays(10, 200)
    assert not pays(1, 1), "an empty pack"
    assert not pays(20, 60)
    assert not pays(10, 120, dtype=torch.float32)
    assert not pays(10, 120, size=256)
