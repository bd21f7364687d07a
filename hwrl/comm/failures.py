"""Translate exceptions of torch and of collective libraries into hwrl's errors."""

from __future__ import annotations

from collections.abc import Sequence

from hwrl.errors import CommError, CommTimeoutError, PeerLostError, first_line

_LOST_PEER = ("connection closed", "connection reset", "broken pipe", "remote process", "refused")
"""Parts of collective libraries' messages about a lost connection."""


def missing_ranks(operation: str, ranks: Sequence[int], *, size: int, timeout_s: float) -> CommTimeoutError:
    """Return the error for an ``operation`` with ``ranks`` missing."""
    return CommTimeoutError(
        operation,
        why=f"of {size} ranks, these did not come within {timeout_s:g} s: {', '.join(map(str, ranks))}",
        fix="look at those processes' logs",
    )


def translated(exc: Exception, operation: str, *, timeout_s: float | None = None) -> CommError:
    """Return torch's ``exc`` from ``operation`` as an error of hwrl: a timeout, a lost peer, or another failure."""
    text = str(exc).lower()
    if "timed out" in text or "timeout" in text:
        limit = "" if timeout_s is None else f" within {timeout_s:g} s"
        return CommTimeoutError(
            f"{operation} did not finish{limit}", why=first_line(exc), fix="look at the other ranks' logs"
        )
    if any(part in text for part in _LOST_PEER):
        return PeerLostError(
            f"{operation} lost a peer", why=first_line(exc), fix="rebuild() the group with the survivors"
        )
    return CommError(f"{operation} failed", why=first_line(exc), fix="look at the cause below")
