"""The rollout engine on vLLM: its scheduler runs in this process, so that weights change between two steps."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from hwrl.backend import Backend, Capability
from hwrl.errors import ConfigError, EngineError, UnsupportedError
from hwrl.models import build_model
from hwrl.registry import engine_args
from hwrl.rollout.engine import (
    Completion,
    GenerationRequest,
    RolloutEngine,
    RolloutSettings,
    require_fit,
    require_same_model,
    require_weights,
)
from hwrl.rollout.groups import Response
from hwrl_vllm.options import engine_arguments
from hwrl_vllm.worker import Lent

_TAGS = frozenset({"weights", "kv_cache"})
"""What sleeps and wakes."""


@dataclasses.dataclass
class _Growing:
    """A request and what it has generated."""

    request: GenerationRequest
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    versions: list[int] = dataclasses.field(default_factory=list)

    def response(self, eos_ids: Sequence[int]) -> Response:
        return Response(
            token_ids=np.array(self.token_ids, dtype=np.int32),
            logprobs=np.array(self.logprobs, dtype=np.float32),
            versions=np.array(self.versions, dtype=np.int32),
            truncated=self.token_ids[-1] not in eos_ids,
        )


class VllmEngine(RolloutEngine):
    """Generates with vLLM; ``options`` are further arguments of vLLM's ``EngineArgs``.

    Requests in flight keep their attention cache across an update and go on with the new weights, but no request
    that begins after it reads what was cached before. If an update fails the engine has no weights, and refuses to
    generate until one has succeeded.

    An engine that was started with ``enable_sleep_mode`` can :meth:`sleep`, so that others use the device meanwhile.
    """

    def __init__(self, settings: RolloutSettings, *, options: Mapping[str, Any], backend: Backend) -> None:
        self._settings, self._backend = settings, backend
        self._workers = options.get("tensor_parallel_size", 1)
        if self._workers > 1:
            backend.require(Capability.DEVICE_IPC, needed_for=f"share weights among {self._workers} workers of vLLM")
        self._vllm = _start(settings, options)
        with torch.device("meta"):
            self._expected = build_model(settings.model_directory, dtype=settings.dtype).state_dict()
        self._requests: dict[str, _Growing] = {}
        self._updates = 0
        self._asleep: set[str] = set()
        if self._has_sleep_mode():
            self._vllm.collective_rpc("hwrl_prepare_sleep")

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        for request in requests:
            require_fit(request, max_length=self._settings.max_length)
        for request in requests:
            self._add(request)

    def step(self) -> list[Completion]:
        self._require_awake(_TAGS, needed_for="generate")
        require_weights(self.version, pending=self.pending())
        outputs = self._vllm.step()
        return [completion for output in outputs for completion in self._take(output)]

    def pending(self) -> int:
        return len(self._requests)

    def capacity(self) -> int:
        return self._settings.max_running - self.pending()

    def abort(self) -> int:
        dropped = self.pending()
        self._vllm.abort_request(list(self._requests))
        self._requests.clear()
        return dropped

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], *, version: int) -> None:
        self._require_awake({"weights"}, needed_for="load weights")
        given = {name: tensor.contiguous() for name, tensor in weights}
        require_same_model(self._expected, given)
        self.version = -1  # until all of the model is new
        try:
            self._load(given)
        except Exception as exc:
            raise EngineError(
                f"version {version} was not loaded, and the version before is gone",
                why=f"vLLM's worker failed in the middle: {type(exc).__name__}: {exc}",
                fix="load a whole version before the next step; if a worker has died, with a new engine",
            ) from exc
        self.version = version
        self._updates += 1
        self._begin_again()

    def close(self) -> None:
        super().close()
        self._vllm.engine_core.shutdown()

    def sleep(self, *, level: int) -> int:
        """Free device memory and return how many bytes; nothing and 0 if the engine sleeps. Blocks.

        Level 1 keeps the weights in host memory. Level 2 keeps none: ``version`` is -1, until weights are loaded after
        ``wake(["weights"])``. Raises UnsupportedError if the engine cannot, EngineError if requests are pending.
        """
        self._require_sleep_mode()
        if self._asleep:
            return 0
        if self.pending():
            raise EngineError(
                "the engine cannot sleep now",
                why=f"{self.pending()} requests are pending, and their attention cache would be lost",
                fix="step until none is pending, or abort()",
            )
        free_nbytes = self._backend.memory_info().free_nbytes
        self._vllm.sleep(level)
        self._asleep = set(_TAGS)
        if level > 1:
            self.version = -1
        return self._backend.memory_info().free_nbytes - free_nbytes

    def wake(self, tags: Collection[str] = _TAGS) -> None:
        """Take device memory again for ``tags``, of ``weights`` and ``kv_cache``; nothing for those that are awake."""
        self._require_sleep_mode()
        asleep = [tag for tag in tags if tag in self._asleep]
        if asleep:
            self._vllm.wake_up(asleep)
            self._asleep.difference_update(asleep)

    def _has_sleep_mode(self) -> bool:
        return bool(self._vllm.vllm_config.model_config.enable_sleep_mode)

    def _require_sleep_mode(self) -> None:
        if not self._has_sleep_mode():
            raise UnsupportedError(
                "this engine cannot sleep",
                why="it was not started in vLLM's sleep mode, which vLLM does not have on every device",
                fix="set rollout.engine_options.enable_sleep_mode=true; vLLM refuses it where it is not possible",
            )

    def _require_awake(self, tags: Collection[str], *, needed_for: str) -> None:
        asleep = sorted(self._asleep.intersection(tags))
        if asleep:
            raise EngineError(
                f"the engine cannot {needed_for}", why=f"it sleeps: {', '.join(asleep)}", fix=f"wake({asleep}) first"
            )

    def _load(self, weights: Mapping[str, torch.Tensor]) -> None:
        if self._workers == 1:  # it is in this process
            self._vllm.collective_rpc("hwrl_load_weights", args=(weights,))
            return
        lent = {name: Lent.of(tensor, self._backend) for name, tensor in weights.items()}
        self._backend.synchronize()
        self._vllm.collective_rpc("hwrl_load_lent_weights", args=(lent,))

    def _add(self, request: GenerationRequest) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        sampling = SamplingParams(
            temperature=request.sampling.temperature,
            max_tokens=request.sampling.max_new_tokens,
            stop_token_ids=list(self._settings.eos_ids),
            logprobs=0,  # of the token that was chosen, and of no other
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        # The salt keeps what was cached under other weights from being read.
        prompt = {"prompt_token_ids": request.prompt_ids.tolist(), "cache_salt": str(self._updates)}
        self._requests[str(request.request_id)] = _Growing(request)
        self._vllm.add_request(str(request.request_id), prompt, sampling)

    def _take(self, output: Any) -> list[Completion]:
        """Append what a request has generated; return its completion if it is finished."""
        growing, (new,) = self._requests[output.request_id], output.outputs
        growing.token_ids += new.token_ids
        growing.logprobs += [of[token].logprob for token, of in zip(new.token_ids, new.logprobs, strict=True)]
        growing.versions += [self.version] * len(new.token_ids)
        if not output.finished:
            return []
        del self._requests[output.request_id]
        return [Completion(growing.request.request_id, growing.response(self._settings.eos_ids))]

    def _begin_again(self) -> None:
        """Begin requests without a token again, whose prompts may have been computed with the weights before."""
        without = {name: growing.request for name, growing in self._requests.items() if not growing.token_ids}
        self._vllm.abort_request(list(without))
        for request in without.values():
            self._add(request)


def _start(settings: RolloutSettings, options: Mapping[str, Any]) -> Any:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the rollouter decides when a step is taken
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # replicas and trainer share the host's cores
    from vllm import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    known = {field.name for field in dataclasses.fields(EngineArgs)}
    arguments = engine_arguments(settings, options, device=engine_args("vllm"), known=known)
    try:
        return LLMEngine.from_engine_args(EngineArgs(**arguments))
    except ValueError as exc:
        raise ConfigError(
            "vLLM refuses its engine arguments",
            why=str(exc),
            fix="correct rollout.engine_options, or what is said there",
        ) from exc
