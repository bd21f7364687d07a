"""Sends a policy: whole models, or a base model once and then its adapters."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from hwrl.weights.messages import Metadata
from hwrl.weights.ranks import on_rank_0
from hwrl.weights.report import TransferReport
from hwrl.weights.sender import WeightSender
from hwrl.weights.source import WeightSource

_log = logging.getLogger("hwrl.weights")

POLICY = "policy"
"""The name of the link of all versions: whole models, or adapters with the identity of their base."""
POLICY_BASE = "policy-base"
"""The name of the link of bases. A receiver is on it only while it lacks the base. Versions are base identities."""


@dataclass(frozen=True)
class SyncPlan:
    """What is sent with one version, and why."""

    what: Literal["full", "adapter", "base + adapter"]
    why: str

    def __str__(self) -> str:
        return f"{self.what}: {self.why}"


@dataclass(frozen=True)
class SyncReport:
    """How one version was sent. ``base`` is the report of the base, if that was sent on its own link."""

    plan: SyncPlan
    policy: TransferReport
    base: TransferReport | None = None


class PolicySender:
    """Sends the versions of a policy, and the base of an adapter only to receivers without it.

    ``connect`` makes the sender of a link, for POLICY and, with an adapter, for POLICY_BASE. If these senders have a
    group, make and call this alike on every rank of it. ``base`` is the identity
    of the adapter's base; None means that whole models are sent. The receivers decide who gets a base: whenever an
    engine holds none, its receiver joins POLICY_BASE. This sender keeps no list of its own. ``metadata`` is sent with
    every version.
    """

    def __init__(
        self,
        connect: Callable[[str], WeightSender],
        *,
        base: int | None = None,
        metadata: Metadata | None = None,
    ) -> None:
        self._base_identity, self._metadata = base, dict(metadata or {})
        self._policy_sender = connect(POLICY)
        self._base_sender = connect(POLICY_BASE) if base is not None else None

    def plan(self) -> SyncPlan:
        """Return what would be sent with a version now. Cheap."""
        base = self._base_sender
        if base is None:
            return SyncPlan("full", "the whole model is trained")
        lacking = on_rank_0(base.group, "find who lacks the base", lambda: list(base.new_receivers()))
        if lacking:
            return SyncPlan("base + adapter", f"no base at {', '.join(lacking)}")
        if base.keeps_versions and base.version is None:
            return SyncPlan("base + adapter", "the host's store does not have the base yet")
        return SyncPlan("adapter", "every receiver holds the base, or finds it in the host's store")

    def send(self, version: int, *, model: WeightSource, adapter: WeightSource) -> SyncReport:
        """Send ``model`` (the base of an ``adapter``), the adapter, or both, as planned.

        The base is sent first. A receiver that loses the base after that gets the adapter, and joins POLICY_BASE again.
        Blocks and raises like :meth:`WeightSender.publish`.
        """
        plan = self.plan()
        if self._base_sender is None or self._base_identity is None:
            return SyncReport(plan, self._policy_sender.publish(version, model, self._metadata))
        _log.info("version %d: %s", version, plan)
        metadata = {**self._metadata, "base": self._base_identity}
        base = None
        if plan.what == "base + adapter":
            base = self._base_sender.publish(self._base_identity, model)
            if not base.excluded:  # an excluded receiver that is silent may still read the ring
                self._base_sender.release()  # the next base may never come, and the ring is device memory
        sent = self._policy_sender.publish(version, adapter, metadata)
        return SyncReport(plan, sent, base)

    def new_receivers(self) -> tuple[str, ...]:
        """Return the new receivers of POLICY; see :meth:`WeightSender.new_receivers`."""
        return self._policy_sender.new_receivers()

    def close(self) -> None:
        """Close the links."""
        self._policy_sender.close()
        if self._base_sender is not None:
            self._base_sender.close()
