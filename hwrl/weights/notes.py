"""Typed notes of a round, in addition to the messages of its commit: about chapters, and of co-senders."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from hwrl.weights.messages import read_message, write_message


class ChapterKind(StrEnum):
    """What follows a chapter of a version."""

    NEXT = "next"
    """Another chapter."""
    END = "end"
    """No chapter follows, because all tensors were sent."""
    ABORTED = "aborted"
    """No chapter follows, because the sender has aborted the round."""


@dataclass(frozen=True)
class ChapterNote:
    """The sender's note after a chapter. ``layout`` is the layout of the next chapter as JSON, or empty."""

    kind: ChapterKind
    layout: str = ""

    def to_json(self) -> str:
        """Return the note as text."""
        return write_message(self.kind, self.layout)

    @classmethod
    def read(cls, text: bytes) -> ChapterNote:
        """Read a note; raises TransferFailedError if it is malformed."""
        return cls(*read_message("a note about a chapter", text, ChapterKind))


class ShareKind(StrEnum):
    """How a co-sender's part of a round ended."""

    SENT = "sent"
    LOST = "lost"
    """The transfer broke, perhaps because of a receiver. Another round may succeed."""
    FAILED = "failed"
    """The co-sender itself raised an error."""


@dataclass(frozen=True)
class ShareReport:
    """A co-sender's report to rank 0 about its share of a round; ``why`` is a human-readable reason."""

    kind: ShareKind
    why: str = ""

    def to_json(self) -> str:
        """Return the report as text."""
        return write_message(self.kind, self.why)

    @classmethod
    def read(cls, text: bytes) -> ShareReport:
        """Read a report; raises TransferFailedError if it is malformed."""
        return cls(*read_message("a co-sender's report", text, ShareKind))


class ShareKey(StrEnum):
    """The keys of the notes between rank 0 and its co-senders. The key of a report ends with the share's number."""

    REPORT = "share"
    CHANGED = "changed"
    """How many checksums of a share differ from the version before; empty if there is none. Also with the number."""
    STOP = "stop"
    """Rank 0 writes it to end the round for the co-senders; its text does not matter."""
