"""Tokens on their way from vLLM's scheduler into a response; needs no vLLM."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

import numpy as np
import pytest

from hwrl.interfaces import GenerationRequest, Sampling
from hwrl.rollout import StopFinder
from hwrl_vllm.partial import PartialResponse
from hwrl_vllm.scheduler import NewTokens, PackedLogprobs, unpack


@dataclasses.dataclass
class Logprobs:
    """As vLLM's: a row for each token, the chosen token's first; ``cu_num_generated_tokens`` are the first rows."""

    logprobs: Any
    cu_num_generated_tokens: list[int] | None = None


class FinishReason(enum.IntEnum):
    STOP = 0
    LENGTH = 1


@dataclasses.dataclass
class Output:
    request_id: str
    new_token_ids: list[int]
    finish_reason: FinishReason | None = None
    new_logprobs: Logprobs | None = None
    routed_experts: Any = None


@dataclasses.dataclass
class Ran:
    """What the model gave for a step: the requests in its own order."""

    logprobs: Logprobs | None
    req_id_to_index: dict[str, int]


@dataclasses.dataclass
class Outputs:
    outputs: list[Output]


class Scheduler:
    """Gives the outputs of a step in the scheduler's order, without a request that got no token."""

    def update_from_output(self, scheduled: list[Output], ran: Ran) -> dict[int, Outputs]:
        assert ran.logprobs is None, "vLLM's scheduler has nothing to slice"
        return {0: Outputs(scheduled)}


class PackingScheduler(PackedLogprobs, Scheduler):
    pass


@pytest.mark.parametrize("begins", [None, [0, 1, 3]])
def test_each_request_gets_its_log_probabilities_out_of_the_array_of_a_step(begins: list[int] | None) -> None:
    rows = np.array([[-1.0], [-2.0], [-3.0], [-4.0]], dtype=np.float32)
    ran = Ran(Logprobs(rows, begins), {"a": 0, "b": 1, "c": 2})
    tokens_of_b = [8] if begins is None else [8, 9]
    step = [Output("c", [7], finish_reason=FinishReason.STOP), Output("b", tokens_of_b)]
    (of_client,) = PackingScheduler().update_from_output(step, ran).values()
    last = -3.0 if begins is None else -4.0
    wanted = [NewTokens("c", [7], [last], "STOP"), NewTokens("b", tokens_of_b, [-2.0, -3.0][: len(tokens_of_b)], None)]
    assert unpack(of_client.outputs) == wanted


def test_log_probabilities_of_another_scheduler_are_taken_too() -> None:
    step = [Output(name, [5], new_logprobs=Logprobs(np.array([[-0.5]], np.float32))) for name in "ab"]
    assert unpack(step) == [NewTokens("a", [5], [-0.5], None), NewTokens("b", [5], [-0.5], None)]
    assert unpack([]) == []


def test_a_response_has_the_version_of_each_token() -> None:
    partial = PartialResponse(GenerationRequest(1, np.array([3], np.int32), Sampling(8)), core_request=None)
    partial.mark(1)  # an update before the first token
    partial.take(NewTokens("1", [4, 5], [-1.0, -2.0], None))
    partial.mark(2)
    partial.take(NewTokens("1", [6], [-3.0], None))
    partial.mark(3)
    partial.mark(-1)  # an update that failed
    partial.take(NewTokens("1", [7], [-4.0], "LENGTH"))
    response = partial.response(version=4, eos_ids=[7])
    assert (response.token_ids.tolist(), response.versions.tolist()) == ([4, 5, 6, 7], [2, 2, 3, 4])
    assert response.logprobs.tolist() == [-1.0, -2.0, -3.0, -4.0] and not response.truncated


def test_a_response_ends_at_its_stop_though_vllm_has_run_ahead() -> None:
    sampling = Sampling(8, stop=("cd",), stop_token_ids=(25,))
    stops = StopFinder(sampling, lambda ids: "".join(chr(ord("a") + token) for token in ids))
    partial = PartialResponse(GenerationRequest(1, np.array([3], np.int32), sampling), None, stops)
    partial.take(NewTokens("1", [1, 2], [-1.0, -2.0], None))
    partial.mark(1)
    partial.take(NewTokens("1", [3, 4, 5], [-3.0, -4.0, -5.0], "LENGTH"))
    response = partial.response(version=2, eos_ids=[0])
    assert (response.token_ids.tolist(), response.logprobs.tolist()) == ([1, 2, 3], [-1.0, -2.0, -3.0])
    assert (response.versions.tolist(), response.stop, response.truncated) == ([1, 1, 2], "cd", False)
