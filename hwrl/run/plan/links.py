"""The bytes that one update of the weights sends over each link of a run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hwrl.run.cluster.placement import Machines, choose_senders
from hwrl.run.config import Config
from hwrl.run.plan.processes import base_nbytes, sent_layout
from hwrl.weights import TransportName


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
