"""The memory of one trainer rank, and of one worker of a replica, by cause."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from hwrl.interfaces import ALWAYS, EngineSettings, LoraSettings, MemoryCause, Phase, Place, phase_nbytes
from hwrl.lora import described_model
from hwrl.rollout import embedded_memory
from hwrl.run import (
    EMBEDDED,
    FSDP,
    Config,
    Machines,
    choose_senders,
    critic_settings,
    engine_settings,
    plugin_memory,
    reference_settings,
    rollout_settings,
)
from hwrl.saved_names import saved_weights
from hwrl.train import add_in_turns, fsdp_memory, reference_memory, reserve_nbytes
from hwrl.weights import AHEAD_NBYTES, TRANSPORTS, TransportName, WeightLayout, bucket_sizes, ring_nbytes_of

CONTEXT_NBYTES = 1 << 30
"""Estimated device memory of the context and the library buffers of a process."""
IMPORTS_NBYTES = 3 << 29
"""Estimated host memory of a process that has imported torch and transformers."""
_BUCKETS = 4
"""The number of buckets in a sender's ring."""
_GROUPS = "groups: "
SHARED_CAUSES = ("sender: ", "receiver: ", _GROUPS)
"""Prefixes of the causes for weight links and for groups of processes, the same with every engine."""
_GROUPS_OF_A_LINK = 2
"""The groups of a weight link, if its transport forms groups."""
_VERSIONS = 3
"""The number of versions that a transport keeps, if it keeps versions."""


