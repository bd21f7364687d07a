"""The FSDP2 train engine: any ``AutoModelForCausalLM`` directory, on one rank or sharded over several."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
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
from torch.nn import functional as F

from hwrl.backend import Backend
from hwrl.memory import Offloader
from hwrl.models import load_model, load_tokenizer
from hwrl.train.batch import Batch
from hwrl.train.engine import TrainEngine
from hwrl.train.losses import PolicyLoss

if TYPE_CHECKING:
    from hwrl.comm import Group


class FsdpEngine(TrainEngine):
    """Trains the model in ``model_directory`` with AdamW.

    ``group`` is the default process group of the training ranks (None: one rank; the model is then not wrapped).
    ``total_steps`` shapes the learning-rate schedule: linear warm-up over ``warmup_steps``, then linear decay to
    ``min_learning_rate_ratio``. A step is split into parts of at most ``micro_batch_tokens`` padded tokens.
    With ``param_offload`` and ``optimizer_offload`` parameters and optimizer state live in host memory, but for
    :meth:`on_device`.
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
        self.model = _shard(load_model(self._directory, dtype=dtype).to(backend.device()).train(), backend, group)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=learning_rate, betas=betas, weight_decay=weight_decay
        )
        decay = max(1, total_steps - warmup_steps)

        def scale(step: int) -> float:
            if step < warmup_steps:
                return (step + 1) / warmup_steps
            return max(min_learning_rate_ratio, 1 - (1 - min_learning_rate_ratio) * (step - warmup_steps) / decay)

        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, scale)
        self._offloader = Offloader(self.model, self.optimizer, backend=backend)
        self._offloader.offload(params=param_offload, optimizer=optimizer_offload)

    @contextlib.contextmanager
    def on_device(self, *, optimizer: bool) -> Iterator[None]:
        with self._offloader.loaded(optimizer=optimizer):
            yield

    # -- training -----------------------------------------------------------------------------------------------

    def train_batch(self, batch: Batch, *, loss: PolicyLoss) -> dict[str, float]:
        self.optimizer.zero_grad(set_to_none=True)
        tokens = self._sum_over_ranks(batch.trained_tokens)
        totals: dict[str, torch.Tensor] = {}
        for rows in self._micro_batches(batch):
            for name, value in self._backward(batch.select(rows), loss=loss, tokens=tokens).items():
                totals[name] = totals.get(name, torch.zeros_like(value)) + value
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._max_grad_norm)
        self.optimizer.step()
        learning_rate = float(self.scheduler.get_last_lr()[0])
        self.scheduler.step()
        figures = self._mean_over_ranks(totals, tokens)
        return {**figures, "grad_norm": _whole(norm).item(), "learning_rate": learning_rate}

    @torch.no_grad()
    def logprobs(self, batch: Batch) -> torch.Tensor:
        result = torch.zeros(batch.tokens.shape, device=self._backend.device())
        for rows in self._micro_batches(batch):
            part = batch.select(rows)
            values, _ = self._forward(part)
            if len(rows):
                result[rows.to(result.device), 1 : part.tokens.shape[1]] = values
        return result.cpu() * batch.mask

    def _backward(self, part: Batch, *, loss: PolicyLoss, tokens: float) -> dict[str, torch.Tensor]:
        """Add the gradient of ``part``'s share of the mean over all ranks' ``tokens``; return sums over its tokens."""
        logprobs, entropy = self._forward(part)
        device = logprobs.device
        mask = part.mask[:, 1:].to(device)
        behaviour = part.behaviour_logprobs[:, 1:].to(device)
        proximal = None if part.proximal_logprobs is None else part.proximal_logprobs[:, 1:].to(device)
        per_token, figures = loss(
            logprobs, behaviour=behaviour, proximal=proximal, advantages=part.advantages[:, None].to(device)
        )
        total = (per_token * mask).sum()
        # FSDP averages gradients over the ranks; the loss is a mean over all ranks' tokens.
        (total * (self._ranks / tokens)).backward()
        difference = behaviour - logprobs.detach()
        k3 = difference.exp() - 1 - difference  # Schulman's k3 estimate of KL(trainer || behaviour)
        figures = {**figures, "mismatch_kl": k3, "entropy": entropy}
        sums = {name: (value * mask).sum().double() for name, value in figures.items()}
        return {"loss": total.detach().double(), **sums}

    def _forward(self, part: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return log-probability and entropy (detached) of tokens 1… under the current policy (rows × length - 1).

        Padding is on the right, so causal attention alone keeps it out of every real token's sight.
        """
        if not part.rows:
            return self._idle_forward()
        tokens = part.tokens.to(self._backend.device())
        logits = self.model(input_ids=tokens[:, :-1], use_cache=False).logits.float() / self._temperature
        targets = tokens[:, 1:]
        logprobs = -F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
        with torch.no_grad():
            distribution = logits.log_softmax(-1)
            entropy = -(distribution.exp() * distribution).sum(-1)
        return logprobs, entropy

    def _idle_forward(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the model on one token for the sake of its collectives: other ranks have more parts than this one."""
        token = torch.zeros(1, 1, dtype=torch.long, device=self._backend.device())
        nothing = self.model(input_ids=token, use_cache=False).logits.float().sum() * 0.0
        return nothing.expand(0, 0) + nothing, torch.zeros(0, 0, device=token.device)

    def _micro_batches(self, batch: Batch) -> Iterator[torch.Tensor]:
        parts = list(batch.micro_batches(max_tokens=self._micro_batch_tokens))
        yield from parts
        for _ in range(int(self._max_over_ranks(len(parts))) - len(parts)):
            yield torch.empty(0, dtype=torch.long)

    # -- weights and state --------------------------------------------------------------------------------------

    @torch.no_grad()
    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self.model.named_parameters():
            yield name, _whole(parameter.detach())

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "scheduler": self.scheduler.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.scheduler.load_state_dict(state["scheduler"])

    def export(self, directory: Path) -> None:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights = get_model_state_dict(self.model, options=options)
        if self._group is not None and self._group.rank != 0:
            return
        self.model.save_pretrained(directory, state_dict=weights)
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


def _shard(model: Any, backend: Backend, group: Group | None) -> Any:
    if group is None or group.size == 1:
        return model
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(backend.info.device_type, (group.size,))
    for layer in model.model.layers if hasattr(model, "model") and hasattr(model.model, "layers") else ():
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
