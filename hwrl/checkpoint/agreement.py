"""Ranks exchange messages and agree over a key-value store: :class:`Agreement`.

No collective is used, so a background save can agree while the training runs collectives.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import threading
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch.distributed as dist

from hwrl import errors
from hwrl.comm import Comm, Group, PrefixStore, Store, await_keys, store_failures
from hwrl.errors import CheckpointError, ConfigError, HwrlError, PeerLostError
from hwrl.interfaces import Backend

_MAX_VALUE_CHARS = 4 << 20
"""The largest value of one key. torch's store closes a connection after a request of 8 MiB or more."""
_LEAVING_S = 3.0
"""How long rank 0, when it closes, waits for the other ranks to read the last decision. They poll every few ms."""


class Round:
    """One exchange of messages: every rank sends one to rank 0, and rank 0 sends one to every rank.

    Messages are JSON values, so no rank executes another rank's pickle. The docstrings here are the contract. The code
    here is trivial, for a single rank. The protocol between several ranks is in :class:`_StoreRound`.
    """

    def tell(self, message: Any) -> None:
        """Send ``message``, once in the round, to the ranks that :meth:`hear` it. After ``gather`` only rank 0 may."""

    def hear(self, ranks: Sequence[int]) -> list[Any]:
        """Block until ``ranks`` have told their messages, and return these. Raise the error of a rank that failed."""
        return []

    def gather(self, message: Any) -> list[Any] | None:
        """Send ``message`` to rank 0. Rank 0 returns all messages by rank; the other ranks return None.

        Rank 0 blocks until every rank has sent its message. It raises the error of the lowest rank that failed.
        """
        return [message]

    def broadcast(self, message: Any) -> Any:
        """Return the message of rank 0 on every rank. The other ranks' is ignored.

        This ends the round. If a rank failed, every rank raises its error.
        """
        return message


class Agreement:
    """Rounds of messages between the ranks from 0 to ``size`` - 1.

    Every rank enters the same rounds in the same order, from one thread at a time. The code of a rank in a round is its
    block. If the block fails on one rank, every rank raises an error when all blocks have ended: the failed rank its
    own error, and the others a copy of the error of the lowest such rank. If it is an error class of
    :mod:`hwrl.errors`, the copy has this class, and its text begins with the rank; otherwise the copy is a
    :class:`~hwrl.errors.CheckpointError`.

    A rank that fails after its last message may fail alone, because the others do not wait for it then. So do nothing
    in a block that can fail after ``broadcast`` or, except on rank 0 and in :meth:`Round.hear`, after ``gather``.

    While a rank is inside a round, it sends heartbeats, and the other ranks in this round wait for it without a limit.
    Outside of a round it sends none. So if a rank enters a round more than ``timeout_s`` after the others, or if it
    dies, its heartbeats are missing. The round then ends on all ranks with an error about this rank. It may take part
    in the next round.

    After an error, ranks may leave a call at different points. They meet again in the first round of the next call, if
    they all enter it within ``timeout_s`` of each other: see :meth:`begin_call`.
    """

    def __init__(self, store: Store | None, *, rank: int, size: int, timeout_s: float) -> None:
        self.rank, self.size = rank, size
        self._store, self._timeout_s = store, timeout_s
        self._call = self._round = 0
        self._last: _StoreRound | None = None

    def begin_call(self, call: int) -> None:
        """Begin the call with the number ``call``, counted from 1.

        All ranks make the same calls in the same order. Rounds are numbered within a call, so a rank that left the last
        call early does not meet the others in a wrong round.
        """
        self._call, self._round = call, 0

    @contextlib.contextmanager
    def round(self) -> Iterator[Round]:
        """Enter a round. At the end of the block, wait until it has ended on all ranks: a vote, with an error as veto.

        This rank also waits if its own block raises before it has sent a message. A block that has called ``broadcast``
        waits for nobody.
        """
        if self._store is None:
            yield Round()
            return
        with self._enter(self._store) as current:
            try:
                yield current
                current.finish()
            except Exception as exc:
                current.fail(exc)
                raise

    def refuse(self, error: BaseException) -> None:
        """Let the next round fail with ``error``, without waiting for the other ranks."""
        if self._store is not None:
            with self._enter(self._store) as current:
                current.veto(error)

    @contextlib.contextmanager
    def _enter(self, store: Store) -> Iterator[_StoreRound]:
        number = self._call, self._round
        self._round += 1
        self._last = _StoreRound(store, number, rank=self.rank, size=self.size, timeout_s=self._timeout_s)
        with self._last.heartbeats(), store_failures():
            yield self._last

    def close(self) -> None:
        """On rank 0, block until all ranks have read the last decision, but for a few seconds at most.

        Rank 0 may host the store, and the store ends with the process.
        """
        if self._last is not None and not self.rank:
            self._last.wait_for_leaving()


