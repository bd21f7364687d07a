"""Estimate the memory of a rank of the FSDP2 engine, by cause, without the engine: :func:`fsdp_memory`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hwrl.interfaces import ACTIVE, ALWAYS, EngineSettings, MemoryCause, phase_nbytes
from hwrl.lora import described_model
from hwrl.models import build_meta_model
from hwrl.train.activations import layers_to_recompute, reserve_nbytes
from hwrl.train.context_parallel import require_shared_heads
from hwrl.train.critic import described_critic
from hwrl.train.loading import VALUE_WEIGHT
from hwrl.train.pass_memory import PassMemory, measure_pass
from hwrl.train.scoring import OutputScorer
from hwrl.train.sharding import layers_of, whole_fits
from hwrl.train.state_memory import StateMemory

_OF = {True: "of all layers", False: "layer by layer"}


def fsdp_memory(
    settings: EngineSettings, *, ranks: int, device_nbytes: int, context_nbytes: int = 0, critic: bool = False
) -> tuple[MemoryCause, ...]:
    """Return the memory of the fullest of ``ranks`` ranks, each on a device of ``device_nbytes``.

    A pass has ``settings.micro_batch_tokens`` tokens, all of them targets; a rank has its share of them.
    ``context_nbytes`` of the device are taken by others. The engine is the policy's or, with ``critic``, the critic's.
    Reads the model's configuration only. With ``settings.compile`` "auto" the layers count as not compiled: the device
    decides, and layers need more memory without compilation.

    Raises ConfigError if the ranks that share a pack cannot share the model's heads.
    """
    memory, width = _state_of(settings, ranks, critic=critic)
    require_shared_heads(settings.model_directory, settings.context_parallel)
    tokens = -(-settings.micro_batch_tokens // settings.context_parallel)
    scores = OutputScorer().needed_nbytes(tokens, width)
    usable = device_nbytes - context_nbytes - reserve_nbytes(device_nbytes, scores_nbytes=scores)
    causes = [*_state(memory, settings), *_gathered(memory, settings, ranks, usable)]
    measured = measure_pass(
        settings.model_directory,
        dtype=settings.dtype,
        tokens=tokens,
        targets=tokens,
        lora=settings.lora,
        context_parallel=settings.context_parallel,
        compiled=settings.compile is True,
    )
    if critic:
        measured = replace(measured, scoring=0)
    return (*causes, *_pass(measured, settings, tokens=tokens, room=usable - phase_nbytes(causes, "step")))


def certain_fsdp_memory(settings: EngineSettings, *, ranks: int, critic: bool = False) -> tuple[MemoryCause, ...]:
    """Return the certain part of :func:`fsdp_memory`: parameters, gradients and the optimizer's state. Cheap."""
    return _state(_state_of(settings, ranks, critic=critic)[0], settings)


def reference_memory(settings: EngineSettings, *, ranks: int) -> tuple[MemoryCause, ...]:
    """Return the memory of a rank's part of a :class:`~hwrl.train.ReferenceModel`. Its passes are in the step."""
    model = build_meta_model(settings.model_directory, dtype=settings.dtype).requires_grad_(False)
    memory = StateMemory.of(model, layers_of(model), settings, ranks=ranks)
    causes = [MemoryCause("parameters", memory.parameters, "host")]
    if not memory.on_host:
        causes.append(MemoryCause("parameters in their pass", memory.parameters, phases=("step",), certain=False))
    return (*causes, MemoryCause("gathered weights", memory.gathered, phases=("step",), certain=False))


