"""The training step of all engines: micro-batches, the loss over all ranks' tokens, gradient norm, schedule."""

from __future__ import annotations

import contextlib
import functools
import math
import zlib
from abc import abstractmethod
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Literal, NoReturn

import torch

from hwrl.errors import CommAbortedError, DataError, NonFiniteGradientError
from hwrl.interfaces import Backend, Batch, Capability, EngineSettings, LossInputs, TokenLoss, TrainEngine
from hwrl.train.activations import ranks_on_device, usable_nbytes
from hwrl.train.context_parallel import ContextGroup
from hwrl.train.losses import mismatch_kl
from hwrl.train.packing import MicroBatch, PackShare, make_pack, make_rows, plan_packs
from hwrl.train.scoring import OutputScorer

if TYPE_CHECKING:
    from hwrl.comm import Group


class PolicyEngine(TrainEngine):
    """The training step on micro-batches. A subclass has the model, its gradients and its optimizer.

    ``group`` is the default process group of the training ranks (None: one rank). :attr:`updates` is also the position
    in the learning-rate schedule; a subclass restores it with its state. :attr:`scorer`
    computes log-probabilities and entropies from the last hidden states. A subclass may set :attr:`_context`, the group
    of ranks that share each pack.
    """

    updates: int = 0
    _context: ContextGroup | None = None

    def __init__(self, settings: EngineSettings, *, backend: Backend, group: Group | None) -> None:
        self.settings = settings
        self.scorer = OutputScorer(settings.temperature)
        self._backend, self._group = backend, group
        self._agreed_loss: TokenLoss | None = None
        self._loss_error: Exception | None = None  # of this step
        self._ranks_on_device = ranks_on_device(group, backend)

    # -- implemented by a subclass ------------------------------------------------------------------------------

    @abstractmethod
    def _scores(self, part: MicroBatch) -> torch.Tensor:
        """Run the model on ``part``; return log-probability and entropy of its targets, as :attr:`scorer` does.

        2 × targets, float32. A micro-batch without targets runs the model too: its collectives serve other ranks.
        """

    @property
    def _packs(self) -> bool:
        """Whether the model takes packs; else it gets padded rows."""
        return True

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

    # -- the step -----------------------------------------------------------------------------------------------

    def train_batch(self, batch: Batch, *, loss: TokenLoss) -> dict[str, float]:
        with self._backend.range("hwrl.pack"):
            plan = self.plan(batch)
        tokens = max(1.0, self._reduce([sum(part.trained_tokens for part in plan)], op="sum")[0])
        totals: dict[str, torch.Tensor] = {}
        inputs = [0.0, 0.0]
        try:
            with contextlib.closing(self._training_passes(plan, loss=loss, tokens=tokens)) as passes:
                for part, sums in passes:
                    for name, value in sums.items():
                        totals[name] = totals.get(name, torch.zeros_like(value)) + value
                    inputs = [inputs[0] + part.real_tokens, inputs[1] + part.input_ids.numel()]
            norm = self._clip_gradients()
            if not math.isfinite(norm):
                self._refuse_step(norm, totals, tokens, loss)
            self._require_same_metrics(totals, loss)
            metrics = self._mean_over_ranks(totals, tokens)
            learning_rate = self.settings.learning_rate_at(self.updates)
            self.updates += 1
            with self._backend.range("hwrl.update"):
                self._update(learning_rate=learning_rate)
        finally:
            self._drop_gradients()
        real, all_inputs = self._reduce(inputs, op="sum")
        rest = {"grad_norm": norm, "learning_rate": learning_rate, "padding_share": 1 - real / all_inputs}
        return {**metrics, **rest}

    @torch.no_grad()
    def logprobs(self, batch: Batch) -> torch.Tensor:
        result = torch.zeros(batch.tokens.shape)
        with contextlib.closing(self._scoring_passes(self.plan(batch))) as passes:
            for part, logprobs in passes:
                result[part.rows, part.columns] = logprobs.cpu()
        return result if self._context is None else self._context.add(result)

    def _training_passes(
        self, plan: Sequence[MicroBatch], *, loss: TokenLoss, tokens: float
    ) -> Generator[tuple[MicroBatch, dict[str, torch.Tensor]]]:
        """Add the gradients of all micro-batches; yield each with sums over its tokens."""
        with contextlib.closing(self._passes(plan)) as parts:
            for part in parts:
                yield part, self._backward(part, loss=loss, tokens=tokens)

    def _scoring_passes(self, plan: Sequence[MicroBatch]) -> Generator[tuple[MicroBatch, torch.Tensor]]:
        """Yield each micro-batch with the log-probabilities of its response tokens (one dimension, float32)."""
        with contextlib.closing(self._passes(plan)) as parts:
            for part in parts:
                yield part, self.forward(part)[0]

    def _backward(self, part: MicroBatch, *, loss: TokenLoss, tokens: float) -> dict[str, torch.Tensor]:
        """Add ``part``'s term to the gradient of the mean loss over all ranks' ``tokens``; return sums over its own."""
        scale = self._gradient_scale / tokens
        with self._backend.range("hwrl.forward"), self._scoring_for(part, loss, scale):
            logprobs, entropy = self.forward(part)
        total, sums = self._loss(part, logprobs, entropy, loss=loss)
        with self._backend.range("hwrl.backward"):
            (total * scale).backward()
        return sums

    def _scoring_for(self, part: MicroBatch, loss: TokenLoss, scale: float) -> AbstractContextManager[None]:
        """Let the scorer prepare for ``loss``; for a token-local one, it computes the gradients, times ``scale``."""
        known = functools.partial(self._loss_gradient, part, loss, scale) if loss.token_local else None
        return self.scorer.for_loss(known, entropy_gradient=loss.needs_entropy_gradient)

    def _loss(
        self, part: MicroBatch, logprobs: torch.Tensor, entropy: torch.Tensor, *, loss: TokenLoss
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the sum of ``loss`` over the micro-batch's tokens, and metrics summed over ``part``'s own (float64).

        Ranks may share a pack, and so divide a row. If the loss is not token-local, each rank then computes it for all
        tokens of the pack, and takes the gradient of the whole sum by its own log-probabilities.
        """
        entropy = entropy if loss.needs_entropy_gradient else entropy.detach()
        inputs, own = part.loss_inputs(logprobs, entropy, slice(None)), slice(None)
        if self._context is not None and not loss.token_local:
            inputs, own = self._context.whole_inputs(inputs, part.share_tokens)
        per_token, metrics = self._weighted_loss(part, loss, inputs)
        kl = mismatch_kl(logprobs.detach(), behaviour=part.behaviour_logprobs)
        metrics = {"loss": per_token.detach()[own], **{name: value[own] for name, value in metrics.items()}}
        metrics |= {"mismatch_kl": kl, "entropy": entropy.detach()}
        return per_token.sum(), {name: value.sum().double() for name, value in metrics.items()}

    def forward(self, part: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return log-probability and entropy of ``part``'s response tokens (one dimension, float32)."""
        return self._without_padding(part, self._scores(part))

    @staticmethod
    def _without_padding(part: MicroBatch, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scores of ``part``'s response tokens, without those of the padding."""
        logprobs, entropy = scores[:, : part.trained_tokens]
        return logprobs, entropy

    def plan(self, batch: Batch) -> list[MicroBatch]:
        """Return the micro-batches of ``batch``, on the device, for :meth:`forward`. Collective.

        Every rank has the same number of them; some may be empty. They are made before the first pass: a copy to the
        device would wait for the passes before it.
        """
        lengths, limit = (batch.lengths() - 1).clamp(min=0).tolist(), self.settings.micro_batch_tokens
        parts = list(batch.micro_batches(max_tokens=limit))
        padded = sum(len(rows) * lengths[rows[0]] for rows in parts)
        packs = self._packs and self.packing_pays(sum(lengths) / max(1, padded))
        if packs:
            parts = [torch.tensor(rows) for rows in plan_packs(lengths, max_tokens=limit)]
        most = max(1, int(self._reduce([len(parts)], op="max")[0]))
        if packs and len(parts) < most:
            parts = [torch.tensor(rows) for rows in plan_packs(lengths, max_tokens=limit, packs=most)]
        parts += [_NO_ROWS] * (most - len(parts))
        form = functools.partial(make_pack, share=self._share) if packs else make_rows
        return [form(batch, rows.long(), device=self._backend.device()) for rows in parts]

    @property
    def _share(self) -> PackShare:
        return PackShare() if self._context is None else self._context.share

    def packing_pays(self, real_share: float) -> bool:
        """Return whether packs are faster than padded rows. In the rows, a part ``real_share`` of the tokens is real.

        Without a fused kernel the boundaries cost up to a quarter of a step of the demo, on a CPU core.
        """
        if self._context is not None:  # its ranks cannot share padded rows
            return True
        return self._backend.supports(Capability.VARLEN_ATTENTION).usable or real_share < 2 / 3

    def _passes(self, plan: Iterable[MicroBatch]) -> Generator[MicroBatch]:
        """Yield the micro-batches; a subclass may prepare itself for each pass. Closed early if a pass fails."""
        yield from plan

    def _usable_nbytes(self, *, vocabulary: int) -> int:
        """Return the bytes of the device that this rank can still allocate beside its scores over ``vocabulary``."""
        scores = self.scorer.needed_nbytes(self.settings.micro_batch_tokens // self._share.count, vocabulary)
        return usable_nbytes(self._backend.memory_info(), ranks=self._ranks_on_device, scores_nbytes=scores)

    def _weighted_loss(
        self, part: MicroBatch, loss: TokenLoss, inputs: LossInputs
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the ``loss`` of each token of ``inputs``, times the weight of its row in ``part``; and its metrics.

        If the loss raises an error, and there are other ranks, the losses are NaN. So the pass ends, for collectives
        of the other ranks, and :meth:`_refuse_step` raises the error.
        """
        try:
            per_token, metrics = loss(inputs)
        except Exception as exc:
            if self._ranks == 1:
                raise
            self._loss_error = exc
            per_token, metrics = inputs.logprobs * math.nan, {}
        return per_token if part.weights is None else per_token * part.weights[inputs.rows], metrics

    def _loss_gradient(
        self,
        part: MicroBatch,
        loss: TokenLoss,
        scale: float,
        logprobs: torch.Tensor,
        entropy: torch.Tensor,
        targets: slice,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the gradients of the scaled loss by ``logprobs`` and ``entropy`` of ``targets``; 0 for padding.

        The second is None if the loss does not need it.
        """
        wanted = [logprobs, entropy] if loss.needs_entropy_gradient else [logprobs]
        gradients = [torch.zeros_like(each) for each in wanted]
        count = min(targets.stop, part.trained_tokens) - targets.start
        if count > 0:
            known = [each[:count].requires_grad_() for each in wanted]
            of_entropy = known[1] if loss.needs_entropy_gradient else entropy[:count]
            with torch.enable_grad():
                inputs = part.loss_inputs(known[0], of_entropy, slice(targets.start, targets.start + count))
                per_token, _ = self._weighted_loss(part, loss, inputs)
                found = torch.autograd.grad(per_token.sum() * scale, known)
            for gradient, values in zip(gradients, found, strict=True):
                gradient[:count] = values
        return gradients[0], gradients[1] if len(gradients) > 1 else None

    def _refuse_step(self, norm: float, totals: Mapping[str, torch.Tensor], tokens: float, loss: TokenLoss) -> NoReturn:
        """Raise the error of a step with a ``norm`` that is not finite, on all ranks. Collective."""
        error, self._loss_error = self._loss_error, None
        has_failed = bool(self._reduce([float(error is not None)], op="max")[0])
        if error is not None:
            raise error
        if has_failed:
            raise CommAbortedError("this step was given up", why="the loss raised an error on another rank")
        self._require_same_metrics(totals, loss)
        raise NonFiniteGradientError(
            f"the norm of the gradients is {norm}",
            why=f"a step with them would destroy the weights; the metrics of the step: "
            f"{self._mean_over_ranks(totals, tokens)}",
            fix="lower optimizer.learning_rate or optimizer.max_grad_norm, or set model.dtype=float32; if it happens at"
            " the first step, look for NaN in the model's weights",
        )

    # -- ranks --------------------------------------------------------------------------------------------------

    @property
    def _ranks(self) -> int:
        return 1 if self._group is None else self._group.size

    def _require_same_metrics(self, metrics: Iterable[str], loss: TokenLoss) -> None:
        """Raise DataError on all ranks if the names of their ``metrics`` differ. Collective, once for each ``loss``."""
        if loss is self._agreed_loss:
            return
        names = ", ".join(sorted(metrics))
        number = float(zlib.crc32(names.encode()) >> 8)  # exact in float32
        most, negative_least = self._reduce([number, -number], op="max")
        if most != -negative_least:
            raise DataError(
                "the loss returned other metrics on another rank",
                why=f"on this rank the step's metrics are {names}",
                fix="return the same metrics every time, also without tokens",
            )
        self._agreed_loss = loss

    def _mean_over_ranks(self, totals: Mapping[str, torch.Tensor], tokens: float) -> dict[str, float]:
        names = sorted(totals)
        sums = self._reduce([totals[name].item() for name in names], op="sum")
        return {name: value / tokens for name, value in zip(names, sums, strict=True)}

    def _reduce(self, values: list[float], *, op: Literal["sum", "max"]) -> list[float]:
        """Return ``values`` reduced over the ranks. Ranks with the same tokens count once in a sum."""
        if self._group is None:
            return values
        tensor = torch.tensor(values, dtype=torch.float32, device=self._backend.device())
        self._group.all_reduce(tensor, op=op)
        if op == "sum":
            tensor /= self._ranks // (self.data_parallel_size * self._share.count)
        reduced: list[float] = tensor.tolist()
        return reduced


_NO_ROWS = torch.empty(0, dtype=torch.long)
