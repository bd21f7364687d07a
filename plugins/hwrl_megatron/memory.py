"""Estimate the memory of a rank, by cause, before the run: :func:`engine_memory`. Needs no megatron."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hwrl.interfaces import ACTIVE, ALWAYS, EngineSettings, MemoryCause, phase_nbytes
from hwrl.models import load_model_config
from hwrl.train import OutputScorer
from hwrl_megatron.layout import Layout, rank_nbytes
from hwrl_megatron.options import MegatronOptions
from hwrl_megatron.supported import make_layout, require_settings


def engine_memory(
    settings: EngineSettings, options: MegatronOptions, *, ranks: int, device_nbytes: int
) -> tuple[MemoryCause, ...]:
    """Return the memory of the rank that needs the most in a step. Each of ``ranks`` has ``device_nbytes``.

    A pass has ``settings.micro_batch_tokens`` tokens, all of them targets. Reads the model's configuration only. Raises
    ConfigError as the engine does.
    """
    require_settings(settings)
    config = load_model_config(settings.model_directory)
    first = make_layout(config, options, rank=0, ranks=ranks)
    stages = [
        tuple(_rank(config, settings, layout, device_nbytes=device_nbytes)) for layout in _first_of_each_stage(first)
    ]
    return max(stages, key=lambda causes: phase_nbytes(causes, "step"))


def _first_of_each_stage(first: Layout) -> Iterator[Layout]:
    for stage in range(first.stages):
        rank = stage * first.tensor * first.data
        yield Layout(rank, first.tensor, first.data, first.stages, first.experts)


def _rank(config: Any, settings: EngineSettings, layout: Layout, *, device_nbytes: int) -> Iterator[MemoryCause]:
    state = list(_state(config, settings, layout))
    yield from state
    scores = 0
    if layout.stage == layout.stages - 1:
        vocabulary = config.vocab_size // layout.tensor
        scores = OutputScorer().needed_nbytes(settings.micro_batch_tokens, vocabulary)
        yield MemoryCause("logits, a chunk at a time", scores, phases=("step",), certain=False)
    room = device_nbytes - scores - phase_nbytes(state, "step")
    yield from _activations(config, settings, layout, room=room)


def _state(config: Any, settings: EngineSettings, layout: Layout) -> Iterator[MemoryCause]:
    nbytes = rank_nbytes(config, layout, dtype=settings.dtype)
    yield MemoryCause("parameters", nbytes["parameters"], phases=ACTIVE if settings.param_offload else ALWAYS)
    yield MemoryCause("gradients", nbytes["gradients"], phases=("step",))
    kept = ("step",) if settings.optimizer_offload else ALWAYS
    yield MemoryCause("optimizer state", nbytes["optimizer"], phases=kept)
    if settings.param_offload:
        yield MemoryCause("offloaded parameters", nbytes["parameters"], "host")
    if settings.optimizer_offload:
        yield MemoryCause("offloaded optimizer state", nbytes["optimizer"], "host")


def _activations(config: Any, settings: EngineSettings, layout: Layout, *, room: int) -> Iterator[MemoryCause]:
    """Yield the activations of all micro-batches under way; ``auto`` recomputes as few layers as fit in ``room``.

    A layer keeps 5 + 12 / ``tensor`` values for each token and hidden dimension, with fused attention (Korthikanti et
    al. 2022, https://arxiv.org/abs/2205.05198, in a two-byte dtype: 10 + 24 / t bytes). A mixture's layer keeps this
    once for each expert of a token.
    """
    tokens, layers = settings.micro_batch_tokens, int(config.num_hidden_layers) // layout.stages
    under_way = layout.stages - layout.stage
    inputs = tokens * int(config.hidden_size) * settings.dtype.itemsize
    kept = inputs * (5 * layout.tensor + 12) // layout.tensor * int(getattr(config, "num_experts_per_tok", 1))

    def needed(recomputed: int) -> int:
        return under_way * (recomputed * inputs + (layers - recomputed) * kept)

    recomputed = layers if settings.activation_checkpointing is True else 0
    if settings.activation_checkpointing == "auto":
        fitting = (count for count in range(layers) if needed(count) + 2 * kept <= room)
        recomputed = next(fitting, layers)
    words = f"activations of {under_way} × {tokens:,} tokens, {recomputed} of {layers} layers recomputed"
    yield MemoryCause(words, needed(recomputed), phases=("step",), certain=False)
    yield MemoryCause("backward pass of a layer", 2 * kept, phases=("step",), certain=False)
