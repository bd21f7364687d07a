"""The contracts of rollout engines, by level. The fixture ``subject`` names the engine."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from hwrl.comm import serve_store
from hwrl.errors import ConfigError, EngineError, UnsupportedError
from hwrl.interfaces import Backend, GenerationRequest, Response, RolloutEngine, RolloutSettings, Sampling
from hwrl.models import load_model
from hwrl.rollout import EngineModels
from hwrl.testing.contracts.model import (
    END,
    VOCABULARY,
    model_directory,
    model_weights,
    reference_model,
)
from hwrl.testing.contracts.need import skipping_refused
from hwrl.testing.levels import Level
from hwrl.testing.limits import scaled
from hwrl.testing.subject import Subject
from hwrl.weights import POLICY, WeightSender

_MAX_LENGTH = 64
_RUNNING = 4
_LOGPROB_OFF = 2e-2
_ALMOST = 1e-2
"""Rounding may swap two tokens with log-probabilities as close as this."""
_HOT = 2.0
"""A high temperature; some engines refuse higher ones."""
_MANY = 600
_WAIT_S = 60.0


_kept = pytest.StashKey[tuple[tuple[str, bool], RolloutEngine, torch.dtype]]()


class _OfRolloutEngine:
    """Gives each check an engine of the subject, with the model's weights as version 1. Checks share one engine.

    It computes in float32, or in bfloat16 if it refuses float32.
    """

    level: ClassVar[Level]
    free_cache_engine: ClassVar[bool] = False
    dtype: torch.dtype

    @pytest.fixture
    def engine(self, backend: Backend, subject: Subject, request: pytest.FixtureRequest) -> RolloutEngine:
        """An engine, awake and idle, with version 1. There is one at a time: it may fill the device."""
        stash, wanted = request.session.stash, (subject.name, self.free_cache_engine)
        last, engine, self.dtype = stash.get(_kept, (None, None, torch.float32))
        if engine is None or last != wanted:
            _close_kept(stash)
            request.session.addfinalizer(lambda: _close_kept(stash))
            try:
                engine = self._make(backend, subject)
            except ConfigError:
                self.dtype = torch.bfloat16
                engine = self._make(backend, subject)
            stash[_kept] = wanted, engine, self.dtype
        engine.abort()
        if self.free_cache_engine:  # a failed check may have left it asleep
            with contextlib.suppress(UnsupportedError):
                engine.wake()
        engine.load_weights(self.weights().items(), version=1)
        return engine

    def weights(self, seed: int = 0) -> dict[str, torch.Tensor]:
        """Return the model's tensors as a trainer sends them. Do not write to them."""
        return {name: tensor.to(self.dtype) for name, tensor in model_weights(seed).items()}

    def reference(self, seed: int = 0) -> Reference:
        """Return the model with :meth:`weights`, as the engine must compute it."""
        return Reference(seed, self.dtype)

    def _make(self, backend: Backend, subject: Subject) -> RolloutEngine:
        settings = RolloutSettings(
            model_directory=model_directory(),
            dtype=self.dtype,
            eos_ids=[END],
            max_running=_RUNNING,
            max_length=_MAX_LENGTH,
            free_cache_engine=self.free_cache_engine,
        )
        with skipping_refused():
            return subject.make_rollout_engine(settings, backend=backend)


def _close_kept(stash: pytest.Stash) -> None:
    """Close the engine in ``stash``, if there is one, and forget it."""
    _, engine, _ = stash.get(_kept, (None, None, None))
    if engine is not None:
        del stash[_kept]
        engine.close()


