"""The rollout engine on vLLM. vLLM runs ahead of :meth:`VllmEngine.step`, and pauses while weights change."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import torch

from hwrl.errors import EngineError, HwrlError, UnsupportedError, attempt_all
from hwrl.interfaces import (
    MEMORY_TAGS,
    Backend,
    Capability,
    Completion,
    GenerationRequest,
    RolloutEngine,
    RolloutSettings,
    ToolParser,
    WeightOffer,
)
from hwrl.lora import add_adapter
from hwrl.models import build_model
from hwrl.rollout import (
    require_adapter,
    require_awake,
    require_base,
    require_fit,
    require_held,
    require_memory_tags,
    require_no_adapter,
    require_same_model,
    require_sleep,
    require_weights,
    stop_finder,
    text_decoder,
)
from hwrl.saved_names import saved_weights
from hwrl.weights import Taken
from hwrl_vllm.causes import Causes
from hwrl_vllm.core import core_of
from hwrl_vllm.lora import request_lora, require_places
from hwrl_vllm.options import runs_inline
from hwrl_vllm.partial import PartialResponse
from hwrl_vllm.scheduler import NewTokens
from hwrl_vllm.starting import start_vllm, vllm_sampling
from hwrl_vllm.tools import vllm_tool_parser
from hwrl_vllm.worker import LentWeights, WeightLoading

NamedWeights = Mapping[str, torch.Tensor]
_WorkerResultT = TypeVar("_WorkerResultT")
_ENDS = ("STOP", "LENGTH")
"""vLLM's reasons with which a response is whole; with any other, vLLM has not finished it."""


