"""One rollout replica: a rollouter with its evaluation prompts."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, ClassVar

from hwrl.discovery import get_backend
from hwrl.run.ledger import LedgerActor, ReplicaLedger
from hwrl.run.remote import ProcessSetup, Remote

if TYPE_CHECKING:
    from hwrl.rollout import Evaluation


class Replica:
    """One rollout replica, which first waits for weights. Call ``run``: it blocks until ``leave`` or ``stop``.

    ``name`` is the replica's, and its replacement gets the same name. ``replica_id`` is unique to this process.
    """

    ALLOCATES: ClassVar[dict[str, str]] = {"__init__": "the rollout engine", "run": "generating responses"}

    def __init__(
        self, setup: ProcessSetup, *, name: str, replica_id: str, seed: int, ledger: Remote[LedgerActor]
    ) -> None:
        from hwrl.run import build  # it imports transformers, and the driver imports this module

        self._stop, self._device = threading.Event(), get_backend().current_index()
        is_first = replica_id.endswith("#0")  # of the run: one process checks all prompts
        tokenizer = build.run_tokenizer(setup.config, setup.inputs)
        self._evaluation_prompts = build.evaluation_prompts(setup.config, setup.inputs, tokenizer, check=is_first)
        self._rollouter = build.build_rollouter(
            setup.config,
            inputs=setup.inputs,
            replica=name,
            seed=seed,
            store_address=setup.store_address,
            ledger=ReplicaLedger(ledger, replica_id=replica_id),
            tokenizer=tokenizer,
            check_prompts=is_first,
        )  # last, because it joins the weight link: from then on a sender waits for `run`

    @property
    def turn_s(self) -> float:
        """The seconds that the rollouter has spent in its current turn. Any thread may ask."""
        return self._rollouter.step_s()

    def run(self) -> None:
        """Roll out until :meth:`stop`, or until all leased prompts are finished after :meth:`leave`."""
        get_backend().set_device(self._device)  # it is set per thread, and this object was made in another one
        self._rollouter.run(self._stop)

    def evaluate(self, part: int, parts: int, *, alone: bool) -> Evaluation | None:
        """Evaluate on part number ``part`` of ``parts`` equal parts of the prompts. Blocks until the part is scored.

        Uses the weights that the engine has, and newer ones that arrive meanwhile. ``alone``: no training goes on.
        Returns None if the part is empty.
        """
        prompts = [prompts[row] for prompts, row in self._evaluation_prompts[part::parts]]
        return self._rollouter.evaluate(prompts, alone=alone).result() if prompts else None

    def leave(self) -> None:
        """Make :meth:`run` return when all leased prompts are finished. Takes no more leases."""
        self._rollouter.leave()

    def stop(self) -> None:
        """Make :meth:`run` return after its current turn. Unfinished prompts are lost."""
        self._stop.set()
