"""The typed messages of a link: what was written is read, and what is malformed is refused."""

import json
from dataclasses import asdict
from typing import Any

import pytest

from hwrl.errors import TransferFailedError
from hwrl.weights import TRANSPORTS
from hwrl.weights.messages import Decision, Proposal, Vote
from hwrl.weights.ranks import ShareReport

_PROPOSAL: dict[str, Any] = {
    "number": 1,
    "epoch": 1,
    "version": 1,
    "transport": "device",
    "layout_hash": "",
    "to": [1, 2],
    "timeout_s": 60.0,
    "last_stored_number": 0,
    "metadata": {"step": 1, "note": "x", "loss": 0.5},
    "payload": {"group": "1.1", "lanes": 1},
    "senders": 1,
}


def test_a_proposal_is_read_as_it_was_written() -> None:
    proposal = Proposal.read(json.dumps(_PROPOSAL).encode(), TRANSPORTS)
    assert json.loads(json.dumps(asdict(proposal))) == _PROPOSAL
    assert isinstance(proposal.payload, TRANSPORTS["device"].payload)


_WRONG: list[dict[str, Any]] = [
    {"version": "x"},
    {"to": [1, "2"]},
    {"to": 1},
    {"timeout_s": 0},
    {"timeout_s": float("nan")},
    {"timeout_s": 10**400},
    {"timeout_s": 1e300},
    {"metadata": {"step": [1]}},
    {"transport": ["device"]},
    {"payload": {"group": "1.1"}},
    {"payload": {"group": "1.1", "lanes": "1"}},
    {"payload": []},
    {"more": 1},
]
_UNREADABLE = [b"", b"[]", b"{}", b'{"number":1}', b"\xff", b"[" * 100_000]


@pytest.mark.parametrize("text", [*_UNREADABLE, *(json.dumps({**_PROPOSAL, **wrong}).encode() for wrong in _WRONG)])
def test_an_unreadable_proposal_is_refused(text: bytes) -> None:
    with pytest.raises(TransferFailedError, match="a proposal cannot be read"):
        Proposal.read(text, TRANSPORTS)


def test_a_proposal_of_an_unknown_transport_says_how_to_know_it() -> None:
    text = json.dumps({**_PROPOSAL, "transport": "carrier pigeon"}).encode()
    with pytest.raises(TransferFailedError, match=r"(?s)'carrier pigeon'.*transports=.*with_transport\('carrier pi"):
        Proposal.read(text, TRANSPORTS)


@pytest.mark.parametrize("text", [b"", b"whole", b"[]", b'["whole"]', b'["good", ""]', b"\xff", b"[" * 100_000])
@pytest.mark.parametrize(
    ("message", "name"),
    [(Vote, "a vote"), (Decision, "a decision"), (ShareReport, "a sending rank's report")],
)
def test_unreadable_messages_are_refused(message: Any, name: str, text: bytes) -> None:
    with pytest.raises(TransferFailedError, match=f"{name} cannot be read"):
        message.read(text)
