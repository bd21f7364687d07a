"""The rollout engine on vLLM: vLLM steps ahead, and pauses while weights change."""

from __future__ import annotations

import dataclasses
import itertools
import os
import pickle
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch

from hwrl.discovery import engine_args
from hwrl.errors import ConfigError, EngineError, HwrlError, UnsupportedError
from hwrl.interfaces import (
    MEMORY_TAGS,
    Backend,
    Capability,
    Completion,
    GenerationRequest,
    RolloutEngine,
    RolloutSettings,
    Sampling,
)
from hwrl.lora import add_adapter, divided
from hwrl.models import build_model
from hwrl.rollout import (
    require_adapter,
    require_awake,
    require_base,
    require_fit,
    require_no_adapter,
    require_none_pending,
    require_same_model,
    require_weights,
)
from hwrl_vllm.core import core_of
from hwrl_vllm.lora import request_lora, require_dtype, require_places
from hwrl_vllm.options import engine_arguments, keys_in, runs_inline
from hwrl_vllm.orphans import OWNER
from hwrl_vllm.partial import PartialResponse
from hwrl_vllm.scheduler import NewTokens
from hwrl_vllm.worker import LentWeights

Weights = Mapping[str, torch.Tensor]


class VllmEngine(RolloutEngine):
    """Generates with vLLM; ``options`` are further arguments of vLLM's ``EngineArgs``.

    vLLM begins steps before :meth:`step` is called. An update waits for the step that has begun; no other begins until
    all workers have the new weights. Running requests keep their attention cache across it and continue with the new
    weights. Requests after an update read no cache from before it. After a failed update or step the engine has no
    weights, and generates nothing until an update succeeds. A failed step drops the pending requests, and ends vLLM's
    process if it has one.

    With ``settings.may_sleep`` it starts in vLLM's sleep mode. Raises ConfigError if vLLM has no sleep mode on this
    device, no place for a part of the adapter, or no sampling at ``settings.temperature``.
    """

    def __init__(self, settings: RolloutSettings, *, options: Mapping[str, Any], backend: Backend) -> None:
        self._settings, self._backend = settings, backend
        inline = runs_inline(options, backend)
        self._worker_is_here = inline and settings.tensor_parallel == 1
        if not self._worker_is_here:
            backend.require(Capability.DEVICE_IPC, needed_for="give weights to vLLM's processes")
        with torch.device("meta"):
            model = build_model(settings.model_directory, dtype=settings.dtype)
            self._base, self._adapter = divided(add_adapter(model, settings.lora) if settings.lora else model)
        self._form = settings.lora.peft_config() if settings.lora else {}
        self._requests: dict[str, PartialResponse] = {}
        self._finished: list[Completion] = []  # in an update, for the next step
        self._waiting: list[str] = []  # not given to vLLM, because it cannot run them yet
        self._request_numbers = itertools.count()
        self._cache_number = 0
        self._asleep: frozenset[str] = frozenset()
        self._vllm = _start(settings, options, inline=inline)
        self._core = core_of(self._vllm.engine_core)
        try:
            self._prepare()
        except BaseException:
            self.close()
            raise

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        for request in requests:
            require_fit(request, max_length=self._settings.max_length)
        how = [_sampling(request.sampling, self._settings.eos_ids) for request in requests]
        for request, sampling in zip(requests, how, strict=True):
            self._add(PartialResponse(request, sampling))

    def step(self) -> list[Completion]:
        require_awake(self._asleep, MEMORY_TAGS, needed_for="generate")
        require_weights(self.version, pending=self.pending())
        if self._requests and not self._finished:
            with self._or_no_weights("generating"):
                self._take(self._core.next_tokens())
        finished, self._finished = self._finished, []
        return finished

    def pending(self) -> int:
        return len(self._requests) + len(self._finished)

    def capacity(self) -> int:
        return self._settings.max_running - len(self._requests)

    def abort(self) -> int:
        dropped, requests = self.pending(), list(self._requests)
        self._requests.clear()
        self._waiting, self._finished = [], []
        self._core.abort(requests)
        return dropped

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], *, version: int) -> None:
        require_no_adapter(self._adapter)
        self._replace("hwrl_load_weights", self._checked(weights, self._base), name=f"version {version}")
        self._serve(version)

    def load_base(self, weights: Iterable[tuple[str, torch.Tensor]], *, base: int) -> None:
        require_adapter(self._adapter)
        given = self._checked(weights, self._base)
        self.base = None
        self._replace("hwrl_load_weights", given, name=f"base {base:#x}")
        self.base = base

    def load_adapter(self, weights: Iterable[tuple[str, torch.Tensor]], *, version: int, base: int) -> None:
        require_adapter(self._adapter)
        require_base(self.base, base)
        given = self._checked(weights, self._adapter)
        self._replace("hwrl_load_adapter", given, self._form, name=f"version {version}")
        self._serve(version)

    def close(self) -> None:
        super().close()
        self._core.close()

    def sleep(self, *, level: int) -> int:
        self._require_sleep_mode()
        require_none_pending(self.pending())
        if self._asleep:
            return 0
        with self._or_no_weights("falling asleep"):
            self._take(self._core.pause())  # of aborted requests
            free_nbytes = self._free_nbytes()
            self._asleep = MEMORY_TAGS  # before the call: a failed sleep may have freed memory
            self._core.sleep(level)
            self._cache_number += 1
            if level > 1:
                self.version, self.base = -1, None
            return self._free_nbytes() - free_nbytes

    def wake(self, tags: Collection[str] = MEMORY_TAGS) -> None:
        self._require_sleep_mode()
        asleep = self._asleep.intersection(tags)
        if asleep:
            with self._or_no_weights("waking up"):
                self._core.wake(sorted(asleep))
            self._asleep -= asleep
            self._resume()

    def _prepare(self) -> None:
        """Check that vLLM supports the settings, and prepare its workers."""
        if self._settings.may_sleep:
            self._core.call_workers("hwrl_prepare_sleep")
        if self._adapter:
            require_places(self._core.call_workers("hwrl_layers_without_place", list(self._adapter)))

    @contextmanager
    def _or_no_weights(self, activity: str) -> Iterator[None]:
        """Turn an error of vLLM into an EngineError, and drop weights and requests: the workers' state is unknown."""
        try:
            yield
        except Exception as exc:
            self.version, self.base = -1, None
            dropped = self.pending()
            with suppress(Exception):  # vLLM has just failed
                self.abort()
            if isinstance(exc, torch.OutOfMemoryError):  # Backend.allocating translates it
                raise
            raise EngineError(
                f"vLLM failed while {activity}; its {dropped} requests are dropped, and it has no weights",
                why=f"{type(exc).__name__}: {exc}",
                fix="wake it if it sleeps, and load a whole version before the next step; after a worker's death, "
                "make a new engine",
            ) from exc

    def _free_nbytes(self) -> int:
        return sum(self._core.call_workers("hwrl_free_nbytes"))

    def _require_sleep_mode(self) -> None:
        if not self._settings.may_sleep:
            raise UnsupportedError(
                "this engine cannot sleep",
                why="it was not started in vLLM's sleep mode",
                fix="make it with settings.may_sleep; in a run, rollout.free_cache_engine=true",
            )

    def _checked(self, weights: Iterable[tuple[str, torch.Tensor]], own: Weights) -> Weights:
        require_awake(self._asleep, {"weights"}, needed_for="load weights")
        given = {name: tensor.contiguous() for name, tensor in weights}
        require_same_model(own, given)
        return given

    def _replace(self, method: str, weights: Weights, *args: Any, name: str) -> None:
        """Let the workers load ``weights``. The engine has no version until all of them have succeeded."""
        with self._or_no_weights("finishing a step before an update"):
            self._take(self._core.pause())
        for partial in self._requests.values():
            partial.mark(self.version)
        self.version = -1
        try:
            self._call_workers(method, weights, *args)
        except Exception as exc:
            raise EngineError(
                f"{name} was not loaded, and the version before is gone",
                why=f"vLLM's worker failed in the middle: {type(exc).__name__}: {exc}",
                fix="load a whole version before the next step; after a worker's death, make a new engine",
            ) from exc

    def _call_workers(self, method: str, weights: Weights, *args: Any) -> None:
        if self._worker_is_here:
            self._core.call_workers(method, weights, *args)
            return
        lent = LentWeights.of(weights, self._backend)
        self._backend.synchronize()
        self._core.call_workers("hwrl_load_lent", method, pickle.dumps((lent, args)))

    def _serve(self, version: int) -> None:
        self.version = version
        self._cache_number += 1
        self._restart_requests()
        self._resume()

    def _resume(self) -> None:
        """Let vLLM run if it can: it has weights and is awake. Give it the waiting requests."""
        if self.version >= 0 and not self._asleep:
            self._core.resume()
            waiting, self._waiting = self._waiting, []
            for name in waiting:
                self._core.add(self._core_request(name))

    def _add(self, partial: PartialResponse) -> None:
        name = f"{partial.request.request_id}-{next(self._request_numbers)}"
        self._requests[name] = partial
        if self.version >= 0 and not self._asleep:
            self._core.add(self._core_request(name))
        else:
            self._waiting.append(name)

    def _core_request(self, name: str) -> Any:
        """Return the request as vLLM's engine core takes it."""
        partial = self._requests[name]
        # The salt hides cache entries of other weights, and from before a sleep.
        prompt = {
            "type": "token",
            "prompt_token_ids": partial.request.prompt_ids.tolist(),
            "cache_salt": str(self._cache_number),
        }
        try:
            return self._vllm.input_processor.process_inputs(
                name,
                prompt,
                partial.sampling,
                supported_tasks=("generate",),
                lora_request=request_lora() if self._settings.lora else None,
            )
        except Exception as exc:  # since 0.28 vLLM's errors are no ValueError
            del self._requests[name]
            raise EngineError(
                f"vLLM refuses request {partial.request.request_id}",
                why=str(exc),
                fix="correct the prompt, or the cause in the reason",
            ) from exc

    def _take(self, tokens: Sequence[NewTokens]) -> None:
        """Append the requests' new tokens; keep the finished ones for the next :meth:`step`."""
        for new in tokens:
            partial = self._requests.get(new.request_id)
            if partial is None:  # aborted
                continue
            partial.take(new)
            if new.is_end:
                del self._requests[new.request_id]
                response = partial.response(version=self.version, eos_ids=self._settings.eos_ids)
                self._finished.append(Completion(partial.request.request_id, response))

    def _restart_requests(self) -> None:
        """Restart the requests without a token: their prompts may have been computed with the old weights."""
        begun = self._requests.keys() - self._waiting
        without = [name for name, partial in self._requests.items() if name in begun and not partial.token_ids]
        self._core.abort(without)
        for name in without:
            self._add(self._requests.pop(name))


