"""The built-in engines with one fault, named by HWRL_FAULT: the conformance kit must catch each of them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import hwrl
from hwrl.errors import EngineError, UnsupportedError
from hwrl.interfaces import MEMORY_TAGS, Batch, Completion, GenerationRequest, Moved, RolloutSettings, TokenLoss
from hwrl.rollout import EmbeddedEngine
from hwrl.train import FsdpEngine


def fault(name: str) -> bool:
    return os.environ.get("HWRL_FAULT") == name


@hwrl.hookimpl
def hwrl_train_engine(settings: Any, options: Any, backend: Any, group: Any) -> FsdpEngine:
    if fault("the temperature is ignored"):
        settings = replace(settings, temperature=1.0)
    if fault("warm-up is ignored"):
        settings = replace(settings, warmup_steps=0)
    if FaultyTrainEngine.is_open:
        raise EngineError("a second engine", why="a process may have one, like one of Megatron-core", fix="close it")
    return FaultyTrainEngine(settings, backend=backend, group=None if fault("ranks train alone") else group)


@hwrl.hookimpl
def hwrl_rollout_engine(settings: RolloutSettings, options: Any, backend: Any) -> EmbeddedEngine:
    if fault("it cannot sleep") and settings.free_cache_engine:
        raise UnsupportedError("this engine cannot sleep", why="it never learnt to", fix="leave it awake")
    return FaultyRolloutEngine.from_settings(settings, backend=backend)


class Scaled:
    """A loss, times a factor."""

    def __init__(self, loss: Any, factor: float) -> None:
        self._loss, self._factor = loss, factor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loss, name)

    def __call__(self, inputs: Any) -> Any:
        loss, metrics = self._loss(inputs)
        factor = 40 / max(1, len(loss)) if fault("each micro-batch has a mean of its own") else self._factor
        return loss * factor, metrics


class FaultyTrainEngine(FsdpEngine):
    is_open = False

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        FaultyTrainEngine.is_open = True

    def close(self) -> None:
        super().close()
        FaultyTrainEngine.is_open = False

    @property
    def data_parallel_rank(self) -> int:
        return 0 if fault("all ranks take the first share") else super().data_parallel_rank

    @contextmanager
    def on_device(self, *, optimizer: bool) -> Iterator[Moved]:
        with super().on_device(optimizer=optimizer) as moved:
            if fault("bytes are reported that did not move"):
                moved.load.nbytes = 1
            yield moved
            if fault("an offload loses the optimizer's state") and self.settings.optimizer_offload:
                self.optimizer.state.clear()

    def train_batch(self, batch: Batch, *, loss: TokenLoss) -> dict[str, float]:
        if fault("row weights are ignored"):
            batch = replace(batch, weights=None)
        if fault("it goes uphill") or fault("each micro-batch has a mean of its own"):
            loss = Scaled(loss, -1.0)
        try:
            return super().train_batch(batch, loss=loss)
        except EngineError:
            if fault("it steps on a gradient that is not finite"):
                return {}
            raise

    def logprobs(self, batch: Batch) -> torch.Tensor:
        if fault("prompts are scored"):
            return super().logprobs(replace(batch, mask=torch.ones_like(batch.mask)))
        return super().logprobs(batch)

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in super().named_weights():
            tensor = tensor[None] if fault("weights have another shape") and tensor.ndim == 1 else tensor
            yield (name.removeprefix("model.") if fault("weights have other names") else name), tensor

    def weights_metadata(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in super().weights_metadata():
            tensor = tensor[None] if fault("weights have another shape") and tensor.ndim == 1 else tensor
            yield name, tensor.half() if fault("metadata is of another dtype") else tensor

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        if fault("the optimizer's state is not restored"):
            for moments in self.optimizer.state.values():
                moments["exp_avg"].zero_()

    def export(self, directory: Path) -> None:
        if fault("an export has the starting weights"):
            with hwrl_engine(self) as fresh:
                return fresh.export(directory)
        super().export(directory)


@contextmanager
def hwrl_engine(like: FsdpEngine) -> Iterator[FsdpEngine]:
    """A new engine with the same settings."""
    engine = FsdpEngine(like.settings, backend=hwrl.get_backend(), group=None)
    yield engine
    engine.close()


class FaultyRolloutEngine(EmbeddedEngine):
    is_closed = False

    def close(self) -> None:
        assert not self.is_closed, "an engine is closed once"
        self.is_closed = True
        super().close()

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        if fault("a request without room is cut"):
            room = self._max_length // 2
            requests = [self._with(one, max_new_tokens=min(room, one.sampling.max_new_tokens)) for one in requests]
        if fault("greedy requests are sampled"):
            requests = [self._with(one, temperature=one.sampling.temperature or 3.0) for one in requests]
        if fault("the temperature is 1"):
            requests = [self._with(one, temperature=min(1.0, one.sampling.temperature * 10)) for one in requests]
        if fault("all requests share a seed"):
            requests = [self._with(one, seed=1) for one in requests]
        if fault("filters are ignored"):
            requests = [self._with(one, top_k=-1) for one in requests]
        if fault("stop tokens are ignored"):
            requests = [self._with(one, stop_token_ids=()) for one in requests]
        super().submit(requests)

    @staticmethod
    def _with(request: GenerationRequest, **changes: Any) -> GenerationRequest:
        return replace(request, sampling=replace(request.sampling, **changes))

    def step(self) -> list[Completion]:
        done = [self._changed(one) for one in super().step()]
        return done * 2 if fault("requests come back twice") else done

    def _changed(self, done: Completion) -> Completion:
        response = done.response
        if fault("the end token is cut off") and not response.truncated and response.stop is None:
            cut = {name: getattr(response, name)[:-1] for name in ("token_ids", "logprobs", "versions")}
            response = replace(response, **cut)
        if fault("all tokens have the newest version"):
            response = replace(response, versions=response.versions * 0 + self.version)
        return replace(done, response=response)

    def capacity(self) -> int:
        return self._max_running if fault("capacity never falls") else super().capacity()

    def abort(self) -> int:
        dropped = super().abort()
        return 0 if fault("abort forgets what it dropped") else dropped

    def load_weights(self, weights: Any, *, version: int) -> None:
        given = dict(weights)
        if fault("incomplete weights are taken"):
            own = {name: tensor.clone() for name, tensor in self._base.items()}
            given = {name: given.get(name, tensor) for name, tensor in own.items()}
        super().load_weights(given.items(), version=version)
        if fault("loaded weights are not copied"):
            for name, parameter in self.model.named_parameters():
                parameter.data = given[name]

    def receive_weights(self, offer: Any) -> int | None:
        taken = super().receive_weights(offer)
        if fault("a received version is not stamped"):
            self.version = 1
        return taken

    def sleep(self, *, level: int) -> int:
        if fault("it sleeps in the middle of requests"):
            self.abort()
        if fault("any level is taken"):
            level = min(max(level, 1), 2)
        version = self.version
        freed = super().sleep(level=level)
        if fault("dropped weights keep their version"):
            self.version = version
        return 1 if fault("a second sleep frees again") else freed

    def wake(self, *tags: Any) -> None:
        if fault("other tags wake nothing, without an error"):
            tags = tuple(MEMORY_TAGS.intersection(each) for each in tags)
        super().wake(*tags)
        if fault("weights are lost in the sleep"):
            for parameter in self.model.parameters():
                parameter.data.zero_()