class RolloutNumbersContract(_OfRolloutEngine):
    """Tokens and log-probabilities are those of the model in double precision, up to rounding."""

    level = Level.COMPUTE

    def test_greedy_tokens_are_the_models(self, engine: RolloutEngine) -> None:
        """Each token is the most probable one, with its log-probability, also beside other requests."""
        requests = [request_of(number, 3 + 2 * number, Sampling(4 + 3 * number, 0.0)) for number in range(9)]
        model = self.reference()
        for request, response in zip(requests, generate(engine, requests), strict=True):
            own, best, off = model.scores(request, response)
            assert np.abs(response.logprobs - own).max() < _LOGPROB_OFF + off
            assert (best - own).max() < _ALMOST + off, "a more probable token was passed over"

    def test_logprobs_are_at_the_temperature(self, engine: RolloutEngine) -> None:
        """A sampled token's log-probability is that of the distribution at the temperature of its request."""
        requests = [request_of(number, 4, Sampling(12, 0.6)) for number in range(6)]
        model = self.reference()
        for request, response in zip(requests, generate(engine, requests), strict=True):
            own, _, off = model.scores(request, response, temperature=0.6)
            assert np.abs(response.logprobs - own).max() < _LOGPROB_OFF + off

    def test_sampling_follows_the_distribution(self, engine: RolloutEngine) -> None:
        """Many responses of one token to the same prompt: the share of each token is its probability."""
        requests = [request_of(number, 6, Sampling(1, _HOT), seed=0) for number in range(_MANY)]
        tokens = [int(response.token_ids[0]) for response in generate(engine, requests)]
        prompt = torch.from_numpy(requests[0].prompt_ids.astype(np.int64))[None]
        wanted = (self.reference().model(prompt).logits[0, -1] / _HOT).softmax(-1).detach().numpy()
        seen = np.bincount(tokens, minlength=VOCABULARY) / len(tokens)
        assert np.abs(seen - wanted).sum() < 0.25  # the expected total deviation is about 0.12

    def test_filters_shape_the_distribution(self, engine: RolloutEngine) -> None:
        """``top_k=1`` leaves the most probable token, with probability 1. An engine may refuse filters."""
        requests = [request_of(number, 5, Sampling(6, 1.0, top_k=1)) for number in range(3)]
        try:
            filtered = generate(engine, requests)
        except EngineError as error:
            pytest.skip(f"the engine refuses filters: {error.why}")
        plain = generate(engine, [request_of(number, 5, Sampling(6, 0.0)) for number in range(3)])
        assert [one.token_ids.tolist() for one in filtered] == [one.token_ids.tolist() for one in plain]
        assert all(bool((np.abs(one.logprobs) < _ALMOST).all()) for one in filtered)


class RolloutSleepContract(_OfRolloutEngine):
    """A sleeping engine has freed its memory. After it wakes it generates the same tokens as before."""

    level = Level.DEVICE
    free_cache_engine = True

    @pytest.mark.parametrize("level", [1, 2])
    def test_it_generates_the_same_after_a_sleep(self, engine: RolloutEngine, level: int) -> None:
        """A second sleep frees nothing. Level 1 keeps the version; level 2 drops it until weights are loaded."""
        requests = [request_of(number, 5, Sampling(6, 0.0)) for number in range(3)]
        before = generate(engine, requests)
        with skipping_refused():
            engine.sleep(level=level)
        assert engine.sleep(level=level) == 0, "a second sleep frees memory again"
        assert engine.version == (1 if level == 1 else -1)
        engine.wake(["weights"])
        if level == 2:
            engine.load_weights(self.weights().items(), version=1)
        engine.wake()
        assert _same(generate(engine, requests), before)

    def test_it_does_not_sleep_with_requests(self, engine: RolloutEngine) -> None:
        """It raises EngineError, and the requests finish."""
        engine.submit([request_of(0, 4, Sampling(5, 0.0))])
        with skipping_refused(), pytest.raises(EngineError):  # the next check's fixture aborts them
            engine.sleep(level=1)
        assert len(finish(engine)) == 1

    def test_it_refuses_what_is_no_level_and_no_tag(self, engine: RolloutEngine) -> None:
        """It raises EngineError, and stays awake."""
        with skipping_refused():
            for level in (0, 3):
                with pytest.raises(EngineError):
                    engine.sleep(level=level)
            with pytest.raises(EngineError):
                engine.wake(["weight"])
        assert len(generate(engine, [request_of(0, 4, Sampling(5, 0.0))])) == 1


