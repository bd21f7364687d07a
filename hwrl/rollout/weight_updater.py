"""Load received weights into an engine: whole models, or a base and its adapters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from hwrl.interfaces import RolloutEngine
from hwrl.lora import is_adapters
from hwrl.rollout.model_link import INCARNATION, ModelLink, RetryingReceiver, is_outdated
from hwrl.weights import Received


class WeightUpdater(Protocol):
    """Loads new weights into one engine. Only the engine's thread calls it."""

    incarnation: int
    """The trainer's incarnation that published the engine's weights; -1 before the first."""

    def poll(self) -> bool:
        """Return whether new weights are offered. Does not block."""
        ...

    def update(self) -> bool:
        """Receive the offered weights and load them. Return whether the engine now has a new version.

        Blocks until the transfer ends. After a failed transfer the engine keeps its weights if there is room for two
        versions; otherwise it may have none.
        """
        ...

    def release(self) -> None:
        """Free device memory, because the engine sleeps. The next version may bring the weights that it dropped."""
        ...

    def request(self) -> None:
        """Request the weights that the engine lacks. Does not wait for them."""
        ...

    def totals(self) -> dict[str, float]:
        """Return running totals of the received weights."""
        ...


class ModelUpdater:
    """Brings whole models from ``link`` into its engine."""

    def __init__(self, link: ModelLink) -> None:
        self._link = link
        self.incarnation = -1

    def poll(self) -> bool:
        return self._link.poll()

    def update(self) -> bool:
        loaded = self._link.load(incarnation=self.incarnation)
        if loaded is None:
            return False
        self.incarnation = int(loaded.metadata[INCARNATION])
        return True

    def release(self) -> None:
        self._link.release()

    def request(self) -> None:
        self._link.join()

    def totals(self) -> dict[str, float]:
        return {"received_nbytes": float(self._link.nbytes)}


class ConnectBase(Protocol):
    """Joins the link of bases. Without ``newest`` it gets later bases only."""

    def __call__(self, *, newest: bool = True) -> ModelLink: ...


class AdapterUpdater:
    """Loads adapters into ``engine``, and their base whenever the engine lacks it.

    ``connect`` joins the link of adapters, POLICY, and ``connect_base`` the link of bases, POLICY_BASE. The link for
    the base is joined only while the engine lacks its base. So the sender knows from its members whether to send the
    base, and the link's memory is free the rest of the time. An adapter that arrives before its base waits for it.
    """

    def __init__(
        self, engine: RolloutEngine, *, connect: Callable[[], RetryingReceiver], connect_base: ConnectBase
    ) -> None:
        self._engine, self._connect_base = engine, connect_base
        # First the base's link: the sender takes a member of POLICY alone for one that holds the base.
        self._base_link: ModelLink | None = connect_base()
        self._policy_link = connect()
        self._adapter: Received | None = None  # the newest one; loaded again after its base was loaded again
        self._base_loads = self._base_nbytes = 0
        self.incarnation = -1

    def poll(self) -> bool:
        if self._base_link is None and self._lacks_base():
            self.request()
        return (self._base_link is not None and self._base_link.poll()) or self._policy_link.poll()

    def update(self) -> bool:
        # The base is offered before its adapter. The last poll may have looked for it before both came.
        if self._base_link is not None and self._base_link.look():
            base = self._base_link.load(incarnation=self.incarnation)
            if base is None:
                return False
            self._note_base()
            self._base_nbytes += base.nbytes
        elif self._policy_link.poll():
            adapter = self._policy_link.receive()
            if adapter is None:
                return False
            if is_outdated(adapter, self.incarnation):
                self._adapter = None  # the receiver reuses its memory
                return False
            self._adapter = adapter
        loaded = self._load_adapter()
        if not loaded and self._adapter is not None:
            self.request()  # the sender sent the adapter alone, and the engine lacks its base
        return loaded

    def release(self) -> None:
        if self._base_link is None and self._lacks_base():
            self._base_link = self._connect_base(newest=False)

    def request(self) -> None:
        if self._base_link is not None:
            self._base_link.join()
        elif self._lacks_base():
            self._base_link = self._connect_base()
        self._policy_link.join()

    def totals(self) -> dict[str, float]:
        received = self._policy_link.nbytes + self._base_nbytes
        return {"received_nbytes": float(received), "base_loads": float(self._base_loads)}

    def _lacks_base(self) -> bool:
        """Return whether the engine holds no base, or not the base of the newest adapter."""
        wanted = self._engine.base if self._adapter is None else self._adapter.metadata["base"]
        return self._engine.base is None or self._engine.base != wanted

    def _note_base(self) -> None:
        """Count a base that is now in the engine, and leave the link of bases."""
        self._base_loads += 1
        if self._base_link is not None:
            self._base_link.close()
            self._base_link = None

    def _load_adapter(self) -> bool:
        """Load the newest adapter, and its base if both arrived together; return False if that is not possible yet."""
        adapter = self._adapter
        if adapter is None:
            return False
        base = int(adapter.metadata["base"])
        base_weights = {name: adapter[name] for name in adapter if not is_adapters(name)}
        if base_weights:
            self._engine.load_base(base_weights.items(), base=base)
            self._note_base()
        if self._engine.base != base:
            return False
        weights = {name: adapter[name] for name in adapter if name not in base_weights}
        self._engine.load_adapter(weights.items(), version=adapter.version, base=base)
        self.incarnation = int(adapter.metadata[INCARNATION])
        return True
