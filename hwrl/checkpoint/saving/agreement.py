"""Agreement of ranks over a key-value store. It uses no collective, so a background save may agree too."""

from __future__ import annotations

import base64
import contextlib
import json
import threading
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import torch.distributed as dist

from hwrl import errors
from hwrl.comm import PrefixStore, Store, await_keys, store_failures
from hwrl.errors import CheckpointError, HwrlError, PeerLostError

_CHUNK_CHARS = 4 << 20
"""Limit for one key. torch's store closes a connection after a request of 8 MiB or more."""
_LEAVING_S = 3.0
"""How long the leader's end waits for ranks to read the last decision. They look for it every few milliseconds."""


@dataclass(frozen=True)
class Message:
    """Base of the messages between ranks. They travel as JSON: no rank executes another rank's pickle.

    A message is a frozen dataclass. Its fields are JSON values or other messages.
    """

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Self:
        """Return the message with these fields. A class with a message among its fields overrides this."""
        return cls(**fields)


_M = TypeVar("_M", bound=Message)


@dataclass(frozen=True)
class _Done(Message):
    """A rank has done its part and has nothing to report."""


class Round:
    """One exchange of messages: every rank sends one to the leader, and the leader sends one to all.

    This class serves a single rank; :class:`_StoreRound` serves several.
    """

    def gather(self, message: _M) -> list[_M] | None:
        """Send ``message`` to the leader. Return all messages there, in the order of the ranks, and None elsewhere.

        The leader blocks until every rank has sent its message. It raises the error of the first failed rank.
        """
        return [message]

    def broadcast(self, message: _M | None, kind: type[_M]) -> _M:
        """Return the leader's ``message``, of class ``kind``, on every rank. The other ranks pass None.

        This ends the round. If a rank failed, all ranks raise its error.
        """
        assert message is not None, "a single rank leads"
        return message

    def finish(self) -> None:
        """Block until every rank has done its part, unless the leader has broadcast already."""

    def fail(self, error: Exception, *, at_once: bool) -> None:
        """Tell the other ranks about ``error`` in this rank's part.

        With ``at_once`` this ends the round on all ranks; without it, this rank waits until all have done their part.
        """


class Agreement:
    """Rounds of messages between ``ranks``. The first of them leads.

    All ranks hold the same rounds in the same order, each from one thread at a time. An error in one rank's part of a
    round is raised on all ranks: unchanged on the rank where it happened; elsewhere with its class and text if it is
    hwrl's, and as :class:`~hwrl.errors.CheckpointError` if it is not.

    A rank in a round sends heartbeats, so the others wait as long as its part takes. A rank without a heartbeat for
    ``timeout_s`` ends the round on all ranks, with an error about that rank. It may take part in the next round.

    Ranks may leave a call at different points. They are together again in the next call: see :meth:`begin_call`.
    """

    def __init__(self, store: Store | None, *, rank: int, ranks: Sequence[int], timeout_s: float) -> None:
        self.rank, self.ranks = rank, ranks
        self._store, self._timeout_s = store, timeout_s
        self._call = self._round = 0
        self._subgroups: list[Agreement] = []
        self._last: _StoreRound | None = None

    def begin_call(self, call: int) -> None:
        """Begin call number ``call``, counted from 1. All ranks make the same calls; each has its own rounds."""
        self._call, self._round = call, 0
        for subgroup in self._subgroups:
            subgroup.begin_call(call)

    @property
    def leads(self) -> bool:
        """Whether this rank is the leader."""
        return self.rank == self.ranks[0]

    def among(self, ranks: Sequence[int], *, name: str) -> Agreement:
        """Return the agreement of some of the ranks, this one included. No other group of ranks has this ``name``.

        Its rounds may be held inside of a round of all ranks.
        """
        store = None if self._store is None or len(ranks) == 1 else PrefixStore(name, self._store)
        self._subgroups.append(Agreement(store, rank=self.rank, ranks=ranks, timeout_s=self._timeout_s))
        return self._subgroups[-1]

    @contextlib.contextmanager
    def round(self) -> Iterator[Round]:
        """Hold a round. The block is this rank's part; leaving it waits for the other ranks.

        After an error, too, this rank waits until all ranks have done their part.
        """
        with self._hold_round(fail_at_once=False) as current:
            yield current

    @contextlib.contextmanager
    def vote(self) -> Iterator[None]:
        """Do the block on every rank. Leaving it waits until the block has succeeded on all ranks.

        An error is a veto: it ends the vote on all ranks, and its own rank waits for nobody.
        """
        with self._hold_round(fail_at_once=True):
            yield

    @contextlib.contextmanager
    def _hold_round(self, *, fail_at_once: bool) -> Iterator[Round]:
        if self._store is None:
            yield Round()
            return
        number = self._call, self._round
        self._round += 1
        current = _StoreRound(self._store, number, rank=self.rank, ranks=self.ranks, timeout_s=self._timeout_s)
        self._last = current
        with current.heartbeats(), store_failures():
            try:
                yield current
                current.finish()
            except Exception as exc:
                current.fail(exc, at_once=fail_at_once)
                raise
            finally:
                current.leave()

    def close(self) -> None:
        """Block on the leader, seconds at most, until all ranks know the last decision: the store may end with it."""
        if self._last is not None:
            self._last.wait_for_leaving()


