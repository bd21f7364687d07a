"""A fourth transport is one new file and one line: nothing else in hwrl knows the names of transports."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hwrl.cli import main
from hwrl.comm import Store
from hwrl.errors import ConfigError
from hwrl.run.cluster.placement import choose_senders
from hwrl.testing.contracts.weights import need_transport
from hwrl.weights import TRANSPORTS
from hwrl_cpu import INFO, CpuBackend
from tests.support.weight_link import beside, exchange, receiver_of, sender_of, store

__all__ = ["store"]  # the fixture

FOURTH = "wire"


@pytest.fixture
def fourth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file that `hwrl new-transport` writes, and its line in the table."""
    assert main(["new-transport", FOURTH, "--into", str(tmp_path)]) == 0
    (path,) = tmp_path.rglob("transport.py")
    spec = importlib.util.spec_from_file_location("fourth_transport", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "fourth_transport", module)  # its dataclass looks for its module
    spec.loader.exec_module(module)
    monkeypatch.setitem(TRANSPORTS, FOURTH, module.TRANSPORT)


def test_a_fourth_transport_carries_versions(store: Store, fourth: None) -> None:
    with sender_of(store, transport=FOURTH) as sender, receiver_of(store) as receiver:
        for version in (1, 2):
            assert exchange(sender, [receiver], version).receivers == 1


def test_a_fourth_transport_carries_a_generator_in_chapters(store: Store, fourth: None) -> None:
    def made() -> Iterator[tuple[str, torch.Tensor]]:
        for number in range(9):
            yield f"t{number}", torch.full((500,), float(number))

    with sender_of(store, transport=FOURTH, slab_nbytes=1024, slabs=1) as sender, receiver_of(store) as receiver:
        waiting = beside(lambda: receiver.receive(timeout_s=60.0))
        assert sender.publish(1, made()).receivers == 1
        received = waiting()
        assert [tensor[0].item() for tensor in received.values()] == list(range(9))


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
