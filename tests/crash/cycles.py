"""Kill and resume again and again with rollouts in flight: at the end every prompt has been trained once.

The weights are a count for each prompt: the restored weights themselves tell the prompts of their training.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from hwrl.checkpoint import CheckpointManager
from hwrl.rollout.ledger import PromptLease, PromptLedger
from hwrl_cpu import INFO, CpuBackend
from tests.crash.disk import KINDS, Fault, WatchedDisk
from tests.support.finished_groups import finished

BATCH, STALENESS, SAVE_EVERY = 4, 2, 2
STEPS_PER_CYCLE = 20  # more than one life can do: every life is cut short


@dataclass(frozen=True)
class Tally:
    """The result of a run: the number of kills, and the prompts that were skipped or trained more than once."""

    kills: int
    trained: int
    skipped: list[int]
    twice: list[int]


def run_cycles(home: Path, *, cycles: int, seed: int) -> Tally:
    """Kill a run ``cycles`` times, each at a moment of its own or at a change of its disk; then let it end."""
    chance, steps, kills = random.Random(seed), cycles * STEPS_PER_CYCLE, 0
    for cycle in range(cycles):
        fault = Fault(chance.choice(KINDS[:2]), chance.randrange(150)) if chance.random() < 0.5 else None
        turn, disk = chance.randrange(20, 200), WatchedDisk(home)
        status = _in_child(lambda: _train(home, steps, disk, seed=cycle, fault=fault, die_at=turn))  # noqa: B023 - now
        assert status in (0, -signal.SIGKILL), status
        kills += status != 0
    assert _in_child(lambda: _train(home, steps, WatchedDisk(home), seed=cycles, fault=None, die_at=None)) == 0
    counts = torch.zeros(steps * BATCH)
    with CheckpointManager(home, backend=CpuBackend(INFO)) as manager:
        resumed = manager.resume({"trained": counts})
    assert resumed is not None and resumed.step == steps
    return Tally(kills, len(counts), (counts == 0).nonzero()[:, 0].tolist(), (counts > 1).nonzero()[:, 0].tolist())


def _in_child(run: Callable[[], None]) -> int:
    if (child := os.fork()) == 0:
        status = 1
        try:
            run()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _train(home: Path, steps: int, disk: WatchedDisk, *, seed: int, fault: Fault | None, die_at: int | None) -> None:
    """Train to the end; or to the death, at the fault or at turn ``die_at``."""
    chance, counts, step = random.Random(seed), torch.zeros(steps * BATCH), 0
    ledger = PromptLedger(groups_per_version=BATCH, max_staleness=STALENESS, total_groups=steps * BATCH)
    if fault is not None:
        disk.enter()
    with CheckpointManager(home, max_ckpt_to_keep=1, async_save=True, backend=CpuBackend(INFO)) as manager:
        resumed = manager.resume({"trained": counts})
        if resumed is not None:
            step = resumed.step
            ledger.load_state_dict(resumed.extra["ledger"], incarnation=seed)
            assert resumed.info.weight_version == step and int(counts.sum()) == step * BATCH
        ledger.advance(step)
        disk.arm(fault)
        running: list[PromptLease] = []
        for turn in itertools.count():
            if step == steps:
                break
            if turn == die_at:
                os.kill(os.getpid(), signal.SIGKILL)
            _roll_out(ledger, running, chance, turn)
            groups = ledger.take(BATCH)
            if groups is None:
                continue
            for group in groups:
                counts[group.sequence_number] += 1
            step += 1
            if step % SAVE_EVERY == 0 or step == steps:
                extra = {"ledger": ledger.state_dict()}
                manager.save(step, {"trained": counts}, weight_version=step, extra=extra)
            ledger.advance(step)


def _roll_out(ledger: PromptLedger, running: list[PromptLease], chance: random.Random, turn: int) -> None:
    if chance.random() < 0.5:
        running += ledger.lease(chance.randint(1, 6), replica=chance.choice("ab"), now_s=turn)
    elif running:
        lease = running.pop(chance.randrange(len(running)))
        ledger.complete(finished(lease, versions=[lease.version, ledger.version]))
