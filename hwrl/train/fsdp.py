"""The FSDP2 train engine: any ``AutoModelForCausalLM`` directory, on one rank or sharded over several."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from hwrl.backend import Backend
from hwrl.errors import EngineError
from hwrl.memory import Moved, Offloader
from hwrl.models import load_model, load_tokenizer, logits_at
from hwrl.train.batch import Batch
from hwrl.train.engine import TrainEngine
from hwrl.train.gather import gathered
from hwrl.train.losses import PolicyLoss, mismatch_kl

if TYPE_CHECKING:
    from hwrl.comm import Group

_CHUNK_LOGITS = 1 << 25
"""The logits that are worked on at once in float32: 128 MiB a copy."""


class FsdpEngine(TrainEngine):
    """Trains the model in ``model_directory`` with AdamW.

    ``group`` is the default process group of the training ranks (None: one rank; the model is then not wrapped).
    ``total_steps`` shapes the learning-rate schedule: linear warm-up over ``warmup_steps``, then linear decay to
    ``min_learning_rate_ratio``. A step is split into parts of at most ``micro_batch_tokens`` padded tokens.
    With ``param_offload`` and ``optimizer_offload`` parameters and optimizer state live in host memory, but for
    :meth:`on_device`.

    Parameters and optimizer state are float32; ``dtype`` is what forward and backward passes compute in, and the dtype
    of the weights that leave the engine (:meth:`named_weights`, :meth:`export`). Gradients are reduced in float32.
    The model is in evaluation mode, in training as well: dropout would be noise in the ratio to the behaviour policy.
    """

    def __init__(
        self,
        model_directory: str | Path,
        *,
        backend: Backend,
        group: Group | None,
        learning_rate: float,
        total_steps: int,
        warmup_steps: int = 0,
        min_learning_rate_ratio: float = 1.0,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.0,
        max_grad_norm: float = 1.0,
        micro_batch_tokens: int = 16384,
        temperature: float = 1.0,
        dtype: torch.dtype = torch.float32,
        param_offload: bool = False,
        optimizer_offload: bool = False,
    ) -> None:
        self._backend, self._group = backend, group
        self._max_grad_norm, self._micro_batch_tokens = max_grad_norm, micro_batch_tokens
        self._temperature = temperature
        self._directory = Path(model_directory)
        self._dtype = dtype
        self.model = _shard(load_model(self._directory, dtype=torch.float32).eval(), backend, group, dtype)
        self._hyperparameters: dict[str, Any] = {"lr": learning_rate, "betas": betas, "weight_decay": weight_decay}
        self.optimizer = torch.optim.AdamW(self.model.parameters(), **self._hyperparameters)
        decay = max(1, total_steps - warmup_steps)

        def scale(step: int) -> float:
            if step < warmup_steps:
                return (step + 1) / warmup_steps
            return max(min_learning_rate_ratio, 1 - (1 - min_learning_rate_ratio) * (step - warmup_steps) / decay)

        self._scale = scale
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, scale)
        self._offloader = Offloader(self.model, self.optimizer, backend=backend)
        self._offloader.offload(params=param_offload, optimizer=optimizer_offload)

    def on_device(self, *, optimizer: bool) -> AbstractContextManager[Moved]:
        return self._offloader.loaded(optimizer=optimizer)

    # -- training -----------------------------------------------------------------------------------------------

    def train_batch(self, batch: Batch, *, loss: PolicyLoss) -> dict[str, float]:
        tokens = self._sum_over_ranks(batch.trained_tokens)
        totals: dict[str, torch.Tensor] = {}
        try:
            for rows in self._micro_batches(batch):
                for name, value in self._backward(batch.select(rows), loss=loss, tokens=tokens).items():
                    totals[name] = totals.get(name, torch.zeros_like(value)) + value
            norm = _whole(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._max_grad_norm)).item()
            figures = self._mean_over_ranks(totals, tokens)
            _require_finite(norm, figures)
            self.optimizer.step()
        finally:
            self.optimizer.zero_grad(set_to_none=True)  # gradients would stay on the device when parameters leave it
        learning_rate = float(self.scheduler.get_last_lr()[0])
        self.scheduler.step()
        return {**figures, "grad_norm": norm, "learning_rate": learning_rate}

    @torch.no_grad()
    def logprobs(self, batch: Batch) -> torch.Tensor:
        result = torch.zeros(batch.tokens.shape)
        for rows in self._micro_batches(batch):
            part = batch.select(rows)
            values, _ = self._forward(part)
            row, column = part.mask[:, 1:].nonzero(as_tuple=True)
            result[rows[row], column + 1] = values.cpu()
        return result

    def _backward(self, part: Batch, *, loss: PolicyLoss, tokens: float) -> dict[str, torch.Tensor]:
        """Add the gradient of ``part``'s share of the mean over all ranks' ``tokens``; return sums over its tokens."""
        logprobs, entropy = self._forward(part)
        mask, device = part.mask[:, 1:], logprobs.device
        behaviour = part.behaviour_logprobs[:, 1:][mask].to(device)
        proximal = None if part.proximal_logprobs is None else part.proximal_logprobs[:, 1:][mask].to(device)
        advantages = part.advantages.repeat_interleave(mask.sum(1)).to(device)
        per_token, figures = loss(logprobs, behaviour=behaviour, proximal=proximal, advantages=advantages)
        total = per_token.sum()
        # FSDP averages gradients over the ranks; the loss is a mean over all ranks' tokens.
        (total * (self._ranks / tokens)).backward()
        kl = mismatch_kl(logprobs.detach(), behaviour=behaviour)
        figures = {**figures, "mismatch_kl": kl, "entropy": entropy}
        return {"loss": total.detach().double(), **{name: value.sum().double() for name, value in figures.items()}}

    def _forward(self, part: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return log-probability and entropy (detached) of ``part``'s response tokens, row by row (one dimension).

        Padding is on the right, so causal attention alone keeps it out of every real token's sight. A part without
        rows runs the model on one token for the sake of its collectives: other ranks have more parts than this one.
        """
        tokens = part.tokens if part.rows else torch.zeros(1, 2, dtype=torch.long)
        row, column = part.mask[:, 1:].nonzero(as_tuple=True)
        device = self._backend.device()
        targets = tokens[row, column + 1].to(device)
        with torch.autocast(device.type, dtype=self._dtype, enabled=self._ranks == 1 and self._dtype != torch.float32):
            inputs = tokens[:, :-1].to(device)
            logits = logits_at(self.model, row.to(device), column.to(device), input_ids=inputs, use_cache=False)
        return _logprobs_and_entropy(logits, targets, temperature=self._temperature)

    def _micro_batches(self, batch: Batch) -> Iterator[torch.Tensor]:
        parts = list(batch.micro_batches(max_tokens=self._micro_batch_tokens))
        idle = int(self._max_over_ranks(len(parts))) - len(parts)  # before the first part: it is a collective as well
        yield from parts
        for _ in range(idle):
            yield torch.empty(0, dtype=torch.long)

    # -- weights and state --------------------------------------------------------------------------------------

    @torch.no_grad()
    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        parameters = ((name, parameter.detach()) for name, parameter in self.model.named_parameters())
        yield from gathered(parameters, self._group, dtype=self._dtype)
        if self._group is None or self._group.rank == 0:
            yield from self._buffers()

    def weights_metadata(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self.model.named_parameters():
            yield name, torch.empty(parameter.shape, dtype=self._dtype, device="meta")
        for name, buffer in self._buffers():
            yield name, buffer.to("meta")

    def _buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the buffers that a checkpoint holds; every rank has them whole."""
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        yield from ((name, tensor) for name, tensor in self.model.state_dict().items() if name not in parameters)

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "scheduler": self.scheduler.state_dict()}

    @contextmanager
    def saved_state(self) -> Iterator[tuple[dict[str, Any], Offloader | None]]:
        if not self.optimizer.state:  # torch takes a step to have one
            with super().saved_state() as saved:
                yield saved
            return
        with self._offloader.lending():
            yield self.state_dict(), self._offloader

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.scheduler.load_state_dict(state["scheduler"])
        self._apply_hyperparameters()

    def _apply_hyperparameters(self) -> None:
        """Put this run's settings into optimizer and scheduler, whose position in the schedule stays."""
        rate = self._hyperparameters["lr"]
        self.scheduler.base_lrs = [rate for _ in self.optimizer.param_groups]
        now = rate * self._scale(self.scheduler.last_epoch)
        self.scheduler._last_lr = [now for _ in self.optimizer.param_groups]
        for group in self.optimizer.param_groups:
            group.update(self._hyperparameters, lr=now, initial_lr=rate)

    def export(self, directory: Path) -> None:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights: dict[str, Any] = get_model_state_dict(self.model, options=options)
        if self._group is not None and self._group.rank != 0:
            return
        for name, _ in self.model.named_parameters(remove_duplicate=False):
            weights[name] = weights[name].to(self._dtype)
        self.model.save_pretrained(directory, state_dict=weights)
        self.model.config.dtype = self._dtype  # save_pretrained wrote the dtype of the parameters in training
        self.model.config.save_pretrained(directory)
        load_tokenizer(self._directory).save_pretrained(directory)

    # -- ranks --------------------------------------------------------------------------------------------------

    @property
    def _ranks(self) -> int:
        return 1 if self._group is None else self._group.size

    def _sum_over_ranks(self, value: float) -> float:
        return self._reduce([value], op="sum")[0]

    def _max_over_ranks(self, value: float) -> float:
        return self._reduce([value], op="max")[0]

    def _mean_over_ranks(self, totals: Mapping[str, torch.Tensor], tokens: float) -> dict[str, float]:
        names = sorted(totals)
        sums = self._reduce([totals[name].item() for name in names], op="sum")
        return {name: value / tokens for name, value in zip(names, sums, strict=True)}

    def _reduce(self, values: list[float], *, op: Literal["sum", "max"]) -> list[float]:
        if self._group is None:
            return values
        tensor = torch.tensor(values, dtype=torch.float32, device=self._backend.device())
        self._group.all_reduce(tensor, op=op)
        reduced: list[float] = tensor.tolist()
        return reduced


def _shard(model: Any, backend: Backend, group: Group | None, dtype: torch.dtype) -> Any:
    """Return ``model`` on the device. On several ranks it is sharded from the host, one layer at a time."""
    if group is None or group.size == 1:
        return model.to(backend.device())
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(backend.info.device_type, (group.size,))
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for layer in model.model.layers if hasattr(model, "model") and hasattr(model.model, "layers") else ():
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def _logprobs_and_entropy(
    logits: torch.Tensor, targets: torch.Tensor, *, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probability and entropy (detached) of each of ``targets`` under ``logits`` (targets × vocabulary).

    At most ``_CHUNK_LOGITS`` logits exist in float32 at a time: what a chunk computes is computed again backwards.
    """
    size = max(1, _CHUNK_LOGITS // logits.shape[-1])
    if len(targets) <= size:
        return _of_chunk(logits, targets, temperature)
    chunks = zip(logits.split(size), targets.split(size), strict=True)
    parts = [checkpoint(_of_chunk, *chunk, temperature, use_reentrant=False) for chunk in chunks]
    logprobs, entropies = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


def _of_chunk(logits: torch.Tensor, targets: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    distribution = (logits.float() / temperature).log_softmax(-1)
    logprobs = distribution.gather(1, targets[:, None])[:, 0]
    with torch.no_grad():
        entropy = -(distribution.exp() * distribution).sum(-1)
    return logprobs, entropy


def _require_finite(norm: float, figures: Mapping[str, float]) -> None:
    if not math.isfinite(norm):
        raise EngineError(
            f"the norm of the gradients is {norm}",
            why=f"a step with them would destroy the weights; the figures of the step: {figures}",
            fix="resume from the last checkpoint with a lower optimizer.learning_rate or optimizer.max_grad_norm, or "
            "model.dtype=float32; if it happens at the first step, look for NaN in the model's weights",
        )


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