class VllmEngine(RolloutEngine):
    """Generates with vLLM; ``options`` are more arguments of vLLM's ``EngineArgs``.

    Each worker receives weights straight into its own parameters.

    vLLM begins steps before :meth:`step` is called. An update waits for the steps that have begun. The next step begins
    when all workers have the new weights. Running requests keep their attention cache in an update and continue with
    the new weights. A request that comes after an update reads no cache from before it. After a failed update or step
    the engine has no weights, and generates nothing until an update succeeds. A failed step drops the pending requests,
    and ends vLLM's process if the engine core has one.

    :attr:`vllm` is vLLM's ``LLMEngine``, and :attr:`core` is the engine core behind it. Change nothing in them.

    With ``settings.free_cache_engine`` vLLM starts in its sleep mode. Raises UnsupportedError if vLLM cannot sleep
    on this device, ConfigError if vLLM supports no adapter in one of the adapter's layers, or not the values of
    ``settings.sampling``, and EngineError if vLLM does not start.
    """

    def __init__(self, settings: RolloutSettings, *, options: Mapping[str, Any], backend: Backend) -> None:
        self._settings, self._backend = settings, backend
        self.receivers = settings.tensor_parallel
        self._held = [Taken()] * self.receivers  # what each worker received last and still has in its weights
        inline = runs_inline(options, backend)
        self._worker_is_here = inline and settings.tensor_parallel == 1
        if not self._worker_is_here:
            backend.require(Capability.DEVICE_IPC, needed_for="give weights to vLLM's processes")
        with torch.device("meta"):
            model = build_model(settings.model_directory, dtype=settings.dtype)
            self._base, self._adapter = saved_weights(add_adapter(model, settings.lora) if settings.lora else model)
        self._adapter_config = settings.lora.peft_config() if settings.lora else {}
        self._requests: dict[str, PartialResponse] = {}
        self._finished: list[Completion] = []  # for the next step; an update may finish some
        self._waiting: list[str] = []  # names of requests that vLLM cannot run yet, and does not have
        self._request_numbers = itertools.count()
        self._cache_number = 0  # the number of updates and sleeps; a cached prefix is valid for one number only
        self._asleep: frozenset[str] = frozenset()
        self._causes = Causes()
        self._decode = text_decoder(settings.model_directory)
        try:
            self.vllm = start_vllm(settings, options, inline=inline, causes=self._causes)
        except BaseException:
            self._causes.close()
            raise
        self.core = core_of(self.vllm.engine_core)
        self._causes.clear()  # drop errors that did not stop the start
        try:
            self._prepare()
        except BaseException:
            self.close()
            raise

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        for request in requests:
            require_fit(request, max_length=self._settings.max_length)
        accepted = [
            PartialResponse(request, self._core_request(request), stop_finder(request, self._decode))
            for request in requests
        ]
        with self._error_drops_weights("taking requests"):
            for partial in accepted:
                self._add(partial)

    def step(self) -> list[Completion]:
        require_awake(self._asleep, MEMORY_TAGS, needed_for="generate")
        require_weights(self.version, pending=self.pending())
        if self._requests and not self._finished:
            with self._error_drops_weights("generating"):
                self._take(self.core.next_tokens())
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
        if requests:
            with self._error_drops_weights("dropping requests"):
                self.core.abort(requests)
        return dropped

    def check_weights(self, tensors: NamedWeights) -> None:
        require_same_model(self._base, tensors)

    def receive_weights(self, offer: WeightOffer) -> int | None:
        require_awake(self._asleep, {"weights"}, needed_for="receive weights")
        self._stop_serving()
        self.base = None
        for number, member in enumerate(offer.members):
            if member is not None:
                self._held[number] = Taken()
        try:
            results = self._on_workers(WeightLoading.hwrl_receive, pickle.dumps(offer), timeout_s=offer.limit_s)
        except Exception as exc:
            raise self._not_loaded(f"version {offer.version}", exc) from exc
        for number, result in enumerate(results):
            if result is not None:
                self._held[number] = Taken(*result)
        taken = require_held(self._held, offer)
        if taken is None:
            return None
        if self._adapter:
            self.base = taken.version
        else:
            self._serve(taken.version)
        return taken.proposal

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], *, version: int) -> None:
        require_no_adapter(self._adapter)
        self._replace(self._checked(weights, self._base), name=f"version {version}")
        self._serve(version)

    def load_base(self, weights: Iterable[tuple[str, torch.Tensor]], *, base: int) -> None:
        require_adapter(self._adapter)
        self._replace(self._checked(weights, self._base), name=f"base {base:#x}")
        self.base = base

    def load_adapter(self, weights: Iterable[tuple[str, torch.Tensor]], *, version: int, base: int) -> None:
        require_adapter(self._adapter)
        require_base(self.base, base)
        self._replace(self._checked(weights, self._adapter), name=f"version {version}", adapter=self._adapter_config)
        self._serve(version)

    def close(self) -> None:
        attempt_all(super().close, self.core.close, self._causes.close)

    def sleep(self, *, level: int) -> int:
        self._require_sleep_mode()
        require_sleep(level, pending=self.pending())
        if self._asleep:
            return 0
        with self._error_drops_weights("falling asleep"):
            self._take(self.core.pause())  # only tokens of aborted requests can come
            self._on_workers(WeightLoading.hwrl_release_receiver)
            free_nbytes = self._free_nbytes()
            self._asleep = MEMORY_TAGS  # before the call, because a failed sleep may have freed memory
            self.core.sleep(level)
            self._cache_number += 1
            if level > 1:
                self._forget_weights()
            return self._free_nbytes() - free_nbytes

    def wake(self, tags: Collection[str] = MEMORY_TAGS) -> None:
        self._require_sleep_mode()
        require_memory_tags(tags)
        asleep = self._asleep.intersection(tags)
        if asleep:
            with self._error_drops_weights("waking up"):
                self.core.wake(sorted(asleep))
                self._asleep -= asleep
                self._resume()

    def tool_parser(self, name: str, *, tokenizer: Any) -> ToolParser:
        return vllm_tool_parser(name, tokenizer)

    def _prepare(self) -> None:
        """Check that vLLM supports the settings, and prepare its workers."""
        described = {name: (tensor.dtype, tensor.shape) for name, tensor in self._base.items()}
        with self._error_drops_weights("preparing its workers"):
            self._on_workers(WeightLoading.hwrl_follow_logprobs_mode)
            self._on_workers(WeightLoading.hwrl_record, pickle.dumps(described))
            if self._settings.free_cache_engine:
                self._on_workers(WeightLoading.hwrl_prepare_sleep)
            if self._adapter:
                require_places(self._on_workers(WeightLoading.hwrl_layers_without_place, list(self._adapter)))

    @contextmanager
    def _error_drops_weights(self, activity: str) -> Iterator[None]:
        """Turn vLLM's errors into EngineError. Then drop weights and requests: the workers' state is unknown."""
        try:
            yield
        except Exception as exc:
            self._forget_weights()
            dropped = self.pending()
            with suppress(Exception):  # vLLM has just failed
                self.abort()
            if isinstance(exc, HwrlError | torch.OutOfMemoryError):  # Backend.allocating translates the second
                raise
            cause = self._causes.of(exc)
            if cause.is_out_of_memory:
                raise torch.OutOfMemoryError(cause.text) from exc
            raise EngineError(
                f"vLLM failed while {activity}; its {dropped} requests are dropped, and it has no weights",
                why=cause.text,
                fix=self._repair("wake it if it sleeps, and load a whole version before the next step"),
            ) from exc

    def _repair(self, otherwise: str) -> str:
        """Return what to do after a failure of vLLM: ``otherwise``, or make a new engine."""
        if self.core.has_ended:
            return "make a new engine, because vLLM's process has ended; in a run the replica is replaced"
        return f"{otherwise}; after a worker's death, make a new engine"

    def _free_nbytes(self) -> int:
        return sum(self._on_workers(WeightLoading.hwrl_free_nbytes))

    def _require_sleep_mode(self) -> None:
        if not self._settings.free_cache_engine:
            raise UnsupportedError(
                "this engine cannot sleep",
                why="it was not started in vLLM's sleep mode",
                fix="make it with settings.free_cache_engine; in a run, rollout.free_cache_engine=true",
            )

    def _checked(self, weights: Iterable[tuple[str, torch.Tensor]], own: NamedWeights) -> NamedWeights:
        """Return ``weights`` contiguous. Raises EngineError unless their names and shapes are those of ``own``."""
        require_awake(self._asleep, {"weights"}, needed_for="load weights")
        given = {name: tensor.contiguous() for name, tensor in weights}
        require_same_model(own, given)
        return given

    def _forget_weights(self) -> None:
        self.version, self.base = -1, None
        self._held = [Taken()] * self.receivers

    def _stop_serving(self) -> None:
        """Pause vLLM and take the tokens of the steps that have begun. Then the engine has no version."""
        with self._error_drops_weights("finishing a step before an update"):
            self._take(self.core.pause())
        for partial in self._requests.values():
            partial.mark(self.version)
        self.version = -1

    def _replace(self, weights: NamedWeights, *, name: str, adapter: Mapping[str, Any] | None = None) -> None:
        """Let the workers load ``weights``: a whole model, or an adapter if ``adapter`` is PEFT's config.

        Afterwards the engine has no version; the caller sets it. A whole model replaces the base, too. If ``weights``
        cannot be copied to where the workers read them, for example for lack of memory, the engine keeps its version.
        """
        copied = self._on_device(weights, name)
        self._stop_serving()
        if adapter is None:
            self.base, self._held = None, [Taken()] * self.receivers
        try:
            self._load(copied, adapter)
        except Exception as exc:
            raise self._not_loaded(name, exc) from exc

    def _not_loaded(self, name: str, exc: Exception) -> EngineError:
        return EngineError(
            f"{name} was not loaded, and the version before is gone",
            why=f"vLLM's worker failed in the middle: {self._causes.of(exc).text}",
            fix=self._repair("load a whole version before the next step"),
        )

    def _load(self, weights: NamedWeights, adapter: Mapping[str, Any] | None) -> None:
        """Pass ``weights`` to the worker in this process, or lend their memory to the workers' processes. Blocks."""
        if self._worker_is_here:
            self._on_workers(WeightLoading.hwrl_load, weights, adapter)
            return
        lent = LentWeights.of(weights, self._backend)
        self._backend.synchronize()
        self._on_workers(WeightLoading.hwrl_load_lent, pickle.dumps((lent, adapter)))

    def _on_workers(
        self, method: Callable[..., _WorkerResultT], *args: Any, timeout_s: float | None = None
    ) -> list[_WorkerResultT]:
        """Call ``method`` of WeightLoading in each worker, and return the results in rank order. Blocks."""
        return self.core.call_workers(method.__name__, *args, timeout_s=timeout_s)

    def _on_device(self, weights: NamedWeights, name: str) -> NamedWeights:
        """Return ``weights`` in memory that the workers can read. A worker's process can open device memory only."""
        if self._worker_is_here:
            return weights
        own = self._backend.device()
        with self._backend.allocating(f"the copy of {name} for vLLM's workers"):
            try:
                return {name: one if one.device.type == own.type else one.to(own) for name, one in weights.items()}
            except NotImplementedError as exc:  # a meta tensor, for example
                raise EngineError(
                    f"{name} was not loaded; the engine keeps the version before",
                    why=str(exc),
                    fix="give tensors with values, in host memory or on the device",
                ) from exc

    def _serve(self, version: int) -> None:
        """Set the version, and let vLLM continue with it."""
        self.version = version
        self._cache_number += 1
        with self._error_drops_weights("continuing after an update"):
            self._restart_requests()
            self._resume()

    def _resume(self) -> None:
        """If vLLM has weights and is awake, let it begin steps again and give it the waiting requests."""
        if self.version >= 0 and not self._asleep:
            self.core.resume()
            waiting, self._waiting = self._waiting, []
            for name in waiting:
                self._give(name)

    def _add(self, partial: PartialResponse) -> None:
        """Keep the request under a name of its own, and give it to vLLM if that can run it."""
        name = f"{partial.request.request_id}-{next(self._request_numbers)}"
        self._requests[name] = partial
        if self.version >= 0 and not self._asleep:
            self._give(name)
        else:
            self._waiting.append(name)

    def _give(self, name: str) -> None:
        """Give the request to vLLM. Its salt hides cached prefixes from before the last update or sleep."""
        given = copy.copy(self._requests[name].core_request)
        given.request_id, given.cache_salt = name, str(self._cache_number)
        self.core.add(given)

    def _core_request(self, request: GenerationRequest) -> Any:
        """Return the request as vLLM's ``EngineCoreRequest``; :meth:`_give` sets the name and the salt."""
        sampling = vllm_sampling(request.sampling, self._settings.eos_ids)
        prompt = {"type": "token", "prompt_token_ids": request.prompt_ids.tolist(), "cache_salt": "0"}
        try:
            return self.vllm.input_processor.process_inputs(
                str(request.request_id),
                prompt,
                sampling,
                supported_tasks=("generate",),
                lora_request=request_lora() if self._settings.lora else None,
            )
        except Exception as exc:  # since vLLM 0.28 these errors are not ValueErrors
            raise EngineError(
                f"vLLM refuses request {request.request_id}",
                why=str(exc),
                fix="correct the prompt, or the cause in the reason",
            ) from exc

    def _take(self, tokens: Sequence[NewTokens]) -> None:
        """Append new tokens to their requests, and keep finished responses for the next :meth:`step`.

        vLLM does not look for stop texts. So it may generate beyond one, until this aborts the request in vLLM.
        """
        stopped = []
        for new in tokens:
            partial = self._requests.get(new.request_id)
            if partial is None:  # aborted, or ended by a stop
                continue
            partial.take(new)
            if partial.stop is None and new.end is None:
                continue
            del self._requests[new.request_id]
            if partial.stop is None:
                _require_end(partial, new.end)
            elif new.end is None:
                stopped.append(new.request_id)
            response = partial.response(version=self.version, eos_ids=self._settings.eos_ids)
            self._finished.append(Completion(partial.request.request_id, response))
        if stopped:
            self.core.abort(stopped)

    def _restart_requests(self) -> None:
        """Restart the requests in vLLM without a token: their prompts may have been computed with the old weights."""
        begun = self._requests.keys() - self._waiting
        without = [name for name, partial in self._requests.items() if name in begun and not partial.token_ids]
        self.core.abort(without)
        for name in without:
            self._add(self._requests.pop(name))


def _require_end(partial: PartialResponse, end: str | None) -> None:
    """Raise EngineError if ``end`` says that vLLM ended the request before its response was whole."""
    if end not in _ENDS:
        raise EngineError(
            f"vLLM did not finish request {partial.request.request_id}",
            why=f"it ended with {end} after {len(partial.token_ids)} tokens, as on a signal to vLLM's process",
            fix="load a whole version before the next step, or make a new engine if vLLM's process ends",
        )
