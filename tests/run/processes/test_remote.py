"""The proxy of an actor: the module that a process receives it with, and the tables of what methods allocate."""

from __future__ import annotations

import subprocess
import sys

import pytest

from hwrl.run.replica import Replica
from hwrl.run.trainer import TrainerRank


@pytest.mark.parametrize("kind", [TrainerRank, Replica])
def test_what_is_allocated_is_said_of_methods_that_exist(kind: type[TrainerRank | Replica]) -> None:
    assert [name for name in kind.ALLOCATES if not callable(getattr(kind, name, None))] == []


def test_a_process_that_receives_a_proxy_has_not_imported_torch() -> None:
    """A process chooses its backend before it imports torch; its arguments are unpickled before that."""
    code = "import sys, hwrl.run.remote, hwrl.run.ledger; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_driver_does_not_import_transformers() -> None:
    code = "import sys, hwrl.run.loop; sys.exit('transformers' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