class RolloutReceiversContract(_OfRolloutEngine):
    """An engine with receivers takes a version from a weight link directly into its weights."""

    level = Level.COLLECTIVES

    def test_a_version_arrives_from_a_link(self, engine: RolloutEngine, backend: Backend) -> None:
        """The next tokens come from it. They equal the tokens of the same weights, loaded."""
        if not engine.receivers:
            pytest.skip("the engine has no receivers: versions are received for it")
        requests = [request_of(number, 5, Sampling(6, 0.0)) for number in range(3)]
        engine.load_weights(self.weights(seed=1).items(), version=2)
        wanted = generate(engine, requests)
        engine.load_weights(self.weights().items(), version=1)
        store = serve_store()
        models = EngineModels(engine, store, name=POLICY, replica="kit", timeout_s=scaled(_WAIT_S))
        sender = WeightSender(store, backend=backend, transport="host", timeout_s=scaled(_WAIT_S))
        with sender, contextlib.closing(models):
            weights = {name: tensor.to(backend.device()) for name, tensor in self.weights(seed=1).items()}
            publishing = threading.Thread(target=sender.publish, args=(7, weights.items()))
            publishing.start()
            loaded, deadline = False, time.monotonic() + scaled(_WAIT_S)
            while not loaded and time.monotonic() < deadline:
                loaded = models.update()
            publishing.join(scaled(_WAIT_S))
            if not loaded:
                raise TimeoutError(f"the version did not arrive within {scaled(_WAIT_S):g} s")
        assert engine.version == 7
        assert _same(generate(engine, requests), wanted)


class RolloutContract(_OfRolloutEngine):
    """Queues, ends of responses, and new weights between two tokens."""

    level = Level.ROLLOUT

    def test_a_response_ends_as_asked(self, engine: RolloutEngine) -> None:
        """At the limit of tokens (truncated), at an end token, and at a stop token (with its id), which it contains."""
        (limited,) = generate(engine, [request_of(0, 5, Sampling(7, 0.0))])
        assert (len(limited.token_ids), limited.truncated) == (7, END not in limited.token_ids)
        many = generate(engine, [request_of(number, 5, Sampling(40, _HOT)) for number in range(8)])
        ended = [one for one in many if not one.truncated]
        assert ended, "of 8 long responses at a high temperature none met the end token"
        assert all(one.token_ids[-1] == END and END not in one.token_ids[:-1] for one in ended)
        stop = int(limited.token_ids[3])
        try:
            (stopped,) = generate(engine, [request_of(0, 5, Sampling(7, 0.0, stop_token_ids=(stop,)))])
        except EngineError as error:
            pytest.skip(f"the engine refuses stop tokens: {error.why}")
        first = limited.token_ids.tolist().index(stop)
        assert stopped.token_ids.tolist() == limited.token_ids[: first + 1].tolist()
        assert (stopped.stop, stopped.truncated) == (stop, False)

    def test_each_request_comes_back_once(self, engine: RolloutEngine) -> None:
        """``pending`` counts those that have not, and ``capacity`` says how many more would run at once."""
        assert (engine.step(), engine.pending(), engine.capacity()) == ([], 0, _RUNNING)
        requests = [request_of(number, 4, Sampling(3 + number, 1.0)) for number in range(3 * _RUNNING)]
        engine.submit(requests)
        assert (engine.pending(), engine.capacity() <= 0) == (len(requests), True)
        assert sorted(finish(engine)) == [request.request_id for request in requests]
        assert (engine.pending(), engine.capacity()) == (0, _RUNNING)

    def test_abort_drops_every_request(self, engine: RolloutEngine) -> None:
        """It returns their number. Later requests work."""
        engine.submit([request_of(number, 4, Sampling(20, 1.0)) for number in range(2 * _RUNNING)])
        left = engine.pending() - len(engine.step())
        assert engine.abort() == left
        assert engine.pending() == 0
        (response,) = generate(engine, [request_of(99, 4, Sampling(3, 1.0))])
        assert len(response.token_ids) in (1, 2, 3)

    def test_a_request_without_room_is_refused(self, engine: RolloutEngine) -> None:
        """EngineError at once: it could never run."""
        with pytest.raises(EngineError):
            engine.submit([request_of(0, 10, Sampling(_MAX_LENGTH, 1.0))])
        engine.abort()

    def test_each_token_has_its_version(self, engine: RolloutEngine) -> None:
        """A response continues with new weights, and its versions never fall.

        Tokens of the old version have the old weights' log-probabilities. A later request with the same prompt has
        those of the new ones: it reads nothing that was cached of the old ones.
        """
        request = request_of(0, 36, Sampling(24, 1.0))
        engine.submit([request])
        done = {one.request_id: one.response for _ in range(3) for one in engine.step()}
        if done:
            pytest.skip("the response was complete after three steps")
        engine.load_weights(self.weights(seed=1).items(), version=5)
        response = finish(engine)[0]
        versions = response.versions.tolist()
        assert versions == sorted(versions) and set(versions) <= {1, 5} and versions[0] == 1
        assert engine.version == 5
        old = versions.count(1)
        own, _, off = self.reference().scores(request, response)
        assert np.abs(response.logprobs - own)[:old].max() < _LOGPROB_OFF + off
        later = request_of(1, 36, Sampling(6, 0.0), seed=0)
        (fresh,) = generate(engine, [later])
        assert set(fresh.versions.tolist()) == {5}
        own, _, off = self.reference(seed=1).scores(later, fresh)
        assert np.abs(fresh.logprobs - own).max() < _LOGPROB_OFF + off

    @pytest.mark.parametrize("damage", ["missing", "unknown"])
    def test_incomplete_weights_are_refused(self, engine: RolloutEngine, damage: str) -> None:
        """EngineError. The old version stays, and generates."""
        requests = [request_of(number, 5, Sampling(6, 0.0)) for number in range(2)]
        before = generate(engine, requests)
        wrong = self.weights(seed=1)
        if damage == "missing":
            del wrong[sorted(wrong)[-1]]
        else:
            wrong["unknown.weight"] = torch.ones(3)
        with pytest.raises(EngineError):
            engine.load_weights(wrong.items(), version=9)
        assert engine.version == 1
        assert _same(generate(engine, requests), before)

    def test_loaded_weights_are_copied(self, engine: RolloutEngine) -> None:
        """The caller may overwrite its tensors as soon as ``load_weights`` has returned."""
        requests = [request_of(number, 5, Sampling(6, 0.0)) for number in range(2)]
        before = generate(engine, requests)
        lent = {name: tensor.clone() for name, tensor in self.weights().items()}
        engine.load_weights(lent.items(), version=2)
        for tensor in lent.values():
            tensor.zero_()
        assert _same(generate(engine, requests), before)


