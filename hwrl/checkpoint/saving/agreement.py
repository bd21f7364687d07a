"""Agreement of several ranks through a key-value store: no collective, so that it may run in the background."""

from __future__ import annotations

import base64
import contextlib
import json
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch.distributed as dist

from hwrl import errors
from hwrl.comm import PrefixStore, Store
from hwrl.comm.store import await_keys, store_failures
from hwrl.errors import CheckpointError, HwrlError

_PIECE_CHARS = 4 << 20
"""Of a value under one key: torch's store ends the connection of whoever sends or asks for 8 MiB at once."""


class Agreement:
    """Rounds in which every rank does its part and the first of them decides; all see the same decision or error.

    Values are JSON of any size. All of ``ranks`` must make the same calls in the same order, from one thread at a time.
    While a rank is in a round, a thread of it lets the others hear of it: however long its part takes, they wait. One
    that has not been heard of for ``timeout_s`` ends the round, on all ranks, with an error that names it; the next
    round is open to it. A part may be rounds of some of the ranks (:meth:`among`), which are heard of meanwhile. Ranks
    that left a call at different points, or did not come to its rounds, are together in the next (:meth:`begin`).
    """

    def __init__(self, store: Store | None, *, rank: int, ranks: Sequence[int], timeout_s: float) -> None:
        self.rank, self.ranks = rank, ranks
        self._store, self._timeout_s = store, timeout_s
        self._call = self._round = 0
        self._inner: list[Agreement] = []

    def begin(self, call: int) -> None:
        """Begin the ``call``-th of the calls that all ranks make, counted from 1; it has rounds of its own."""
        self._call, self._round = call, 0
        for inner in self._inner:
            inner.begin(call)

    @property
    def decides(self) -> bool:
        """Whether this rank is the one that decides."""
        return self.rank == self.ranks[0]

    def among(self, ranks: Sequence[int], *, name: str) -> Agreement:
        """Return rounds of some of the ranks, this one included. ``name`` is theirs alone."""
        store = None if self._store is None or len(ranks) == 1 else PrefixStore(name, self._store)
        self._inner.append(Agreement(store, rank=self.rank, ranks=ranks, timeout_s=self._timeout_s))
        return self._inner[-1]

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
        at = (self._call, self._round)
        store = PrefixStore("round{}.{}".format(*at), self._store)
        self._round += 1
        with self._heard(store), store_failures():
            mine = _attempt(part)
            key = f"part{self.rank}"
            store.set(key, _stow(store, key, mine.to_json(of_rank=self.rank)))
            if hasty and mine.error is not None:
                proposed = mine
            elif self.decides:
                proposed = _attempt(lambda: choose(self._collect(store, at)))
            else:
                proposed = _attempt(lambda: self._await(store, {"chosen": self.ranks[0]}))
            if self.decides or proposed.error is not None:
                chosen = self._propose(store, proposed.to_json(of_rank=self.rank if proposed is mine else None))
            else:
                chosen = _fetch_decision(store, store.get("chosen").decode())
        if mine.error is not None:
            raise mine.error
        if self.decides and proposed.error is not None:
            raise proposed.error
        return _value_of(json.loads(chosen))

    def _propose(self, store: Store, message: str) -> str:
        """Decide for ``message``, unless somebody has decided; return the decision.

        Who gives up on the deciding rank decides instead, and it may wake up: the first decision is everybody's. Each
        lays what it proposes beside it, under its own name.
        """
        mine = f"{self.rank} {_stow(store, f'chosen{self.rank}', message)}"
        decided = store.compare_set("chosen", "", mine).decode()
        return message if decided == mine else _fetch_decision(store, decided)

    def _collect(self, store: Store, at: tuple[int, int]) -> list[Any]:
        keys = {f"part{rank}": rank for rank in self.ranks}
        self._await(store, keys)
        self._forget_before(at)
        return [_value_of(json.loads(_fetch(store, key, store.get(key).decode()))) for key in keys]

    def _forget_before(self, at: tuple[int, int]) -> None:
        """Free what nobody will read again: whoever answered this round has left those before it."""
        assert self._store is not None, "several ranks"
        for key in self._store.list_keys():
            if key.startswith("round") and _round_of(key) < at:
                self._store.delete_key(key)

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


def _round_of(key: str) -> tuple[int, int]:
    call, number = key.partition("/")[0].removeprefix("round").split(".")
    return int(call), int(number)


def _stow(store: Store, name: str, message: str) -> str:
    """Put ``message`` into the store, under names that begin with ``name``, but for what is returned: its beginning."""
    text = base64.b64encode(zlib.compress(message.encode(), 1)).decode()
    pieces = [text[start : start + _PIECE_CHARS] for start in range(0, len(text), _PIECE_CHARS)]
    for number, piece in enumerate(pieces[1:], 1):
        store.set(f"{name}.{number}", piece)
    return f"{len(pieces)} {pieces[0]}"


def _fetch(store: Store, name: str, beginning: str) -> str:
    """Return what was given to :func:`_stow`, which returned ``beginning``."""
    count, _, first = beginning.partition(" ")
    pieces = [first, *(store.get(f"{name}.{number}").decode() for number in range(1, int(count)))]
    return zlib.decompress(base64.b64decode("".join(pieces))).decode()


def _fetch_decision(store: Store, decided: str) -> str:
    rank, _, beginning = decided.partition(" ")
    return _fetch(store, f"chosen{rank}", beginning)


class _Attempt:
    """A value as JSON, or the error that there is instead."""

    def __init__(self, message: str = "", error: Exception | None = None) -> None:
        self._message, self.error = message, error

    def to_json(self, *, of_rank: int | None) -> str:
        """Return it; an error that is rank ``of_rank``'s says so."""
        if self.error is None:
            return self._message
        if isinstance(self.error, HwrlError):
            name, what, why, fix = type(self.error).__name__, self.error.what, self.error.why, self.error.fix
        else:
            name, what, why, fix = "CheckpointError", f"{type(self.error).__name__}: {self.error}", "", ""
        if of_rank is not None and not what.startswith("rank "):  # else it came through a round of some of the ranks
            what = f"rank {of_rank}: {what}"
        return json.dumps({"error": [name, what, why, fix]})


def _attempt(action: Callable[[], Any]) -> _Attempt:
    try:
        return _Attempt(json.dumps({"value": action()}))
    except Exception as exc:  # noqa: BLE001 - the other ranks must hear of every error; it is raised again here
        return _Attempt(error=exc)


def _value_of(message: dict[str, Any]) -> Any:
    if "error" not in message:
        return message["value"]
    name, what, why, fix = message["error"]
    kind: type[HwrlError] = getattr(errors, name, CheckpointError)
    raise kind(what, why=why, fix=fix)
