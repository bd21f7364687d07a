"""A training step in plain torch, over rows of one length: the speed to reach for ragged rows.

The model is bfloat16 (or the benchmark's dtype), with float32 masters beside it. There is no padding, no ragged end, no
sharding, no offload and no adapter.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from hwrl.interfaces import Batch, LossInputs
from hwrl.train import PolicyLoss
from hwrl_bench.models import random_model

_CHUNK = 4096
"""Response tokens that are scored at once."""


class ReferenceTraining:
    """Takes optimizer steps on batches of equally long rows with equally long prompts.

    ``compiled`` compiles each layer's forward pass and the scoring. ``checkpointing`` computes a layer again in the
    backward pass. A pass has ``pass_tokens`` tokens.
    """

    def __init__(
        self,
        directory: Path,
        *,
        dtype: torch.dtype,
        device: torch.device,
        pass_tokens: int,
        learning_rate: float,
        compiled: bool,
        checkpointing: bool,
    ) -> None:
        self._model = random_model(directory, dtype=dtype, device=device)
        self._pass_tokens, self._device, self._score = pass_tokens, device, _score
        self._weights = list(self._model.parameters())
        self._masters = [weight.detach().float().clone().requires_grad_() for weight in self._weights]
        self._optimizer = torch.optim.AdamW(
            self._masters, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )
        for layer in self._model.model.layers:
            if compiled:  # inside the checkpoint: a compiled module around it gains nothing
                layer.forward = torch.compile(layer.forward, dynamic=False)
            if checkpointing:
                layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
        if compiled:
            self._score = torch.compile(_score, dynamic=False)

    def train_batch(self, batch: Batch) -> dict[str, float]:
        """Take one optimizer step; return the loss and the norm of the gradients."""
        width = batch.tokens.shape[1]
        parts = torch.arange(batch.rows).split(max(1, self._pass_tokens // width))
        loss = sum(self._backward(batch.select(rows), tokens=batch.trained_tokens) for rows in parts)
        for master, weight in zip(self._masters, self._weights, strict=True):
            master.grad, weight.grad = weight.grad.float(), None
        norm = torch.nn.utils.clip_grad_norm_(self._masters, 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_copy_(self._weights, self._masters)
        return {"loss": float(loss), "grad_norm": norm.item()}

    def _backward(self, part: Batch, *, tokens: int) -> Any:
        prompt = int((~part.mask[0]).sum())
        inputs = part.tokens.to(self._device)
        hidden = self._model.model(input_ids=inputs, use_cache=False).last_hidden_state[:, prompt - 1 : -1]
        targets, weight = inputs[:, prompt:].reshape(-1), self._model.lm_head.weight
        chunks = zip(hidden.reshape(-1, hidden.shape[-1]).split(_CHUNK), targets.split(_CHUNK), strict=True)
        logprobs = torch.cat([checkpoint(self._score, each, weight, of, use_reentrant=False) for each, of in chunks])
        behaviour = part.behaviour_logprobs[:, prompt:].reshape(-1).to(self._device)
        advantages = part.advantages.repeat_interleave(part.mask.sum(1)).to(self._device)
        rows = torch.arange(part.rows, device=self._device).repeat_interleave(part.mask.sum(1).to(self._device))
        known = LossInputs(
            logprobs=logprobs,
            behaviour=behaviour,
            advantages=advantages,
            rows=rows,
            row_count=part.rows,
            entropy=torch.zeros_like(behaviour),
        )
        per_token, _ = PolicyLoss()(known)
        loss = per_token.sum() / tokens
        loss.backward()
        return loss.detach()


def _score(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the log-probability of each of ``targets``, in float32."""
    return (hidden @ weight.T).float().log_softmax(-1).gather(1, targets[:, None])[:, 0]
