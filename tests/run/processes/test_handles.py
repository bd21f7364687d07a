"""The handles of the actors: each method is a method of its actor, with the same parameters."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

from hwrl.run.processes.actors import LedgerActor, RolloutActor, TrainActor
from hwrl.run.processes.handles import ActorHandle, LedgerHandle, ReplicaHandle, TrainerHandle


def methods(kind: type) -> dict[str, list[tuple[str, object]]]:
    """Return the public methods of a class, each with the names and kinds of its parameters."""
    return {
        name: [(parameter.name, parameter.kind) for parameter in inspect.signature(method).parameters.values()]
        for name, method in inspect.getmembers(kind, inspect.isfunction)
        if not name.startswith("_")
    }


@pytest.mark.parametrize(
    ("handle", "actor"), [(TrainerHandle, TrainActor), (ReplicaHandle, RolloutActor), (LedgerHandle, LedgerActor)]
)
def test_a_handle_has_the_methods_of_its_actor(handle: type[ActorHandle], actor: type) -> None:
    offered = methods(handle)
    del offered["kill"], offered["pid"]  # Ray's, not the actor's
    assert offered == methods(actor)


def test_a_process_that_receives_a_handle_has_not_imported_torch() -> None:
    """A process chooses its backend before it imports torch; its arguments are unpickled before that."""
    code = "import sys, hwrl.run.processes.handles; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
