"""Typed notes of a round, beside the messages of its commit: of further chapters, and of co-senders."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from hwrl.weights.control import read_message, write_message


class ChapterKind(StrEnum):
    """What follows a chapter of a version."""

    NEXT = "next"
    """Another chapter."""
    END = "end"
    """Nothing: all tensors were sent."""
    BROKEN_OFF = "broken off"
    """Nothing: the sender has ended the round."""


@dataclass(frozen=True)
class ChapterNote:
    """The sender's note after a chapter; ``layout`` is the next chapter's, as JSON, and empty if there is none."""

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
    """The transfer broke, perhaps by a receiver; another round may succeed."""
    FAILED = "failed"
    """The co-sender raised an error of its own."""


@dataclass(frozen=True)
class ShareReport:
    """A co-sender's report to rank 0 about its share of a round; ``why`` is for people."""

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
    """The keys of the notes between rank 0 and its co-senders; a report's key ends with the number of the share."""

    REPORT = "share"
    STOP = "stop"
    """Its presence ends the round for the co-senders."""
