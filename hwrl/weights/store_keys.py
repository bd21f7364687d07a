"""Reads and writes the keys of a store without waiting for them."""

from __future__ import annotations

from hwrl.comm import Store, store_failures
from hwrl.errors import TransferFailedError

_ABSENT = "\x01"  # never a value: compare_set returns it for a missing key, and then writes nothing


class StoreKeys:
    """The keys of a store. No operation waits until a key exists. Raises PeerLostError if the store is lost."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def add(self, key: str, number: int) -> int:
        """Add ``number`` to the counter ``key``; return the sum. A missing counter is 0."""
        with store_failures():
            return self._store.add(key, number)

    def set(self, key: str, value: str) -> None:
        """Write the value."""
        with store_failures():
            self._store.set(key, value)

    def get(self, key: str) -> bytes | None:
        """Return the value, or None if the key does not exist. One round trip."""
        with store_failures():
            found = self._store.compare_set(key, _ABSENT, _ABSENT)
        return None if found == _ABSENT.encode() else found

    def number(self, key: str) -> int:
        """Return the integer that :meth:`raise_to` wrote, or 0."""
        return _number(key, self.get(key) or b"0")

    def raise_to(self, key: str, number: int) -> None:
        """Set ``key`` to ``number`` unless it has a larger number. Usually one round trip."""
        expected = str(number - 1) if number > 1 else ""
        while True:
            with store_failures():
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
        with store_failures():
            self._store.delete_key(key)


def _number(key: str, found: str | bytes) -> int:
    try:
        return int(found)
    except ValueError as exc:
        raise TransferFailedError(
            "the store is damaged", why=f"{key!r} is not a number but {found[:80]!r}", fix="start the run again"
        ) from exc
