"""Agreement of several ranks through a key-value store: no collective, so that it may run in the background."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from hwrl import errors
from hwrl.errors import CheckpointError, HwrlError
from hwrl.store import await_keys, store_failures


class Agreement:
    """Rounds in which every rank does its part and rank 0 decides; every rank sees the same decision or error.

    Values are JSON. All ranks must call :meth:`decide` in the same order, from one thread at a time. While a rank is in
    a round, a thread of it lets the others hear of it: however long its part takes, they wait. One that has not been
    heard of for ``timeout_s`` ends the round, on all ranks, with an error that names it; the next round is open to it.
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
        with self._heard(store), store_failures():
            mine = _attempt(part)
            store.set(f"part{self.rank}", mine.to_json())
            if self.rank == 0:
                proposed = _attempt(lambda: choose(self._collect(store)))
            else:
                proposed = _attempt(lambda: self._await(store, {"chosen": 0}))
            # Who gives up on rank 0 decides instead of it, and rank 0 may wake up: the first decision is everybody's.
            if self.rank == 0 or proposed.error is not None:
                chosen = store.compare_set("chosen", "", proposed.to_json())
            else:
                chosen = store.get("chosen")
        if mine.error is not None:
            raise mine.error
        if self.rank == 0 and proposed.error is not None:
            raise proposed.error
        return _value_of(json.loads(chosen))

    def _collect(self, store: Store) -> list[Any]:
        keys = {f"part{rank}": rank for rank in range(self.size)}
        self._await(store, keys)
        texts = [store.get(key) for key in keys]
        self._forget(store)
        return [_value_of(json.loads(text), of_rank=rank) for rank, text in enumerate(texts)]

    def _forget(self, store: Store) -> None:
        """Free what nobody will read again: whoever answered this round has read the decision of the last."""
        for rank in range(self.size):
            store.delete_key(f"part{rank}")
        assert self._store is not None, "several ranks"
        past = PrefixStore(f"round{self._round - 2}", self._store)
        for key in ["chosen", *(f"beat{rank}" for rank in range(self.size))]:
            past.delete_key(key)

    @contextlib.contextmanager
    def _heard(self, store: Store) -> Iterator[None]:
        """Count in the store as long as this process lives, so that others can tell slow from dead."""
        left = threading.Event()

        def beat() -> None:
            with contextlib.suppress(dist.DistError):  # then this rank's own next question fails, and says why
                while not left.wait(self._interval_s):
                    store.add(f"beat{self.rank}", 1)

        thread = threading.Thread(target=beat, name="hwrl-checkpoint-heard", daemon=True)
        thread.start()
        try:
            yield
        finally:
            left.set()
            thread.join()

    @property
    def _interval_s(self) -> float:
        return min(1.0, self._timeout_s / 5)

    def _await(self, store: Store, keys: Mapping[str, int]) -> None:
        """Block until ``keys`` are there; raise when one of the ranks that they are due from is not heard of."""
        heard_s = dict.fromkeys(keys.values(), time.monotonic())
        beats: dict[int, int] = {}
        missing = await_keys(store, keys, timeout_s=self._interval_s)
        while missing:
            for rank in {keys[key] for key in missing}:
                beat = store.add(f"beat{rank}", 0)
                if beat != beats.get(rank, 0):
                    beats[rank], heard_s[rank] = beat, time.monotonic()
            silent = [keys[key] for key in missing if time.monotonic() - heard_s[keys[key]] > self._timeout_s]
            if silent:
                raise _silent(silent, self.size, self._timeout_s)
            missing = await_keys(store, missing, timeout_s=self._interval_s)


def _silent(ranks: list[int], size: int, timeout_s: float) -> CheckpointError:
    return CheckpointError(
        f"no answer from rank {', '.join(map(str, ranks))} of {size}",
        why=f"not heard of for {timeout_s:g} s",
        fix="look at that rank's log; restart the run if it died",
    )


class _Attempt:
    """A value, or the error that there is instead."""

    def __init__(self, value: Any = None, error: Exception | None = None) -> None:
        self.value, self.error = value, error

    def to_json(self) -> str:
        error = self.error
        if error is None:
            return json.dumps({"value": self.value})
        if isinstance(error, HwrlError):
            return json.dumps({"error": [type(error).__name__, error.what, error.why, error.fix]})
        return json.dumps({"error": ["CheckpointError", f"{type(error).__name__}: {error}", "", ""]})


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
