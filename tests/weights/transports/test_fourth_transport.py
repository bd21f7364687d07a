"""A fourth transport is one new file and one line: nothing else knows the names. The kit checks what it carries."""

from __future__ import annotations

import functools
import importlib.util
import sys
import time
from pathlib import Path
from typing import Any, cast

import pytest

from hwrl.cli import main
from hwrl.comm import Store, store_address
from hwrl.errors import CommError, ConfigError
from hwrl.interfaces import WeightOffer
from hwrl.run.cluster.placement import choose_senders
from hwrl.testing.contracts.weights import need_transport
from hwrl.weights import TRANSPORTS, EngineReceiver, LinkRegistrations, ReceiverRound, SenderRound, Transport
from hwrl.weights.control import Note
from hwrl.weights.destination import DoubleBuffer
from hwrl.weights.membership import Membership
from hwrl.weights.transport import Cancellation
from hwrl_cpu import INFO, CpuBackend
from tests.support.weight_link import (
    beside,
    channel_of,
    exchange,
    model_of,
    newest_proposal,
    receiver_of,
    sender_of,
    store,
)

__all__ = ["store"]  # the fixture

FOURTH = "wire"


@pytest.fixture
def wire(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Transport:
    """The transport in the file that `hwrl new-transport` writes."""
    assert main(["new-transport", FOURTH, "--into", str(tmp_path)]) == 0
    (path,) = tmp_path.rglob("transport.py")
    spec = importlib.util.spec_from_file_location("fourth_transport", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "fourth_transport", module)  # its dataclass looks for its module
    spec.loader.exec_module(module)
    transport: Transport = module.TRANSPORT
    return transport


@pytest.fixture
def fourth(wire: Transport, monkeypatch: pytest.MonkeyPatch) -> None:
    """That transport, and its line in the table."""
    monkeypatch.setitem(TRANSPORTS, FOURTH, wire)


def test_an_engines_receiver_uses_a_transport_outside_the_table(store: Store, wire: Transport) -> None:
    backend, transports = CpuBackend(INFO), {**TRANSPORTS, FOURTH: wire}
    engine = {"backend": backend, "make_destination": functools.partial(DoubleBuffer, backend=backend)}
    registrations = LinkRegistrations(store, name="policy", replicas=["r0"], transports=transports)
    with sender_of(store, transport=FOURTH, transports=transports) as sender:
        publishing = beside(lambda: sender.publish(1, model_of(1)))
        deadline = time.monotonic() + 300.0
        proposal = registrations.wait(deadline=deadline, timeout_s=300.0, aborted=None, have=None)
        assert registrations.rendezvous(proposal)
        offer = WeightOffer(
            store=store_address(cast(Any, store)),
            link="policy",
            proposal=proposal.number,
            version=1,
            members=registrations.members_of(proposal),
            timeout_s=300.0,
            limit_s=990.0,
        )
        receiver = EngineReceiver(0, **engine, transports=transports)  # type: ignore[arg-type]  # of several types
        assert receiver.take(offer).version == 1
        assert publishing().receivers == 1
        ignorant = EngineReceiver(0, **engine)  # type: ignore[arg-type]  # of several types
        assert "transports=hwrl.weights.with_transport('wire')" in ignorant.take(offer).why
        receiver.close()
        ignorant.close()


def test_keys_of_a_transport_are_never_those_of_hwrl_or_of_a_receiver(store: Store) -> None:
    with sender_of(store) as sender, receiver_of(store) as receiver:
        exchange(sender, [receiver], 1)
        channel, proposal = channel_of(store), newest_proposal(store)
        sending = SenderRound(proposal, channel, Membership(channel))
        receiving = ReceiverRound(
            proposal=proposal,
            channel=channel,
            member=proposal.to[0],
            replica="r0",
            cancellation=Cancellation(),
        )
        for key in ("share/1", f"read/{proposal.to[0]}"):
            sending.tell(key, "the transport's")
            assert receiving.find_note(key) == b"the transport's"
        assert channel.read(proposal, Note.SHARE, name="share/1") is None
        with pytest.raises(CommError, match="before it wrote 'read'"):
            sending.wait_for_all("read", timeout_s=0.1)


def test_a_fourth_transport_is_known_by_its_facts(store: Store, fourth: None) -> None:
    need_transport(CpuBackend(INFO), FOURTH)  # skips nothing: the transport needs no capability
    with pytest.raises(ConfigError, match=rf"(?s)senders=2.*{FOURTH}.*work with: device"):
        sender_of(store, transport=FOURTH, senders=2)
    with pytest.raises(ConfigError, match=rf"weights travel by {FOURTH}"):
        choose_senders(2, transport=FOURTH, ranks=2, machines=None, own_devices=True)


def test_only_the_table_and_the_choice_name_the_transports() -> None:
    core = Path(sys.modules["hwrl"].__file__ or "").parent
    compared = [
        f"{path.relative_to(core)}: {line.strip()}"
        for path in core.rglob("*.py")
        for line in path.read_text().splitlines()
        if "transport" in line and any(f'{sign} "{name}"' in line for name in TRANSPORTS for sign in ("==", "!="))
    ]
    assert not compared, "ask a fact of the Transport"
