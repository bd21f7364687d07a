"""What of a policy must travel: the whole model, or a base once and then its adapter. :class:`PolicySender` decides."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from hwrl.weights.board import Metadata
from hwrl.weights.report import TransferReport
from hwrl.weights.sender import WeightSender
from hwrl.weights.source import WeightSource

_log = logging.getLogger("hwrl.weights")

POLICY = "policy"
"""The link on which every version travels: whole models, or adapters with the identity of their base."""
POLICY_BASE = "policy-base"
"""The link that a receiver without the base joins, and leaves when it has it. Its versions are bases' identities."""


@dataclass(frozen=True)
class SyncPlan:
    """What travels in one publication, and why."""

    what: Literal["full", "adapter", "base + adapter"]
    why: str

    @property
    def sends_base(self) -> bool:
        """Whether the weights under an adapter travel."""
        return self.what == "base + adapter"

    def __str__(self) -> str:
        return f"{self.what}: {self.why}"


@dataclass(frozen=True)
class SyncReport:
    """What one publication did; ``base`` tells of the base if that travelled by itself.

    ``base_nbytes`` and ``adapter_nbytes`` are the tensors' bytes, once for all receivers, 0 for what did not travel.
    """

    plan: SyncPlan
    policy: TransferReport
    base: TransferReport | None = None
    base_nbytes: int = 0
    adapter_nbytes: int = 0


class PolicySender:
    """Sends versions of a policy, and of an adapter's base only what some receiver lacks.

    ``connect`` makes the sender of a link; called for POLICY and, if the policy is an adapter, for POLICY_BASE.
    ``base`` is the identity of the adapter's base, None if whole models are sent. What a receiver lacks is not
    remembered but asked: it joins POLICY_BASE as long as its engine holds no base, whatever the reason. With
    ``always_base`` the base travels with every version, for comparison. ``metadata`` goes with every version.
    """

    def __init__(
        self,
        connect: Callable[[str], WeightSender],
        *,
        base: int | None = None,
        always_base: bool = False,
        metadata: Metadata | None = None,
    ) -> None:
        self._identity, self._metadata = base, dict(metadata or {})
        self._policy = connect(POLICY)
        self._base = connect(POLICY_BASE) if base is not None and not always_base else None

    def plan(self) -> SyncPlan:
        """Return what has to travel now; cheap."""
        if self._identity is None:
            return SyncPlan("full", "the whole model is trained")
        if self._base is None:
            return SyncPlan("base + adapter", "always_base is set")
        lacking = self._base.joiners()
        if lacking:
            return SyncPlan("base + adapter", f"not held by {', '.join(lacking)}")
        if self._base.transport == "host" and self._base.version is None:
            return SyncPlan("base + adapter", "not in the host's store")
        return SyncPlan("adapter", "every receiver holds the base, or finds it in the host's store")

    def send(self, version: int, *, model: WeightSource, adapter: WeightSource) -> SyncReport:
        """Send what the plan says: the ``model``, which beneath an ``adapter`` is its base, the adapter, or both.

        The base travels first; a receiver that loses it meanwhile has the adapter, and asks for the base again. Blocks
        and raises like :meth:`WeightSender.publish`.
        """
        plan = self.plan()
        if self._identity is None:
            return SyncReport(plan, self._policy.publish(version, model, self._metadata))
        _log.info("version %d: %s", version, plan)
        belongs = {**self._metadata, "base": self._identity}
        if self._base is None:
            whole = self._policy.publish(version, model + adapter, belongs)
            adapter_nbytes = sum(tensor.nbytes for _, tensor in adapter.metadata())
            return SyncReport(plan, whole, None, whole.nbytes - adapter_nbytes, adapter_nbytes)
        base = _send_base(self._base, self._identity, model) if plan.sends_base else None
        sent = self._policy.publish(version, adapter, belongs)
        return SyncReport(plan, sent, base, 0 if base is None else base.nbytes, sent.nbytes)

    def joiners(self) -> tuple[str, ...]:
        """Return the replicas that wait for the newest version; like :meth:`WeightSender.joiners`."""
        return self._policy.joiners()

    def close(self) -> None:
        """End the links."""
        self._policy.close()
        if self._base is not None:
            self._base.close()


def _send_base(sender: WeightSender, identity: int, model: WeightSource) -> TransferReport:
    report = sender.publish(identity, model)
    if not report.excluded:  # one that is silent may still read
        sender.release()  # the next base may never come, and the ring is device memory
    return report