class _StoreRound(Round):
    """One round of several ranks. The first decision in the store is final, whoever wrote it.

    Keys: ``part<rank>`` is a rank's message or error, ``beat<rank>`` counts its heartbeats, and ``chosen`` is the
    decision: the leader's message, or an error. If the leader falls silent, another rank writes an error there.
    """

    def __init__(
        self, store: Store, number: tuple[int, int], *, rank: int, ranks: Sequence[int], timeout_s: float
    ) -> None:
        self._all_rounds, self._number = store, number
        self._store = PrefixStore("round{}.{}".format(*number), store)
        self._rank, self._ranks, self._timeout_s = rank, ranks, timeout_s
        self._beat_interval_s = min(1.0, timeout_s / 5)
        self._sent = self._ended = False

    @property
    def _leads(self) -> bool:
        return self._rank == self._ranks[0]

    def gather(self, message: _M) -> list[_M] | None:
        self._send(_encode(message))
        return [type(message).from_json(fields) for fields in self._collect()] if self._leads else None

    def broadcast(self, message: _M | None, kind: type[_M]) -> _M:
        if not self._sent:
            self.gather(_Done())
        if self._leads:
            assert message is not None, "the leader has a message for all"
            decision = self._decide(_encode(message))
        else:
            decision = self._wait_for_decision()
        return kind.from_json(_decode(decision))

    def finish(self) -> None:
        if not self._ended:
            self.broadcast(_Done(), _Done)

    def fail(self, error: Exception, *, at_once: bool) -> None:
        if self._ended:
            return
        if self._sent:  # the error came up while the leader collected or decided
            self._decide(_encode_error(error))
            return
        report = _encode_error(error, rank=self._rank)
        self._send(report)
        if at_once:
            self._decide(report)
        elif not self._leads:
            self._wait_for_decision()
        else:
            try:
                self._collect()
            except HwrlError as first:  # this rank's own error, or a silent rank
                self._decide(_encode_error(first))

    def leave(self) -> None:
        """Tell the leader that this rank knows the decision, or has given up."""
        if not self._leads:
            with contextlib.suppress(dist.DistError):
                self._store.set(f"left{self._rank}", "")

    def wait_for_leaving(self) -> None:
        """Block on the leader until the other ranks have left; not for ranks that are dead."""
        if self._leads:
            with contextlib.suppress(PeerLostError):
                await_keys(self._store, [f"left{rank}" for rank in self._ranks[1:]], timeout_s=_LEAVING_S)

    @contextlib.contextmanager
    def heartbeats(self) -> Iterator[None]:
        """Count in the store while this process lives, to show the other ranks a slow rank from a dead one."""
        left = threading.Event()

        def beat() -> None:
            with contextlib.suppress(dist.DistError):  # this rank's next request fails too, and explains why
                while not left.wait(self._beat_interval_s):
                    self._store.add(f"beat{self._rank}", 1)

        thread = threading.Thread(target=beat, name="hwrl-checkpoint-heartbeat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            left.set()
            thread.join()

    def _send(self, text: str) -> None:
        key = f"part{self._rank}"
        self._store.set(key, _put_chunks(self._store, key, text))
        self._sent = True

    def _collect(self) -> list[dict[str, Any]]:
        """Wait for the messages of all ranks; return their fields. Raise the error of the first failed rank."""
        keys = {f"part{rank}": rank for rank in self._ranks}
        self._wait_for(keys)
        self._delete_earlier_rounds()
        return [_decode(_get_chunks(self._store, key, self._store.get(key).decode())) for key in keys]

    def _delete_earlier_rounds(self) -> None:
        """Free the keys of earlier rounds. Every rank has answered this round, so it has left those."""
        for key in self._all_rounds.list_keys():
            if key.startswith("round") and _round_number(key) < self._number:
                self._all_rounds.delete_key(key)

    def _decide(self, text: str) -> str:
        """Make ``text`` the decision, unless there is one; return the decision.

        If the leader falls silent, another rank decides instead. The leader may wake up: the first decision counts.
        """
        self._ended = True
        proposal = f"{self._rank} {_put_chunks(self._store, f'chosen{self._rank}', text)}"
        decided = self._store.compare_set("chosen", "", proposal).decode()
        return text if decided == proposal else self._fetch_decision(decided)

    def _wait_for_decision(self) -> str:
        try:
            self._wait_for({"chosen": self._ranks[0]})
        except CheckpointError as silent:
            return self._decide(_encode_error(silent))
        self._ended = True
        return self._fetch_decision(self._store.get("chosen").decode())

    def _fetch_decision(self, decided: str) -> str:
        rank, _, head = decided.partition(" ")
        return _get_chunks(self._store, f"chosen{rank}", head)

    def _wait_for(self, keys: Mapping[str, int]) -> None:
        """Block until ``keys`` are in the store. Each is due from one rank; raise if the rank falls silent."""
        heard_s = dict.fromkeys(keys.values(), time.monotonic())
        beats: dict[int, int] = {}
        missing = await_keys(self._store, keys, timeout_s=self._beat_interval_s)
        while missing:
            for rank in {keys[key] for key in missing}:
                beat = self._store.add(f"beat{rank}", 0)
                if beat != beats.get(rank, 0):
                    beats[rank], heard_s[rank] = beat, time.monotonic()
            silent = [keys[key] for key in missing if time.monotonic() - heard_s[keys[key]] > self._timeout_s]
            if silent:
                raise _silent_error(silent, self._timeout_s)
            missing = await_keys(self._store, missing, timeout_s=self._beat_interval_s)


def _silent_error(ranks: list[int], timeout_s: float) -> CheckpointError:
    return CheckpointError(
        f"no answer from rank {', '.join(map(str, ranks))}",
        why=f"not heard of for {timeout_s:g} s",
        fix="look at that rank's log; restart the run if it died",
    )


def _round_number(key: str) -> tuple[int, int]:
    call, number = key.partition("/")[0].removeprefix("round").split(".")
    return int(call), int(number)


# -- texts of any size in the store ---------------------------------------------------------------------------------


def _put_chunks(store: Store, name: str, text: str) -> str:
    """Put all but the head of ``text`` into the store, under names beginning with ``name``; return the head."""
    packed = base64.b64encode(zlib.compress(text.encode(), 1)).decode()
    chunks = [packed[start : start + _CHUNK_CHARS] for start in range(0, len(packed), _CHUNK_CHARS)]
    for number, chunk in enumerate(chunks[1:], 1):
        store.set(f"{name}.{number}", chunk)
    return f"{len(chunks)} {chunks[0]}"


def _get_chunks(store: Store, name: str, head: str) -> str:
    """Return the text from :func:`_put_chunks`, by its head."""
    count, _, first = head.partition(" ")
    chunks = [first, *(store.get(f"{name}.{number}").decode() for number in range(1, int(count)))]
    return zlib.decompress(base64.b64decode("".join(chunks))).decode()


# -- messages and errors as JSON ------------------------------------------------------------------------------------


def _encode(message: Message) -> str:
    return json.dumps({"value": message}, default=vars)


def _encode_error(error: Exception, *, rank: int | None = None) -> str:
    """Return ``error`` as JSON. With ``rank``, the text names the rank where it happened: this one, or another."""
    if isinstance(error, HwrlError):
        name, what, why, fix = type(error).__name__, error.what, error.why, error.fix
    else:
        name, what, why, fix = "CheckpointError", f"{type(error).__name__}: {error}", "", ""
    if isinstance(error.__cause__, _OtherRankError):  # from a round of some ranks: the text names that rank already
        rank = error.__cause__.rank
    elif rank is not None:
        what = f"rank {rank}: {what}"
    return json.dumps({"error": [name, what, why, fix], "rank": rank})


def _decode(text: str) -> dict[str, Any]:
    """Return the fields of a message; raise the error if one arrived instead."""
    content = json.loads(text)
    if "error" not in content:
        fields: dict[str, Any] = content["value"]
        return fields
    name, what, why, fix = content["error"]
    kind: type[HwrlError] = getattr(errors, name, CheckpointError)
    error = kind(what, why=why, fix=fix)
    if content["rank"] is None:
        raise error
    raise error from _OtherRankError(content["rank"])


class _OtherRankError(Exception):
    """The cause of an error that happened on another rank."""

    def __init__(self, rank: int) -> None:
        super().__init__(f"on rank {rank}")
        self.rank = rank
