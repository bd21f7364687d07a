"""The embedded rollout engine: a transformers model in this process, continuously batched. Needs no server."""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hwrl.discovery import backend_or_default
from hwrl.interfaces import (
    MEMORY_TAGS,
    Backend,
    Capability,
    Completion,
    GenerationRequest,
    Response,
    RolloutEngine,
    RolloutSettings,
    WeightOffer,
)
from hwrl.lora import add_adapter
from hwrl.memory import Offloader
from hwrl.models import build_model, use_working_experts
from hwrl.rollout.checks import (
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
)
from hwrl.rollout.row_ranges import RowDivider, RowDivision, RowRange, divided
from hwrl.rollout.sampling import SlotSampler
from hwrl.rollout.slot_calls import SlotCalls
from hwrl.rollout.slots import SlotCache
from hwrl.rollout.stops import Decode, StopFinder, stop_finder, text_decoder
from hwrl.saved_names import saved_weights
from hwrl.weights import CopyDestination, Destination, EngineReceiver, WeightLayout, whole_rules

_StateDict = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class _Running:
    """A request, from its submission to its end, with the finder of its stops if it has some."""

    request: GenerationRequest
    stops: StopFinder | None


class EmbeddedEngine(RolloutEngine):
    """Generates with ``model``, an ``AutoModelForCausalLM`` with full or sliding attention.

    At most ``max_running`` requests run. A prompt and its response have at most ``max_length`` tokens. The first step
    allocates memory for all slots. The engine owns the model, writes new weights into its parameters and buffers, and
    generates only after the first. It raises EngineError for a model with other layers, or with rotary frequencies that
    change within ``max_length`` tokens. Weights come under the names in the model's files, each expert by itself, into
    its part of the model's parameter. A model with an adapter (:func:`~hwrl.lora.add_adapter`) gets its weights as base
    and adapter. A forward pass takes at most ``prefill_tokens`` padded tokens of new prompts; a longer prompt has a
    pass by itself. The samples of a group share the pass over their prompt.

    A sleep of level 2 keeps the buffers outside a checkpoint, because no trainer sends them.

    It can receive weights straight into the model. It is one receiver (``receivers`` is 1).

    Samples depend only on ``seed``, the request's number and the model, not on other running requests. A request with a
    seed of its own depends on that seed and the model only. Devices may differ by rounding. Stop texts need ``decode``.
    """

    def __init__(
        self,
        model: Any,
        *,
        eos_ids: Sequence[int],
        max_running: int,
        max_length: int,
        seed: int = 0,
        prefill_tokens: int = 1 << 14,
        backend: Backend | None = None,
        decode: Decode | None = None,
    ) -> None:
        self._calls = SlotCalls(model.eval(), max_length=max_length)
        self.receivers = 1
        self.model = model
        self._backend = backend_or_default(backend)
        self._base, self._adapter = saved_weights(model)
        self._receiver = EngineReceiver(0, backend=self._backend, make_destination=self._make_destination)
        self._asleep: frozenset[str] = frozenset()
        self._dropped: list[tuple[torch.UntypedStorage, int]] = []  # with the size to restore at the wake-up
        self._device = next(model.parameters()).device
        self._max_running, self._max_length = max_running, max_length
        self._cache = SlotCache(slots=max_running, length=max_length, device=self._device)
        self._proven = True
        self._divider = RowDivider(launched=self._backend.supports(Capability.STREAMS).usable)
        self._eos = torch.tensor(sorted(eos_ids), device=self._device)
        self._prefill_tokens = prefill_tokens
        self._seed = seed % (1 << 64)  # numpy takes no negative seed
        self._decode = decode
        self._waiting: deque[_Running] = deque()
        self._slots: list[_Running] = []
        self._tokens = torch.zeros(max_running, max_length, dtype=torch.int32, device=self._device)
        self._logprobs = torch.zeros(max_running, max_length, device=self._device)
        self._draws = torch.zeros(max_running, max_length, device=self._device)  # from [0, 1), one for each token
        self._versions = torch.zeros(max_running, max_length, dtype=torch.int32, device=self._device)
        # Per slot, on the device: tokens held so far, tokens when the limit is reached.
        self._length = torch.zeros(max_running, dtype=torch.long, device=self._device)
        self._limit = torch.zeros(max_running, dtype=torch.long, device=self._device)
        self._sampler = SlotSampler(slots=max_running, device=self._device)

    @classmethod
    def from_settings(cls, settings: RolloutSettings, *, backend: Backend) -> EmbeddedEngine:
        """Return an engine with a new model on ``backend``'s device.

        Its first step with weights raises EngineError if rows of several lengths get other results from its slots than
        from calls of the model by themselves.
        """
        model = build_model(settings.model_directory, dtype=settings.dtype, max_length=settings.max_length)
        use_working_experts(model, device=backend.device(), dtype=settings.dtype)
        if settings.lora is not None:
            model = add_adapter(model, settings.lora)
        engine = cls(
            model.to(backend.device()),
            eos_ids=settings.eos_ids,
            max_running=settings.max_running,
            max_length=settings.max_length,
            seed=settings.seed,
            backend=backend,
            decode=text_decoder(settings.model_directory),
        )
        engine._proven = False
        return engine

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        for request in requests:
            require_fit(request, max_length=self._max_length)
        self._waiting.extend([_Running(request, stop_finder(request, self._decode)) for request in requests])

    def pending(self) -> int:
        return len(self._waiting) + len(self._slots)

    def capacity(self) -> int:
        return self._max_running - self.pending()

    def abort(self) -> int:
        dropped = self.pending()
        self._waiting.clear()
        self._slots.clear()
        return dropped

    def close(self) -> None:
        super().close()
        self._receiver.close()

    @torch.inference_mode()
    def step(self) -> list[Completion]:
        require_awake(self._asleep, MEMORY_TAGS, needed_for="generate")
        require_weights(self.version, pending=self.pending())
        if not self._proven and self._waiting:
            self._calls.prove(max_length=self._max_length)
            self._proven = True
        started = self._start_waiting()
        running = len(self._slots) - started
        if running:
            self._continue(running)
        for rows, copies in self._prefill_parts(slice(running, running + started)):
            self._prefill(rows, copies)
        return self._collect_finished()

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], *, version: int) -> None:
        require_no_adapter(self._adapter)
        given = self._checked(weights, self._base)
        self._copy(given, self._base)
        self.version = version

    def check_weights(self, tensors: _StateDict) -> None:
        require_same_model(self._base, tensors)

    def receive_weights(self, offer: WeightOffer) -> int | None:
        require_awake(self._asleep, {"weights"}, needed_for="receive weights")
        self.version, self.base = -1, None
        taken = require_held([self._receiver.take(offer)], offer)
        if taken is None:
            return None
        if self._adapter:
            self.base = taken.version
        else:
            self.version = taken.version
        return taken.proposal

    def load_base(self, weights: Iterable[tuple[str, torch.Tensor]], *, base: int) -> None:
        require_adapter(self._adapter)
        given = self._checked(weights, self._base)
        self.version, self.base = -1, None  # until the copy is complete
        self._copy(given, self._base)
        self.base = base

    def load_adapter(self, weights: Iterable[tuple[str, torch.Tensor]], *, version: int, base: int) -> None:
        require_adapter(self._adapter)
        require_base(self.base, base)
        given = self._checked(weights, self._adapter)
        self._copy(given, self._adapter)
        self.version = version

    def _make_destination(self, layout: WeightLayout) -> Destination:
        return CopyDestination(layout, whole_rules(layout, self._base), backend=self._backend)

    def _checked(self, weights: Iterable[tuple[str, torch.Tensor]], own: _StateDict) -> _StateDict:
        require_awake(self._asleep, {"weights"}, needed_for="load weights")
        given = dict(weights)
        require_same_model(own, given)
        return given

    @torch.inference_mode()
    def _copy(self, given: _StateDict, own: _StateDict) -> None:
        torch._foreach_copy_([own[name] for name in given], list(given.values()))

    # -- sleep --------------------------------------------------------------------------------------------------

    @functools.cached_property
    def _offloader(self) -> Offloader:
        return Offloader(self.model, backend=self._backend)

    def sleep(self, *, level: int) -> int:
        require_sleep(level, pending=self.pending())
        if self._asleep:
            return 0
        freed_nbytes = self._cache.drop()
        self._receiver.release()
        if level == 1:
            storages = _storages([*self.model.parameters(), *self.model.buffers()])
            freed_nbytes += sum(storage.nbytes() for storage in storages)
            self._offloader.offload()
        else:
            self.version, self.base = -1, None
            self._dropped = [(one, one.nbytes()) for one in _storages([*self._base.values(), *self._adapter.values()])]
            for storage, nbytes in self._dropped:
                storage.resize_(0)
                freed_nbytes += nbytes
        self._backend.empty_cache()
        self._asleep = MEMORY_TAGS
        return freed_nbytes

    def wake(self, tags: Collection[str] = MEMORY_TAGS) -> None:
        require_memory_tags(tags)
        if "weights" in self._asleep.intersection(tags):
            self._offloader.load()
            for storage, nbytes in self._dropped:
                storage.resize_(nbytes)
            self._dropped = []
        self._asleep -= set(tags)

    # -- one step -----------------------------------------------------------------------------------------------

    def _start_waiting(self) -> int:
        """Give free slots to waiting requests; return the number of started ones."""
        first = len(self._slots)
        while self._waiting and len(self._slots) < self._max_running:
            self._slots.append(self._waiting.popleft())
        started = [running.request for running in self._slots[first:]]
        if started:
            self._fill(slice(first, len(self._slots)), started)
        return len(started)

    def _fill(self, rows: slice, requests: Sequence[GenerationRequest]) -> None:
        lengths = torch.tensor([len(request.prompt_ids) for request in requests])
        prompts = torch.zeros(len(requests), int(lengths.max()), dtype=torch.int32)
        for prompt, request in zip(prompts, requests, strict=True):
            prompt[: len(request.prompt_ids)] = torch.from_numpy(request.prompt_ids)
        sampling = [request.sampling for request in requests]
        self._tokens[rows, : prompts.shape[1]] = prompts.to(self._device)
        self._draws[rows] = self._new_draws(requests).to(self._device)
        self._length[rows] = lengths.to(self._device)
        self._limit[rows] = (lengths + torch.tensor([s.max_new_tokens for s in sampling])).to(self._device)
        self._sampler.fill(rows, sampling)

    def _continue(self, running: int) -> None:
        rows = slice(0, running)
        lengths = self._length[rows].cpu().numpy()
        if self._calls.divisible:
            division = self._divider.divide(lengths, position_nbytes=self._cache.position_nbytes())
        else:
            division = RowDivision([RowRange(rows, int(lengths.max()))])
        if division.sources:
            self._move(division.sources, division.targets)
        used, last = division.ranges[0].positions, self._length[rows] - 1
        tokens = self._tokens[rows].gather(1, last[:, None]).long()
        mask = (torch.arange(used, device=self._device) <= last[:, None])[:, None, None, :]
        self._cache.place(rows, last[:, None], used)
        with divided(self.model, division.ranges):
            logits = self._calls(self._cache, tokens, last[:, None], mask, torch.zeros_like(last))
        self._sample(rows, logits)

    def _prefill_parts(self, rows: slice) -> Iterator[tuple[slice, list[int]]]:
        """Yield parts of ``rows`` of at most ``prefill_tokens`` padded tokens, or of one prompt.

        Neighbouring requests with the same prompt, such as the samples of a group, share one pass. A part comes with
        the number of rows of each of its prompts.
        """
        copies, longest, start = list[int](), 0, rows.start
        for length, count in self._same_prompts(rows):
            longest = max(longest, length)
            if copies and (len(copies) + 1) * longest > self._prefill_tokens:
                yield slice(start, start + sum(copies)), copies
                start, copies, longest = start + sum(copies), [], length
            copies.append(count)
        if copies:
            yield slice(start, start + sum(copies)), copies

    def _same_prompts(self, rows: slice) -> Iterator[tuple[int, int]]:
        """Yield the length of each prompt of ``rows``, and the number of requests in a row that have it."""
        prompts = (running.request.prompt_ids for running in self._slots[rows])
        for _, same in itertools.groupby(prompts, key=lambda ids: ids.tobytes()):
            alike = list(same)
            yield len(alike[0]), len(alike)

    def _prefill(self, rows: slice, copies: Sequence[int]) -> None:
        """Run the model once on each prompt of ``rows``, and sample the first token of each row.

        ``copies`` has the number of rows with each prompt.
        """
        counts = torch.tensor(copies, device=self._device)
        firsts = rows.start + counts.cumsum(0) - counts
        lengths = self._length[firsts]
        used = int(lengths.max())
        positions = torch.arange(used, device=self._device).expand(len(lengths), used)
        causal = torch.ones(used, used, dtype=torch.bool, device=self._device).tril()
        self._cache.place(slice(rows.start, rows.start + len(copies)), positions, used)
        logits = self._calls(
            self._cache, self._tokens[firsts, :used].long(), positions, causal[None, None], lengths - 1
        )
        if len(copies) < rows.stop - rows.start:
            prompts = torch.arange(len(copies), device=self._device).repeat_interleave(counts)
            self._cache.spread(rows, prompts, used)
            logits = logits[prompts]
        self._sample(rows, logits)

    def _sample(self, rows: slice, logits: torch.Tensor) -> None:
        """Append one token to each slot of ``rows``. ``logits``: rows × vocabulary."""
        at = self._length[rows, None]
        token, logprob = self._sampler.sample(rows, logits, self._draws[rows].gather(1, at))
        self._tokens[rows].scatter_(1, at, token.int())
        self._logprobs[rows].scatter_(1, at, logprob)
        self._versions[rows].scatter_(1, at, self.version)
        self._length[rows] += 1

    def _new_draws(self, requests: Sequence[GenerationRequest]) -> torch.Tensor:
        """Return a random number from [0, 1) for each token of each response (requests × ``max_length``, float32)."""
        draws = np.zeros((len(requests), self._max_length), dtype=np.float32)
        for row, request in zip(draws, requests, strict=True):
            own = request.sampling.seed
            entropy = [self._seed, request.request_id] if own is None else np.random.SeedSequence(own, spawn_key=(0,))
            random = np.random.default_rng(entropy)
            begin, count = len(request.prompt_ids), request.sampling.max_new_tokens
            row[begin : begin + count] = random.random(count, dtype=np.float32)
        return torch.from_numpy(draws)

    def _collect_finished(self) -> list[Completion]:
        count = len(self._slots)
        if not count:
            return []
        last = self._tokens[:count].gather(1, self._length[:count, None] - 1)[:, 0]
        ended = torch.isin(last, self._eos)
        stops = self._find_stops(last)
        if stops:
            ended[list(stops)] = True
        finished = (ended | (self._length[:count] >= self._limit[:count])).nonzero()[:, 0]
        if not len(finished):
            return []
        completions = self._completions(finished, ended[finished].tolist(), stops)
        self._free(finished.tolist())
        return completions

    def _find_stops(self, last: torch.Tensor) -> dict[int, str | int]:
        """Return the stop of each slot whose ``last`` token (int32, one for each slot) completes one."""
        looking = [(slot, running.stops) for slot, running in enumerate(self._slots) if running.stops is not None]
        if not looking:
            return {}
        tokens = last.tolist()
        found = ((slot, finder.find(tokens[slot])) for slot, finder in looking)
        return {slot: stop for slot, stop in found if stop is not None}

    def _completions(self, rows: torch.Tensor, ended: list[bool], stops: Mapping[int, str | int]) -> list[Completion]:
        used = int(self._length[rows].max())
        tokens, logprobs, versions = (
            state[rows, :used].cpu().numpy() for state in (self._tokens, self._logprobs, self._versions)
        )
        completions = []
        for index, (row, length) in enumerate(zip(rows.tolist(), self._length[rows].tolist(), strict=True)):
            request = self._slots[row].request
            span = slice(len(request.prompt_ids), length)
            response = Response(
                token_ids=tokens[index, span],
                logprobs=logprobs[index, span],
                versions=versions[index, span],
                truncated=not ended[index],
                stop=stops.get(row),
            )
            completions.append(Completion(request.request_id, response))
        return completions

    def _free(self, rows: list[int]) -> None:
        """Fill the slots ``rows`` of ended requests with the requests from the last slots."""
        ended = set(rows)
        kept = len(self._slots) - len(rows)
        gaps = [row for row in rows if row < kept]
        moved = [row for row in range(kept, len(self._slots)) if row not in ended]
        if moved:
            self._move(moved, gaps)
        del self._slots[kept:]

    def _move(self, sources: list[int], targets: list[int]) -> None:
        """Move the requests of the slots ``sources`` to the slots ``targets``, all at once."""
        requests = [self._slots[source] for source in sources]
        for target, request in zip(targets, requests, strict=True):
            self._slots[target] = request
        self._sampler.move(sources, targets)
        from_rows, to_rows = torch.tensor([sources, targets], device=self._device)
        self._cache.move(from_rows, to_rows, int(self._length[from_rows].max()))
        per_token = (self._tokens, self._logprobs, self._draws, self._versions)
        for state in (*per_token, self._length, self._limit):
            state[to_rows] = state[from_rows]


def _storages(tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
    """Return the storages of ``tensors``, a shared one once."""
    return list({tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}.values())