def longest_pass(config: Config) -> int:
    """Return the maximum number of tokens in a micro-batch: the setting, one longer row, or all rows of a rank.

    With a plugin's engine, all ranks may have the same rows.
    """
    row = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    rows = config.train.batch_groups * config.rollout.n
    shares = config.train.ranks // config.train.context_parallel if config.train.engine == FSDP else 1
    share = -(-rows // (shares * config.algorithm.mini_batches))
    return min(max(config.train.micro_batch_tokens, row), share * row)


def train_settings(config: Config) -> EngineSettings:
    """Return the settings of the train engine, with the tokens of the longest pass as the micro-batch."""
    return replace(engine_settings(config), micro_batch_tokens=longest_pass(config))


def rank_memory(config: Config, *, device_nbytes: int, transport: TransportName) -> tuple[MemoryCause, ...]:
    """Return the memory of trainer rank 0, which needs more than the others."""
    settings, ranks = train_settings(config), config.train.ranks
    causes: list[MemoryCause] = []
    if config.train.engine == FSDP:
        causes += [*_fsdp_engines(config, settings, device_nbytes), *_overhead(device_nbytes)]
    else:
        others = _overhead(device_nbytes)
        usable, options = device_nbytes - sum(cause.nbytes for cause in others), config.train.engine_options
        reported = plugin_memory(config.train.engine, "train.engine", options, settings, ranks, usable)
        causes += [*reported, *others] if reported else []
    layout = sent_layout(config)
    sending = layout.largest_bucket_nbytes * min(_BUCKETS, len(layout.buckets))
    if ranks > 1:
        largest = max((entry.nbytes for entry in layout.entries), default=0)
        sending += min(AHEAD_NBYTES, layout.payload_nbytes) + largest
    causes.append(
        MemoryCause("sender: ring of buckets, gathered tensors", sending, phases=("transfer",), certain=False)
    )
    if TRANSPORTS[transport].keeps_versions:
        stored = _VERSIONS * layout.nbytes
        causes.append(MemoryCause(f"{_VERSIONS} stored versions of the weights", stored, "host", certain=False))
    if config.checkpoint.async_save:
        causes += _copies_for_checkpoints(config, causes)
    return (*causes, MemoryCause("process and imports", IMPORTS_NBYTES, "host", certain=False))


def _fsdp_engines(config: Config, settings: EngineSettings, device_nbytes: int) -> list[MemoryCause]:
    """Return the memory of the policy's engine, of the critic and of the reference model, if the run has them."""
    ranks = config.train.ranks
    critic: tuple[MemoryCause, ...] = ()
    if config.algorithm.has_critic:
        others = replace(critic_settings(config), micro_batch_tokens=settings.micro_batch_tokens)
        critic = fsdp_memory(
            others, ranks=ranks, device_nbytes=device_nbytes, context_nbytes=CONTEXT_NBYTES, critic=True
        )
    kept = CONTEXT_NBYTES + phase_nbytes(critic, "idle")
    causes = list(fsdp_memory(settings, ranks=ranks, device_nbytes=device_nbytes, context_nbytes=kept))
    if config.has_reference_copy:
        causes = add_in_turns(causes, reference_memory(reference_settings(config), ranks=ranks), name="reference")
    return add_in_turns(causes, critic, name="critic")


def _copies_for_checkpoints(config: Config, causes: Iterable[MemoryCause]) -> list[MemoryCause]:
    """Return the memory for copies of trained parameters and optimizer state. Offloaded tensors need no copy."""
    named = {cause.cause: cause for cause in causes}
    copied: dict[Place, int] = {"device": 0, "host": 0}
    for cause in ("parameters", "optimizer state", "critic: parameters", "critic: optimizer state"):
        kept = named.get(cause)
        if kept is not None and kept.phases == ALWAYS:
            # Of a LoRA model only the adapter is copied. It is as large as the gradients.
            is_adapter = config.model.lora is not None and cause.endswith("parameters")
            copied[kept.place] += named["gradients"].nbytes if is_adapter else kept.nbytes
    if config.checkpoint.staging == "host":
        copied = {"host": sum(copied.values())}
    name = "copy for a checkpoint in the background"
    return [MemoryCause(name, nbytes, place, certain=False) for place, nbytes in copied.items() if nbytes]


def worker_memory(config: Config, *, device_nbytes: int) -> tuple[MemoryCause, ...]:
    """Return the memory of one worker of a replica."""
    settings = rollout_settings(config)
    causes: list[MemoryCause] = []
    if config.rollout.engine == EMBEDDED:
        causes += [*embedded_memory(settings), *_overhead(device_nbytes)]
    else:
        options = config.rollout.engine_options
        causes += plugin_memory(config.rollout.engine, "rollout.engine", options, settings, 1, device_nbytes)
    if config.rollout.free_cache_engine:
        causes = [replace(cause, phases=_awake(cause)) for cause in causes]
        if config.rollout.sleep_level == 1:
            slept = sum(cause.nbytes for cause in causes if cause.cause == "weights")
            causes.append(MemoryCause("weights of a sleeping replica", slept, "host"))
    keeps_old = config.weights.keep_old_version
    layout = sent_layout(config)
    receiving = 2 * layout.nbytes if keeps_old else ring_nbytes_of(layout)
    name = "receiver: two versions" if keeps_old else "receiver: ring of buckets"
    phases = ALWAYS if keeps_old else ("transfer",)
    causes.append(MemoryCause(name, receiving, phases=phases, certain=False))
    return (*causes, MemoryCause("process and imports", IMPORTS_NBYTES, "host", certain=False))


def count_groups(config: Config, transport: TransportName) -> tuple[int, int]:
    """Return the number of groups of a trainer rank, and of a worker. An engine of a plugin may make more."""
    link = _GROUPS_OF_A_LINK * TRANSPORTS[transport].forms_groups
    replicated = config.train.shard_ranks not in (None, config.train.ranks)
    return link + (config.train.ranks > 1) * (2 + replicated), link + (config.rollout.tensor_parallel > 1)


def group_memory(groups: int, group_nbytes: int) -> tuple[MemoryCause, ...]:
    """Return the device memory of ``groups`` groups of processes, each with buffers of ``group_nbytes``."""
    nbytes = groups * group_nbytes
    return (MemoryCause(f"{_GROUPS}buffers of {groups}", nbytes, certain=False),) if nbytes else ()


def _overhead(device_nbytes: int) -> list[MemoryCause]:
    return [
        MemoryCause("context and libraries", CONTEXT_NBYTES, certain=False),
        MemoryCause("kept free for fragments", reserve_nbytes(device_nbytes), certain=False),
    ]


def _awake(cause: MemoryCause) -> tuple[Phase, ...]:
    if cause.place == "host" or cause.cause == "context and libraries":
        return cause.phases
    return tuple(phase for phase in cause.phases if phase != "idle")


def sent_layout(config: Config) -> WeightLayout:
    """Return the layout of the tensors that an update sends: the model, or only the adapter."""
    return _layout(
        config.model.directory,
        engine_settings(config).dtype,
        config.model.lora,
        config.weights.update_weights_bucket_megabytes,
    )


def base_nbytes(config: Config) -> int:
    """Return the bytes of the whole model in the dtype of the computation."""
    return _layout(config.model.directory, engine_settings(config).dtype, None, None).payload_nbytes


@functools.lru_cache(maxsize=16)
def _layout(directory: Path, dtype: torch.dtype, lora: LoraSettings | None, bucket_mib: int | None) -> WeightLayout:
    base, adapter = saved_weights(described_model(directory, dtype=dtype, lora=lora))
    bucket_nbytes, own_nbytes = bucket_sizes(
        streams=True, bucket_nbytes=None if bucket_mib is None else bucket_mib << 20
    )
    sent: dict[int, torch.Tensor] = {}  # by the storage, so that tied tensors stay tied
    named = []
    for name, tensor in (base if lora is None else adapter).items():
        key = tensor.untyped_storage()._cdata if tensor.untyped_storage().nbytes() == tensor.nbytes else -len(sent)
        sent.setdefault(key, torch.empty(tensor.shape, dtype=dtype, device="meta"))
        named.append((name, sent[key]))
    return WeightLayout.plan(named, bucket_nbytes=bucket_nbytes, own_nbytes=own_nbytes)


@dataclass(frozen=True)
class Link:
    """A link with the bytes that cross it in each update, or only once at the ``start`` of the run.

    ``lanes`` connections share the bytes, each with the full bandwidth.
    """

    name: str
    nbytes: int
    lanes: int = 1
    start: bool = False

    def seconds(self, bandwidth: float) -> float:
        """Return the transfer time if each lane has ``bandwidth`` bytes per second."""
        return self.nbytes / self.lanes / bandwidth


def links_of(config: Config, *, nodes: int, transport: TransportName) -> Iterator[Link]:
    """Yield the links of an update: from the shards to the senders, from these to the workers, and of a LoRA base."""
    nbytes, ranks = sent_layout(config).payload_nbytes, config.train.ranks
    shards = config.train.shard_ranks or ranks
    senders = _senders(config, nodes=nodes, transport=transport)
    if shards > 1:
        yield Link(f"shards of {shards} ranks to {senders} sender(s)", nbytes * (shards - 1) // shards, senders)
    workers = config.rollout.replicas * config.rollout.tensor_parallel
    yield Link(f"{senders} sender(s) to {workers} worker(s), each byte once ({transport})", nbytes, senders)
    if config.model.lora is not None:
        yield Link("the adapter's base to new replicas", base_nbytes(config), senders, start=True)


def _senders(config: Config, *, nodes: int, transport: TransportName) -> int:
    ranks, workers = config.train.ranks, config.rollout.replicas * config.rollout.tensor_parallel
    machines = Machines(["0"] * ranks, ["0" if nodes == 1 else "1"] * workers)
    return choose_senders(
        config.weights.senders, transport=transport, ranks=ranks, machines=machines, own_devices=True
    )[0]
