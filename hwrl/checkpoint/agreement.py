"""Agreement of several ranks through a key-value store: no collective, so that it may run in the background."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from hwrl import errors
from hwrl.errors import CheckpointError, HwrlError
from hwrl.store import await_keys, store_failures


class Agreement:
    """Rounds in which every rank does its part and the first of them decides; all see the same decision or error.

    Values are JSON. All of ``ranks`` must make the same calls in the same order, from one thread at a time. While a
    rank is in a round, a thread of it lets the others hear of it: however long its part takes, they wait. One that has
    not been heard of for ``timeout_s`` ends the round, on all ranks, with an error that names it; the next round is
    open to it. A part may be rounds of some of the ranks (:meth:`among`), which are heard of meanwhile.
    """

    def __init__(self, store: Store | None, *, rank: int, ranks: Sequence[int], timeout_s: float) -> None:
        self.rank, self.ranks = rank, ranks
        self._store, self._timeout_s = store, timeout_s
        self._round = 0

    @property
    def decides(self) -> bool:
        """Whether this rank is the one that decides."""
        return self.rank == self.ranks[0]

    def among(self, ranks: Sequence[int], *, name: str) -> Agreement:
        """Return rounds of some of the ranks, this one included. ``name`` is theirs alone."""
        store = None if self._store is None else PrefixStore(name, self._store)
        return Agreement(store, rank=self.rank, ranks=ranks, timeout_s=self._timeout_s)

    def decide(self, part: Callable[[], Any], choose: Callable[[list[Any]], Any]) -> Any:
        """Run ``part`` on every rank, then ``choose`` on the first with the results in order; return what it returned.

        An error of any rank, or of ``choose``, is raised on all when all have done their part: as it is where it
        happened, elsewhere with its class and text if it is hwrl's, as :class:`~hwrl.errors.CheckpointError` if it is
        foreign.
        """
        return self._hold_round(part, choose, hasty=False)

    def vote(self, part: Callable[[], Any]) -> None:
        """Run ``part`` on every rank; return when it succeeded on all of them.

        An error is raised on all, as by :meth:`decide`, but the rank that has it waits for nobody.
        """
        self._hold_round(part, lambda parts: None, hasty=True)

    def _hold_round(self, part: Callable[[], Any], choose: Callable[[list[Any]], Any], *, hasty: bool) -> Any:
        if self._store is None:
            return choose([part()])
        store = PrefixStore(f"round{self._round}", self._store)
        self._round += 1
        with self._heard(store), store_failures():
            mine = _attempt(part)
            store.set(f"part{self.rank}", mine.to_json(of_rank=self.rank))
            if hasty and mine.error is not None:
                proposed = mine
            elif self.decides:
                proposed = _attempt(lambda: choose(self._collect(store)))
            else:
                proposed = _attempt(lambda: self._await(store, {"chosen": self.ranks[0]}))
            # Who gives up on the deciding rank decides instead, and it may wake up: the first decision is everybody's.
            if self.decides or proposed.error is not None:
                chosen = store.compare_set(
                    "chosen", "", proposed.to_json(of_rank=self.rank if proposed is mine else None)
                )
            else:
                chosen = store.get("chosen")
        if mine.error is not None:
            raise mine.error
        if self.decides and proposed.error is not None:
            raise proposed.error
        return _value_of(json.loads(chosen))

    def _collect(self, store: Store) -> list[Any]:
        keys = {f"part{rank}": rank for rank in self.ranks}
        self._await(store, keys)
        self._forget_past()
        return [_value_of(json.loads(store.get(key))) for key in keys]

    def _forget_past(self) -> None:
        """Free what nobody will read again: whoever answered this round has read the decision of the last."""
        assert self._store is not None, "several ranks"
        past = PrefixStore(f"round{self._round - 2}", self._store)
        for key in ["chosen", *(f"{kind}{rank}" for rank in self.ranks for kind in ("part", "beat"))]:
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
                raise _silent(silent, self._timeout_s)
            missing = await_keys(store, missing, timeout_s=self._interval_s)


def _silent(ranks: list[int], timeout_s: float) -> CheckpointError:
    return CheckpointError(
        f"no answer from rank {', '.join(map(str, ranks))}",
        why=f"not heard of for {timeout_s:g} s",
        fix="look at that rank's log; restart the run if it died",
    )


class _Attempt:
    """A value, or the error that there is instead."""

    def __init__(self, value: Any = None, error: Exception | None = None) -> None:
        self.value, self.error = value, error

    def to_json(self, *, of_rank: int | None) -> str:
        """Return it as JSON; an error that is rank ``of_rank``'s says so."""
        if self.error is None:
            return json.dumps({"value": self.value})
        if isinstance(self.error, HwrlError):
            name, what, why, fix = type(self.error).__name__, self.error.what, self.error.why, self.error.fix
        else:
            name, what, why, fix = "CheckpointError", f"{type(self.error).__name__}: {self.error}", "", ""
        if of_rank is not None and not what.startswith("rank "):  # else it came through a round of some of the ranks
            what = f"rank {of_rank}: {what}"
        return json.dumps({"error": [name, what, why, fix]})


def _attempt(action: Callable[[], Any]) -> _Attempt:
    try:
        return _Attempt(action())
    except Exception as exc:  # noqa: BLE001 - the other ranks must hear of every error; it is raised again here
        return _Attempt(error=exc)


def _value_of(message: dict[str, Any]) -> Any:
    if "error" not in message:
        return message["value"]
    name, what, why, fix = message["error"]
    kind: type[HwrlError] = getattr(errors, name, CheckpointError)
    raise kind(what, why=why, fix=fix)