def add_in_turns(policy: Sequence[MemoryCause], other: Sequence[MemoryCause], *, name: str) -> list[MemoryCause]:
    """Return the causes of ``policy`` and of the ``other`` engine on its rank, ``name``: they step in turns.

    Only one of them steps at a time, so the larger need in a step counts. The other engine adds its excess over the
    policy's need, or nothing.
    """
    own = [replace(one, cause=f"{name}: {one.cause}") for one in other if one.place == "host" or one.phases == ALWAYS]
    turns = [
        sum(one.nbytes for one in causes if one.place == "device" and one.phases != ALWAYS and "step" in one.phases)
        for causes in (policy, other)
    ]
    if turns[1] > turns[0]:
        more = turns[1] - turns[0]
        own.append(
            MemoryCause(f"{name}: its turn in a step, beyond the policy's", more, phases=("step",), certain=False)
        )
    return [*policy, *own]


def _state_of(settings: EngineSettings, ranks: int, *, critic: bool) -> tuple[StateMemory, int]:
    """Return the memory of parameters, gradients and moments, and the width of the scores."""
    described = described_critic if critic else described_model
    model = described(settings.model_directory, dtype=settings.dtype, lora=settings.lora)
    output = model.get_output_embeddings()
    width = getattr(output, VALUE_WEIGHT) if critic else output.weight
    return StateMemory.of(model, layers_of(model), settings, ranks=ranks), width.shape[0]


def _state(memory: StateMemory, settings: EngineSettings) -> tuple[MemoryCause, ...]:
    if memory.on_host:
        named = {"parameters": memory.parameters, "gradients": memory.gradients, "optimizer state": memory.moments}
        return tuple(MemoryCause(cause, nbytes, "host") for cause, nbytes in named.items())
    kept = ACTIVE if settings.param_offload else ALWAYS
    causes = [
        MemoryCause("parameters", memory.parameters, phases=kept),
        MemoryCause("gradients", memory.gradients, phases=("step",)),
        MemoryCause("optimizer state", memory.moments, phases=("step",) if settings.optimizer_offload else ALWAYS),
    ]
    if memory.compute_copy:
        causes.append(MemoryCause("compute copy", memory.compute_copy, phases=kept))
    if settings.param_offload:
        causes.append(MemoryCause("offloaded parameters", memory.parameters, "host"))
    if settings.optimizer_offload:
        causes.append(MemoryCause("offloaded optimizer state", memory.moments, "host"))
    return tuple(causes)


def _gathered(memory: StateMemory, settings: EngineSettings, ranks: int, usable: int) -> Sequence[MemoryCause]:
    """Return the whole weights and gradients of a sharded model's step: of some layers, or all if they fit easily."""
    if ranks == 1 and not memory.on_host:
        return ()
    parameters = 0 if memory.on_host else memory.parameters
    weights, gradients = whole_fits(memory, usable - parameters)
    gathered = memory.whole_weights if weights else memory.gathered
    reducing = memory.whole_gradients if gradients else memory.reducing
    return (
        MemoryCause(f"gathered weights, {_OF[weights]}", gathered, phases=("step",), certain=False),
        MemoryCause(f"whole gradients, {_OF[gradients]}", reducing, phases=("step",), certain=False),
    )


def _pass(measured: PassMemory, settings: EngineSettings, *, tokens: int, room: int) -> Sequence[MemoryCause]:
    """Return the memory of a pass; ``auto`` recomputes as many layers as it must to fit ``room``."""
    layers = len(measured.kept)
    recomputed = layers if settings.activation_checkpointing is True else 0
    if settings.activation_checkpointing == "auto":
        recomputed = layers_to_recompute(
            layers,
            tokens,
            kept_nbytes=sum(measured.kept) / layers / tokens,
            input_nbytes=sum(measured.inputs) / layers / tokens,
            room_nbytes=room,
        )
    kept = measured.kept_nbytes(recomputed)
    beyond = measured.peak_nbytes(recomputed) - kept
    largest = "logits, a chunk at a time" if beyond == measured.scoring else "backward pass of a layer"
    activations = f"activations of {tokens:,} tokens, {recomputed} of {layers} layers recomputed"
    if not measured.measured:
        activations += ", by a rule of thumb"
    return (
        MemoryCause(activations, kept, phases=("step",), certain=False),
        MemoryCause(largest, beyond, phases=("step",), certain=False),
    )
