"""Load received weights into an engine: whole models, or a base model and its adapters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from hwrl.interfaces import RolloutEngine
from hwrl.rollout.model_link import INCARNATION, ModelLink, RetryingReceiver, is_outdated
from hwrl.weights import Received


class WeightUpdater(Protocol):
    """Loads new weights into one engine. Only the engine's thread calls it."""

    incarnation: int
    """The trainer's incarnation of the engine's weights; -1 before the first weights."""

    def poll(self) -> bool:
        """Return whether new weights are offered. Does not block."""
        ...

    def update(self) -> bool:
        """Receive the offered weights and load them; return whether the engine has a new version now.

        Blocks until the transfer ends. After a failed transfer the engine keeps its weights if the link has memory for
        two versions; otherwise it may have none.
        """
        ...

    def release(self) -> None:
        """Free device memory: the engine sleeps. If it dropped a base model, the next version may bring that again."""
        ...

    def request(self) -> None:
        """Request the weights that the engine lacks. Does not wait for them."""
        ...

    def totals(self) -> dict[str, float]:
        """Return running totals of the received weights."""
        ...


class AdapterUpdater:
    """Loads adapters into ``engine``, and their base model whenever the engine lacks it.

    ``connect`` joins the link of adapters, POLICY. ``connect_base`` joins the link of base models, POLICY_BASE; with
    ``newest=False`` it gets later ones only. A replica is its member only while the engine lacks the base. So the
    sender sees from the members whether to send the base, and the link needs no memory at other times. If an adapter
    arrives before its base, it waits for the base.
    """

    def __init__(
        self, engine: RolloutEngine, *, connect: Callable[[], RetryingReceiver], connect_base: Callable[..., ModelLink]
    ) -> None:
        self._engine, self._connect_base = engine, connect_base
        # Join the link of bases first: for the sender, a member of POLICY alone has the base.
        self._base_link: ModelLink | None = connect_base()
        self._policy_link = connect()
        self._adapter: Received | None = None  # the newest; kept, because a new base needs it again
        self._base_loads = self._base_nbytes = 0
        self.incarnation = -1

    def poll(self) -> bool:
        if self._base_link is None and self._lacks_base():
            self.request()
        return (self._base_link is not None and self._base_link.poll()) or self._policy_link.poll()

    def update(self) -> bool:
        # Look again for a base: it is offered before its adapter, but perhaps after the last poll of its link.
        if self._base_link is not None and self._base_link.look():
            if not self._base_link.update():
                return False
            self._base_loads += 1
            self._base_nbytes += self._base_link.nbytes
            self._base_link.close()
            self._base_link = None
        elif self._policy_link.poll():
            adapter = self._policy_link.receive()
            if adapter is None:
                return False
            if is_outdated(adapter, self.incarnation):
                self._adapter = None  # its memory is used again
                return False
            self._adapter = adapter
        loaded = self._load_adapter()
        if not loaded and self._adapter is not None:
            self.request()  # the adapter came alone, and the engine lacks its base
        return loaded

    def release(self) -> None:
        if self._base_link is None and self._lacks_base():
            self._base_link = self._connect_base(newest=False)

    def request(self) -> None:
        if self._base_link is not None:
            self._base_link.request()
        elif self._lacks_base():
            self._base_link = self._connect_base()
        self._policy_link.request()

    def totals(self) -> dict[str, float]:
        received = self._policy_link.nbytes + self._base_nbytes
        return {"received_nbytes": float(received), "base_loads": float(self._base_loads)}

    def _lacks_base(self) -> bool:
        """Return whether the engine holds no base, or not the base of the newest adapter."""
        wanted = self._engine.base if self._adapter is None else self._adapter.metadata["base"]
        return self._engine.base is None or self._engine.base != wanted

    def _load_adapter(self) -> bool:
        """Load the newest adapter; return False if there is none or the engine lacks its base."""
        adapter = self._adapter
        if adapter is None:
            return False
        base = int(adapter.metadata["base"])
        if self._engine.base != base:
            return False
        self._engine.load_adapter(adapter.items(), version=adapter.version, base=base)
        self.incarnation = int(adapter.metadata[INCARNATION])
        return True
