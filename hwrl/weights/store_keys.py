"""Reads and writes the keys of a store without waiting for them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from hwrl.comm import Store, store_failures
from hwrl.errors import CommError, TransferFailedError

_ABSENT = "\x01"  # never a value: compare_set returns it for a missing key, and then writes nothing


class StoreKeys:
    """The keys of a store. No operation waits until a key exists. Raises PeerLostError if the store is lost.

    Raises CommError in a forked child of the process that made this: both would speak over one connection.
    """

    def __init__(self, store: Store) -> None:
        self._store, self._process = store, os.getpid()

    def require_own_process(self) -> None:
        """Raise CommError in a forked child."""
        if os.getpid() != self._process:
            raise CommError(
                "this end of a weight link belongs to another process",
                why=f"process {self._process} made it, and this is its forked child {os.getpid()}",
                fix="make a sender or receiver in the child, with connect_store(address)",
            )

    @contextlib.contextmanager
    def _using(self) -> Iterator[None]:
        self.require_own_process()
        with store_failures():
            yield

    def add(self, key: str, number: int) -> int:
        """Add ``number`` to the counter ``key``; return the sum. A missing counter is 0."""
        with self._using():
            return self._store.add(key, number)

    def set(self, key: str, value: str) -> None:
        """Write the value."""
        with self._using():
            self._store.set(key, value)

    def get(self, key: str) -> bytes | None:
        """Return the value, or None if the key does not exist. One round trip."""
        with self._using():
            found = self._store.compare_set(key, _ABSENT, _ABSENT)
        return None if found == _ABSENT.encode() else found

    def number(self, key: str) -> int:
        """Return the integer that :meth:`raise_to` wrote, or 0."""
        return _number(key, self.get(key) or b"0")

    def raise_to(self, key: str, number: int) -> None:
        """Set ``key`` to ``number`` unless it has a larger number. Usually one round trip."""
        expected = str(number - 1) if number > 1 else ""
        while True:
            with self._using():
                found = self._store.compare_set(key, expected, str(number)).decode(errors="replace")
            if found == str(number):
                return
            if found == expected:  # or the key is missing: compare_set writes it only if "" is expected
                expected = ""
            elif _number(key, found) > number:
                return
            else:
                expected = found

    def delete(self, key: str) -> None:
        """Delete the key if it exists."""
        with self._using():
            self._store.delete_key(key)


def _number(key: str, found: str | bytes) -> int:
    try:
        return int(found)
    except ValueError as exc:
        raise TransferFailedError(
            "the store is damaged", why=f"{key!r} is not a number but {found[:80]!r}", fix="start the run again"
        ) from exc
