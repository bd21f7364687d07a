"""Micro-batches through the stages of a pipeline, with Megatron's own schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel.schedules import forward_backward_pipelining_without_interleaving

from hwrl.train import MicroBatch

ForwardPass = Callable[[MicroBatch], torch.Tensor]
Loss = Callable[[MicroBatch, torch.Tensor], torch.Tensor]


def run_stages(
    model: DistributedDataParallel, plan: Sequence[MicroBatch], run: ForwardPass, *, loss: Loss | None = None
) -> Iterator[torch.Tensor]:
    """Run the micro-batches of ``plan`` through all stages; yield the scores of each (2 × targets, float32, detached).

    Collective over the stages; each has the same plan. ``run`` returns this stage's result: hidden states, or the
    scores on the last stage. With ``loss``, the last stage computes it from the scores, and there are backward passes:
    each stage alternates one forward and one backward pass. The last stage sends the scores to the others.
    """

    def step(parts: Iterator[MicroBatch], _: Any) -> tuple[torch.Tensor, Callable[[torch.Tensor], Any]]:
        part = next(parts)

        def finish(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            total = scores if loss is None else loss(part, scores)
            return total, torch.zeros((), dtype=torch.int), scores.detach()

        return run(part), finish

    scores = forward_backward_pipelining_without_interleaving(
        forward_step_func=step,
        data_iterator=iter(plan),
        model=model,
        num_microbatches=len(plan),
        seq_length=1,  # not used: the stages send each other the shapes
        micro_batch_size=1,
        forward_only=loss is None,
    )
    yield from _shared(scores, plan)


def _shared(scores: list[torch.Tensor], plan: Sequence[MicroBatch]) -> Iterator[torch.Tensor]:
    sizes = [len(part.targets) for part in plan]
    group, last = (
        parallel_state.get_pipeline_model_parallel_group(),
        parallel_state.get_pipeline_model_parallel_last_rank(),
    )
    every = torch.cat(scores, 1) if scores else torch.empty(2, sum(sizes), device=plan[0].targets.device)
    torch.distributed.broadcast(every, src=last, group=group)
    yield from every.split(sizes, 1)