class _StoreRound(Round):
    """A round of several ranks. It ends with one decision: rank 0's message to all ranks, or an error.

    Keys in the store: ``told<rank>`` and ``part<rank>`` have a rank's two messages, or its error. ``beat<rank>`` counts
    its heartbeats, and ``left<rank>`` says that it has left the round. ``chosen`` has the decision. Any rank may write
    it, for example if rank 0 falls silent. Only the first write counts, and it is final. Long texts go on in further
    keys, for example ``part0.1`` or ``chosen0.1``.

    If several ranks fail, rank 0 may raise another one of their errors than the decision.
    """

    def __init__(self, store: Store, number: tuple[int, int], *, rank: int, size: int, timeout_s: float) -> None:
        self._all_rounds, self._number = store, number
        self._store = PrefixStore("round{}.{}".format(*number), store)
        self._rank, self._size, self._timeout_s = rank, size, timeout_s
        self._beat_interval_s = min(1.0, timeout_s / 5)
        self._told = self._sent = self._ended = False
        self._heard_s: dict[int, float] = {}
        self._beats: dict[int, int] = {}

    def tell(self, message: Any) -> None:
        self._put("told", _encode(message))
        self._told = True

    def hear(self, ranks: Sequence[int]) -> list[Any]:
        return self._receive("told", ranks)

    def gather(self, message: Any) -> list[Any] | None:
        self._send(_encode(message))
        return None if self._rank else self._receive("part", range(self._size))

    def broadcast(self, message: Any) -> Any:
        if not self._sent:
            self.gather(None)
        return _decode(self._wait_for_decision() if self._rank else self._decide(_encode(message)))

    def finish(self) -> None:
        """Block until every rank has sent its message and rank 0 has decided. Return at once if the round ended."""
        if not self._ended:
            self.broadcast(None)

    def fail(self, error: Exception) -> None:
        """Tell the other ranks that this rank's block raised ``error``, and wait until their blocks have ended."""
        if self._ended:
            return
        report = _encode_error(error, rank=self._rank)
        if not self._told:
            self._put("told", report)
        if self._sent:  # rank 0 failed after its message, or this rank lost the store
            self._decide(_encode_error(error))
            return
        self._send(report)
        if self._rank:
            self._wait_for_decision()
            return
        try:
            self._receive("part", range(self._size))
        except HwrlError as first:  # the error of the lowest rank that failed, or an error about a silent rank
            self._decide(_encode_error(first))

    def veto(self, error: BaseException) -> None:
        """Send ``error`` as both messages of this rank, and propose it as the decision."""
        report = _encode_error(error, rank=self._rank)
        self._put("told", report)
        self._send(report)
        self._decide(report)

    def wait_for_leaving(self) -> None:
        """Block until the other ranks have left. Do not wait long for ranks that are dead."""
        with contextlib.suppress(PeerLostError):
            await_keys(self._store, [f"left{rank}" for rank in range(1, self._size)], timeout_s=_LEAVING_S)

    @contextlib.contextmanager
    def heartbeats(self) -> Iterator[None]:
        """Increase a counter in the store during the block. At its end, note that this rank has left the round.

        The counter tells the other ranks that this rank is alive.
        """
        left = threading.Event()

        def beat() -> None:
            # After an error no more heartbeats are sent. Usually this rank's next request to the store fails, too.
            with contextlib.suppress(dist.DistError):
                while not left.wait(self._beat_interval_s):
                    self._store.add(f"beat{self._rank}", 1)

        thread = threading.Thread(target=beat, name="hwrl-checkpoint-heartbeat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            if self._rank:
                with contextlib.suppress(dist.DistError):
                    self._store.set(f"left{self._rank}", "")
            left.set()
            thread.join()

    def _send(self, text: str) -> None:
        self._put("part", text)
        self._sent = True

    def _put(self, kind: str, text: str) -> None:
        key = f"{kind}{self._rank}"
        self._store.set(key, _put_text(self._store, key, text))

    def _receive(self, kind: str, ranks: Sequence[int]) -> list[Any]:
        """Wait for the messages of ``ranks`` and return them. Raise the error of the first rank that failed."""
        keys = {f"{kind}{rank}": rank for rank in ranks}
        self._wait_for(keys)
        if kind == "part":
            self._delete_earlier_rounds()
        return [_decode(_get_text(self._store, key, self._store.get(key).decode())) for key in keys]

    def _delete_earlier_rounds(self) -> None:
        """Delete the keys of earlier rounds. Every rank has entered this round, so all have left the earlier ones."""
        for key in self._all_rounds.list_keys():
            if key.startswith("round") and _round_number(key) < self._number:
                self._all_rounds.delete_key(key)

    def _decide(self, text: str) -> str:
        """Make ``text`` the decision, unless there already is one. Return the decision.

        If rank 0 falls silent, another rank decides. If rank 0 then wakes up, it finds that decision.
        """
        self._ended = True
        proposal = f"{self._rank} {_put_text(self._store, f'chosen{self._rank}', text)}"
        decided = self._store.compare_set("chosen", "", proposal).decode()
        return text if decided == proposal else self._fetch_decision(decided)

    def _wait_for_decision(self) -> str:
        try:
            self._wait_for({"chosen": 0})
        except CheckpointError as silent:
            return self._decide(_encode_error(silent))
        self._ended = True
        return self._fetch_decision(self._store.get("chosen").decode())

    def _fetch_decision(self, decided: str) -> str:
        rank, _, head = decided.partition(" ")
        return _get_text(self._store, f"chosen{rank}", head)

    def _wait_for(self, keys: Mapping[str, int]) -> None:
        """Block until ``keys`` are in the store. Each belongs to one rank; raise an error if this rank falls silent.

        A rank that was silent in an earlier wait of this round is not waited for again.
        """
        heard_s, beats = self._heard_s, self._beats
        for rank in keys.values():
            heard_s.setdefault(rank, time.monotonic())
        missing = await_keys(self._store, keys, timeout_s=self._beat_interval_s)
        while missing:
            for rank in {keys[key] for key in missing}:
                beat = self._store.add(f"beat{rank}", 0)
                if beat != beats.get(rank, 0):
                    beats[rank], heard_s[rank] = beat, time.monotonic()
            silent = [keys[key] for key in missing if time.monotonic() - heard_s[keys[key]] > self._timeout_s]
            if silent:
                raise CheckpointError(
                    f"no answer from rank {', '.join(map(str, silent))}",
                    why=f"the others have received no heartbeat for {self._timeout_s:g} s",
                    fix="check that rank's log; restart the run if the rank died, or give a longer timeout_s if it was "
                    "late. All ranks open the manager and make its calls; for some of the ranks, give it their group=",
                )
            missing = await_keys(self._store, missing, timeout_s=self._beat_interval_s)


def _round_number(key: str) -> tuple[int, int]:
    call, number = key.partition("/")[0].removeprefix("round").split(".")
    return int(call), int(number)


# -- texts of any size in the store ---------------------------------------------------------------------------------


def _put_text(store: Store, key: str, text: str) -> str:
    """Compress ``text``. Return its head, and put the rest into the store under ``key.1``, ``key.2``, and so on."""
    packed = base64.b64encode(zlib.compress(text.encode(), 1)).decode()
    values = [packed[start : start + _MAX_VALUE_CHARS] for start in range(0, len(packed), _MAX_VALUE_CHARS)]
    for number, value in enumerate(values[1:], 1):
        store.set(f"{key}.{number}", value)
    return f"{len(values)} {values[0]}"


def _get_text(store: Store, key: str, head: str) -> str:
    """Return the text that :func:`_put_text` stored. ``head`` is its result."""
    count, _, first = head.partition(" ")
    values = [first, *(store.get(f"{key}.{number}").decode() for number in range(1, int(count)))]
    return zlib.decompress(base64.b64decode("".join(values))).decode()


# -- messages and errors as JSON ------------------------------------------------------------------------------------


def _encode(message: Any) -> str:
    return json.dumps({"value": message})


def _encode_error(error: BaseException, *, rank: int | None = None) -> str:
    """Return ``error`` as JSON. With ``rank``, the text names the rank on which the error happened.

    Usually this is ``rank``. It is another rank if ``error`` was heard from that one.
    """
    if isinstance(error, HwrlError):
        name, what, why, fix = type(error).__name__, error.what, error.why, error.fix
    else:
        text = f"{type(error).__name__}: {error}" if isinstance(error, Exception) else f"interrupted by {error!r}"
        name, what, why, fix = "CheckpointError", text, "", ""
    if isinstance(error.__cause__, _OtherRankError):  # heard, and the text already names the rank
        rank = error.__cause__.rank
    elif rank is not None:
        what = f"rank {rank}: {what}"
    return json.dumps({"error": [name, what, why, fix], "rank": rank})


def _decode(text: str) -> Any:
    """Return a message. If ``text`` is an encoded error, raise the error."""
    content = json.loads(text)
    if "error" not in content:
        return content["value"]
    name, what, why, fix = content["error"]
    kind: type[HwrlError] = getattr(errors, name, CheckpointError)
    error = kind(what, why=why, fix=fix)
    if content["rank"] is None:
        raise error
    raise error from _OtherRankError(content["rank"])


class _OtherRankError(Exception):
    """The ``__cause__`` of an error that happened on another rank. It has the number of that rank."""

    def __init__(self, rank: int) -> None:
        super().__init__(f"on rank {rank}")
        self.rank = rank


# -- opening --------------------------------------------------------------------------------------------------------


def agreement_of(group: Group | None, backend: Backend, timeout_s: float) -> Agreement:
    """Return the agreement of the ranks of ``group``. None is torch's default group, or this process alone."""
    if not isinstance(group, Group | None):
        raise ConfigError(
            f"group={group!r} is not allowed",
            why="it must be an hwrl.comm.Group, because the ranks agree over its store",
            fix="give hwrl.comm.Comm().default_group(), or .new_group(ranks) for some of the ranks",
        )
    group = _default_group(backend) if group is None else group
    if group is None:
        return Agreement(None, rank=0, size=1, timeout_s=timeout_s)
    # All ranks open their managers in the same order, so the number of this manager is the same on all of them.
    opened = group.store.add(f"hwrl/checkpoint/opened/{group.rank}", 1)
    store = PrefixStore(f"hwrl/checkpoint/{opened}", group.store)
    return Agreement(store, rank=group.rank, size=group.size, timeout_s=timeout_s)


def _default_group(backend: Backend) -> Group | None:
    """Return torch's default group if it has several ranks. Raise ConfigError if several ranks have no group."""
    if dist.is_available() and dist.is_initialized():
        return Comm(backend).default_group() if dist.get_world_size() > 1 else None
    ranks = os.environ.get("WORLD_SIZE", "1")
    if "RANK" in os.environ and ranks.isdecimal() and int(ranks) > 1:
        raise ConfigError(
            f"CheckpointManager needs group= in rank {os.environ['RANK']} of {ranks}",
            why="the environment variables RANK and WORLD_SIZE name several ranks, and torch.distributed is not "
            "initialized: ranks that do not know of each other would write over each other's checkpoints",
            fix="call torch.distributed.init_process_group() first, or give group= an hwrl.comm.Group; a process that "
            "is no rank of a program unsets the two variables",
        )
    return None
