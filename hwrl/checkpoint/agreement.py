"""Agreement of several ranks through a key-value store: no collective, so that it may run in the background."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store

from hwrl import errors
from hwrl.comm import await_keys
from hwrl.errors import CheckpointError, HwrlError


class Agreement:
    """Rounds in which every rank does its part and rank 0 decides; every rank sees the same decision or error.

    Values are JSON. All ranks must call :meth:`decide` in the same order, from one thread at a time. A rank that does
    not answer within ``timeout_s`` ends the round with an error that names it.
    """

    def __init__(self, store: Store | None, *, rank: int, size: int, timeout_s: float) -> None:
        self.rank, self.size = rank, size
        self._store, self._timeout_s = store, timeout_s
        self._round = 0

    def decide(self, part: Callable[[], Any], choose: Callable[[list[Any]], Any]) -> Any:
        """Run ``part`` on every rank, then ``choose`` on rank 0 with the results by rank; return what it returned.

        An error of any rank, or of ``choose``, is raised on all: as it is where it happened, elsewhere with its class
        and text if it is hwrl's, as :class:`~hwrl.errors.CheckpointError` if it is foreign.
        """
        if self._store is None:
            return choose([part()])
        store = PrefixStore(f"round{self._round}", self._store)
        self._round += 1
        mine = _attempt(part)
        store.set(f"part{self.rank}", json.dumps(mine.to_json()))
        if self.rank == 0:
            chosen = _attempt(lambda: choose(self._collect(store)))
            store.set("chosen", json.dumps(chosen.to_json()))
        if mine.error is not None:
            raise mine.error
        if self.rank == 0:
            return chosen.result()
        # Rank 0 may wait for a third rank before it decides.
        self._await(store, ["chosen"], timeout_s=2 * self._timeout_s)
        return _value_of(json.loads(store.get("chosen")))

    def _collect(self, store: Store) -> list[Any]:
        keys = [f"part{rank}" for rank in range(self.size)]
        self._await(store, keys, timeout_s=self._timeout_s)
        texts = [store.get(key) for key in keys]
        self._forget(store, keys)
        return [_value_of(json.loads(text), of_rank=rank) for rank, text in enumerate(texts)]

    def _forget(self, store: Store, parts: list[str]) -> None:
        """Free what nobody will read again: whoever answered this round has read the decision of the last."""
        for key in parts:
            store.delete_key(key)
        assert self._store is not None, "several ranks"
        PrefixStore(f"round{self._round - 2}", self._store).delete_key("chosen")

    def _await(self, store: Store, keys: list[str], *, timeout_s: float) -> None:
        missing = await_keys(store, keys, timeout_s=timeout_s)
        if missing:
            ranks = ", ".join(key.removeprefix("part").replace("chosen", "0") for key in missing)
            raise CheckpointError(
                f"no answer from rank {ranks} of {self.size}",
                why=f"waited for {timeout_s:g} s",
                fix="look at that rank's log; restart the run if it died",
            )


class _Attempt:
    """A value, or the error that there is instead."""

    def __init__(self, value: Any = None, error: Exception | None = None) -> None:
        self.value, self.error = value, error

    def result(self) -> Any:
        if self.error is not None:
            raise self.error
        return self.value

    def to_json(self) -> dict[str, Any]:
        error = self.error
        if error is None:
            return {"value": self.value}
        if isinstance(error, HwrlError):
            return {"error": [type(error).__name__, error.what, error.why, error.fix]}
        return {"error": ["CheckpointError", f"{type(error).__name__}: {error}", "", ""]}


def _attempt(action: Callable[[], Any]) -> _Attempt:
    try:
        return _Attempt(action())
    except Exception as exc:  # noqa: BLE001 - the other ranks must hear of every error; it is raised again here
        return _Attempt(error=exc)


def _value_of(message: dict[str, Any], *, of_rank: int | None = None) -> Any:
    if "error" not in message:
        return message["value"]
    name, what, why, fix = message["error"]
    kind: type[HwrlError] = getattr(errors, name, CheckpointError)
    raise kind(what if of_rank is None else f"rank {of_rank}: {what}", why=why, fix=fix)