# -- requests -------------------------------------------------------------------------------------------------------


def request_of(number: int, length: int, sampling: Sampling, *, seed: int | None = None) -> GenerationRequest:
    """Return request ``number``. ``seed``, by default the number, decides its random prompt."""
    random = np.random.default_rng(number if seed is None else seed)
    return GenerationRequest(number, random.integers(3, VOCABULARY, size=length).astype(np.int32), sampling)


def finish(engine: RolloutEngine) -> dict[int, Response]:
    """Step until no request is pending; return the responses by request id."""
    done: dict[int, Response] = {}
    deadline = time.monotonic() + scaled(_WAIT_S)
    while engine.pending():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{engine.pending()} requests did not end within {scaled(_WAIT_S):g} s")
        for completion in engine.step():
            assert completion.request_id not in done, f"request {completion.request_id} came back twice"
            done[completion.request_id] = completion.response
    return done


def generate(engine: RolloutEngine, requests: Sequence[GenerationRequest]) -> list[Response]:
    """Run ``requests`` to their ends; return the responses in the same order."""
    engine.submit(requests)
    done = finish(engine)
    assert sorted(done) == sorted(request.request_id for request in requests), "requests got lost"
    return [done[request.request_id] for request in requests]


class Reference:
    """The model of ``seed`` on the host in double precision, with weights rounded to ``dtype``."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        self.model = reference_model(seed)
        for parameter in self.model.parameters():
            parameter.data = parameter.data.to(dtype).double()
        self._rounding = None if dtype is torch.float32 else load_model(model_directory(seed), dtype=dtype)

    @torch.no_grad()
    def scores(
        self, request: GenerationRequest, response: Response, *, temperature: float = 1.0
    ) -> tuple[Any, Any, float]:
        """Return the log-probability of each token of ``response``, and of the most probable token in its place.

        The third result is how far an engine may be from both: twice the rounding of transformers in the engine's
        dtype; 0 for float32.
        """
        ids = np.concatenate([request.prompt_ids, response.token_ids]).astype(np.int64)
        tokens, first = torch.from_numpy(ids)[None], len(request.prompt_ids) - 1
        scores = (self.model(tokens).logits[0, first:-1] / temperature).log_softmax(-1)
        off = 0.0
        if self._rounding is not None:
            rounded = (self._rounding(tokens).logits[0, first:-1].double() / temperature).log_softmax(-1)
            off = 2 * (rounded - scores).abs().max().item()
        return scores.gather(-1, tokens[0, first + 1 :, None])[:, 0].numpy(), scores.amax(-1).numpy(), off


def _same(found: Iterable[Response], wanted: Iterable[Response]) -> bool:
    return [one.token_ids.tolist() for one in found] == [one.token_ids.tolist() for one in wanted]
