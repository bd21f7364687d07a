"""The training step of all engines: micro-batches, the loss over all ranks' tokens, gradient norm, schedule."""

from __future__ import annotations

import functools
import math
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Literal

import torch
from torch.utils.checkpoint import checkpoint

from hwrl.errors import EngineError
from hwrl.interfaces import Backend, Batch, EngineSettings, TokenLoss, TrainEngine
from hwrl.train.losses import mismatch_kl

if TYPE_CHECKING:
    from hwrl.comm import Group


def recompute(layers: Iterable[torch.nn.Module]) -> None:
    """Let ``layers`` keep only their inputs for the backward pass, and run again in it: activation checkpointing.

    After Chen et al. 2016, https://arxiv.org/abs/1604.06174. The layers must not draw random numbers.
    """
    for layer in layers:
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)


class PolicyEngine(TrainEngine):
    """The training step on logits. A subclass has the model, its gradients and its optimizer.

    ``group`` is the default process group of the training ranks (None: one rank). :attr:`updates` counts the
    optimizer steps, and is the position in the schedule. A subclass restores it with its state.
    """

    def __init__(self, settings: EngineSettings, *, backend: Backend, group: Group | None) -> None:
        self.settings = settings
        self.chunk_logits = 1 << 25
        """The number of logits that are processed at once in float32: 128 MiB a copy."""
        self.updates = 0
        self._backend, self._group = backend, group

    # -- implemented by a subclass ------------------------------------------------------------------------------

    @abstractmethod
    def _logits(self, inputs: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        """Return the logits (positions × vocabulary, or this rank's share of it) at ``rows`` and ``columns``.

        ``inputs`` are token ids, rows × length, padded on the right; all on the device.
        """

    @abstractmethod
    def _clip_gradients(self) -> float:
        """Reduce the gradients over the ranks, scale them down to ``max_grad_norm``; return their norm before that."""

    @abstractmethod
    def _update(self, *, learning_rate: float) -> None:
        """Apply the gradients."""

    @abstractmethod
    def _drop_gradients(self) -> None:
        """Free the gradients, so that no device memory stays allocated after an offload."""

    @property
    @abstractmethod
    def _gradient_scale(self) -> float:
        """The factor of the loss that makes the reduced gradients a sum over the ranks."""

    def _score(self, logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return log-probability and entropy (detached) of each of ``targets`` under ``logits``, in float32."""
        distribution = (logits.float() / self.settings.temperature).log_softmax(-1)
        logprobs = distribution.gather(1, targets[:, None])[:, 0]
        with torch.no_grad():
            entropy = -(distribution.exp() * distribution).sum(-1)
        return logprobs, entropy

    # -- the step -----------------------------------------------------------------------------------------------

    def train_batch(self, batch: Batch, *, loss: TokenLoss) -> dict[str, float]:
        tokens = self._reduce([batch.trained_tokens], op="sum")[0]
        totals: dict[str, torch.Tensor] = {}
        try:
            for rows in self._micro_batches(batch):
                with self._backend.range("hwrl.pack"):
                    part = batch.select(rows)
                for name, value in self._backward(part, loss=loss, tokens=tokens).items():
                    totals[name] = totals.get(name, torch.zeros_like(value)) + value
            norm = self._clip_gradients()
            metrics = self._mean_over_ranks(totals, tokens)
            _require_finite(norm, metrics)
            learning_rate = self.settings.learning_rate_at(self.updates)
            with self._backend.range("hwrl.update"):
                self._update(learning_rate=learning_rate)
        finally:
            self._drop_gradients()
        self.updates += 1
        return {**metrics, "grad_norm": norm, "learning_rate": learning_rate}

    @torch.no_grad()
    def logprobs(self, batch: Batch) -> torch.Tensor:
        result = torch.zeros(batch.tokens.shape)
        for rows in self._micro_batches(batch):
            part = batch.select(rows)
            values, _ = self.forward(part)
            row, column = part.mask[:, 1:].nonzero(as_tuple=True)
            result[rows[row], column + 1] = values.cpu()
        return result

    def _backward(self, part: Batch, *, loss: TokenLoss, tokens: float) -> dict[str, torch.Tensor]:
        """Add the gradient of ``part``'s share in the mean over all ranks' ``tokens``; return sums over its tokens."""
        with self._backend.range("hwrl.forward"):
            logprobs, entropy = self.forward(part)
        mask, device = part.mask[:, 1:], logprobs.device
        behaviour = part.behaviour_logprobs[:, 1:][mask].to(device)
        proximal = None if part.proximal_logprobs is None else part.proximal_logprobs[:, 1:][mask].to(device)
        advantages = part.advantages.repeat_interleave(mask.sum(1)).to(device)
        per_token, metrics = loss(logprobs, behaviour=behaviour, proximal=proximal, advantages=advantages)
        total = per_token.sum()
        with self._backend.range("hwrl.backward"):
            (total * (self._gradient_scale / tokens)).backward()
        kl = mismatch_kl(logprobs.detach(), behaviour=behaviour)
        metrics = {**metrics, "mismatch_kl": kl, "entropy": entropy}
        return {"loss": total.detach().double(), **{name: value.sum().double() for name, value in metrics.items()}}

    def forward(self, part: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return log-probability and entropy (detached) of ``part``'s response tokens, row by row (one dimension).

        Padding is on the right, so causal attention alone hides it from real tokens. An empty part runs the model on
        one token: its collectives serve the ranks with more parts.
        """
        tokens = part.tokens if part.rows else torch.zeros(1, 2, dtype=torch.long)
        row, column = part.mask[:, 1:].nonzero(as_tuple=True)
        device = self._backend.device()
        targets = tokens[row, column + 1].to(device)
        return self._score_in_chunks(
            self._logits(tokens[:, :-1].to(device), row.to(device), column.to(device)), targets
        )

    def _score_in_chunks(self, logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Score at most :attr:`chunk_logits` logits at a time, and compute each chunk again in the backward pass."""
        size = max(1, self.chunk_logits // logits.shape[-1])
        if len(targets) <= size:
            return self._score(logits, targets)
        chunks = zip(logits.split(size), targets.split(size), strict=True)
        parts = [checkpoint(self._score, *chunk, use_reentrant=False) for chunk in chunks]
        logprobs, entropies = zip(*parts, strict=True)
        return torch.cat(logprobs), torch.cat(entropies)

    def _micro_batches(self, batch: Batch) -> Iterator[torch.Tensor]:
        parts = list(batch.micro_batches(max_tokens=self.settings.micro_batch_tokens))
        idle = int(self._reduce([len(parts)], op="max")[0]) - len(parts)  # before the parts: both are collective
        yield from parts
        for _ in range(idle):
            yield torch.empty(0, dtype=torch.long)

    # -- ranks --------------------------------------------------------------------------------------------------

    @property
    def _ranks(self) -> int:
        return 1 if self._group is None else self._group.size

    def _mean_over_ranks(self, totals: Mapping[str, torch.Tensor], tokens: float) -> dict[str, float]:
        names = sorted(totals)
        sums = self._reduce([totals[name].item() for name in names], op="sum")
        return {name: value / tokens for name, value in zip(names, sums, strict=True)}

    def _reduce(self, values: list[float], *, op: Literal["sum", "max"]) -> list[float]:
        """Return ``values`` reduced over the shares of the batch. Ranks with the same share have the same values."""
        if self._group is None:
            return values
        tensor = torch.tensor(values, dtype=torch.float32, device=self._backend.device())
        self._group.all_reduce(tensor, op=op)
        if op == "sum":
            tensor /= self._ranks // self.data_parallel_size
        reduced: list[float] = tensor.tolist()
        return reduced


def _require_finite(norm: float, metrics: Mapping[str, float]) -> None:
    if not math.isfinite(norm):
        raise EngineError(
            f"the norm of the gradients is {norm}",
            why=f"a step with them would destroy the weights; the metrics of the step: {metrics}",
            fix="resume from the last checkpoint with a lower optimizer.learning_rate or optimizer.max_grad_norm, or "
            "model.dtype=float32; if it happens at the first step, look for NaN in the model's weights",
        )