def _sampling(wanted: Sampling, eos_ids: Sequence[int]) -> Any:
    """Return ``wanted`` as vLLM's SamplingParams; EngineError if vLLM would change it."""
    from vllm import SamplingParams

    try:
        sampling = SamplingParams(
            temperature=wanted.temperature,
            max_tokens=wanted.max_new_tokens,
            stop_token_ids=list(eos_ids),
            ignore_eos=True,  # the configuration's, which may be others
            logprobs=0,  # of the chosen token only
            detokenize=False,
        )
        if sampling.temperature != wanted.temperature:
            raise ValueError(f"it would sample at temperature {sampling.temperature}")
    except Exception as exc:  # since 0.28 vLLM's errors are no ValueError
        raise EngineError(
            f"vLLM cannot generate {wanted.max_new_tokens} tokens at temperature {wanted.temperature}",
            why=str(exc),
            fix="set rollout.temperature to a value that vLLM leaves unchanged, for example 1.0",
        ) from exc
    return sampling


def _start(settings: RolloutSettings, options: Mapping[str, Any], *, inline: bool) -> Any:
    """Return vLLM's engine; ConfigError if it refuses its arguments, EngineError if it fails otherwise."""
    # vLLM for CPUs would start a worker process, too; the argument of _make decides.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"  # this process has threads, and may have used the device
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # replicas and trainer share the host's cores
    os.environ[OWNER] = str(os.getpid())
    try:
        return _make(settings, options, inline=inline)
    except (HwrlError, torch.OutOfMemoryError):  # Backend.allocating translates it
        raise
    except ValueError as exc:
        raise ConfigError(
            "vLLM refuses its engine arguments", why=str(exc), fix=f"correct {keys_in(str(exc), options)}"
        ) from exc
    except Exception as exc:
        raise EngineError(
            "vLLM does not start",
            why=f"{type(exc).__name__}: {exc}",
            fix="fix the error in the reason; vLLM's own log may have details",
        ) from exc


def _make(settings: RolloutSettings, options: Mapping[str, Any], *, inline: bool) -> Any:
    from vllm import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    require_dtype(settings)
    _require_temperature(settings)
    known = {field.name for field in dataclasses.fields(EngineArgs)}
    arguments = engine_arguments(settings, options, device=engine_args("vllm"), known=known)
    return LLMEngine.from_engine_args(EngineArgs(**arguments), enable_multiprocessing=not inline)


def _require_temperature(settings: RolloutSettings) -> None:
    try:
        _sampling(Sampling(1, settings.temperature), settings.eos_ids)
    except EngineError as exc:
        raise ConfigError(
            f"rollout.temperature={settings.temperature} cannot be used with vLLM", why=exc.why, fix=exc.fix
        ) from exc
