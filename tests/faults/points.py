"""The points of the sweep, as data: fault, victim, phase, and the permitted ends of the run."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from tests.faults.acts import (
    Act,
    DisturbMachine,
    Edit,
    Freeze,
    Limit,
    Lose,
    Protect,
    Replace,
    Send,
    Starve,
    TerminateGroup,
)
from tests.support.speed import slow

HEARTBEAT_S = slow(8)
HELPERS = ("env-agent", "agent")
"""Processes of Ray that a run hardly needs. Its raylet starts them; hwrl lets Ray start no others."""
LIMIT_S, SLOW_LIMIT_S = slow(300.0), slow(400.0)
"""Time limits for a run with a fault. The second is for a death that only Ray notices, or for several limits. A run
needs 20 s on an idle machine, 120 s until it is ready on a busy one; one that hangs is noticed by its silence.
"""
BUSY_LIMIT_S = slow(1200.0)
"""For a point that is about no limit: it may run beside anything."""
WORDS_OF_PHASES = {"starting": "starting Ray", "building": "building "}
"""Phases with a log line of the run. The others have gates."""


@dataclass(frozen=True)
class Injection:
    """Faults to inject when a process enters ``phase`` for the ``nth`` time."""

    phase: str
    nth: int
    acts: tuple[Act, ...]


@dataclass(frozen=True)
class Point:
    """One run, its faults, and its permitted ``ends``: done, error, interrupted, killed.

    ``words`` are settings; ``reward`` names a function in ``rewards.py``. ``steps`` is the number of training steps.
    If the point ``saves``, the run saves all finished steps at its end. In a point that ``evaluates``, an evaluation of
    1,000 prompts begins in the middle, and training keeps at least 0.7 of its speed beside it.
    """

    name: str
    ends: frozenset[str]
    injections: tuple[Injection, ...] = ()
    words: tuple[str, ...] = ()
    reward: str = "plain"
    limit_s: float = LIMIT_S
    steps: int = 6
    saves: bool = False
    evaluates: bool = False

    @property
    def is_quick(self) -> bool:
        """Whether the point does not depend on Ray to notice a death."""
        return self.limit_s < SLOW_LIMIT_S

    @property
    def filters(self) -> bool:
        """Whether prompts are filtered and skipped."""
        return self.reward == "teaches_some"

    @property
    def of_machine(self) -> bool:
        """Whether its fault needs more than signals and files: a library loaded first, or a control group."""
        return bool(self.labels & {"clock", "slow-disk", "out-of-memory"})

    @property
    def lives(self) -> int:
        """The number of runs it needs: an unfinished one is continued."""
        return 1 if "done" in self.ends else 2

    @property
    def labels(self) -> frozenset[str]:
        """Its kinds of faults and its victims."""
        acts = [act for injection in self.injections for act in injection.acts]
        kinds = {"finished-work"} if self.saves or self.evaluates else set()
        kinds |= {"filter" if self.filters else "reward"} if self.reward != "plain" else set()
        victims = {"helper" if act.victim in HELPERS else act.victim for act in acts}
        return frozenset(kinds | {act.kind for act in acts} | victims)


def at(phase: str, *acts: Act, nth: int = 1) -> Injection:
    return Injection(phase, nth, acts)


def point(
    name: str,
    ends: str,
    *injections: Injection,
    words: tuple[str, ...] = (),
    reward: str = "plain",
    limit_s: float = LIMIT_S,
) -> Point:
    return Point(name, frozenset(ends.split()), injections, words, reward, limit_s)


TWO_RANKS = ("train.ranks=2",)
HOST = ("weights.bypass_cpu=false",)
BACKGROUND = ("checkpoint.async_save=true",)
UNSAVED = ("checkpoint.save_every_steps=0",)
PATIENT = (f"timeouts.start_s={slow(600)}", f"timeouts.heartbeat_s={slow(60)}", f"timeouts.trainer_s={slow(1200)}")
"""For a point that is about no limit."""
FILTER = ("algorithm.filter_groups=true", "rollout.on_failure=skip", "rollout.max_attempts=1")
"""Prompts are filtered, and skipped; the reward ``teaches_some`` gives reasons for both."""
WORKFLOW = ("rollout.workflow=tests.faults.workflow:factory", "rollout.max_model_len=24")
"""Samples of two turns, with a tool between them."""
GOES_BACK = at("stepping", Send("KILL", "trainer"), nth=4)
"""The trainer then goes back to step 2."""
JUDGED = 7
"""A call of the reward function in the middle of training."""


def _kills_of_driver() -> list[Point]:
    driver, everything = Send("KILL", "driver"), Send("KILL", "everything")
    return [
        point("kill-driver-starting", "killed", at("starting", driver)),
        point("kill-driver-building", "killed", at("building", driver)),
        point("kill-driver-judging", "killed", at("judging", driver, nth=JUDGED)),
        point("kill-driver-stepped", "killed", at("stepped", driver, nth=3)),
        point("kill-driver-publishing", "killed", at("publishing", driver, nth=5), words=HOST),
        point("kill-driver-saving", "killed", at("saving", driver, nth=4)),
        point("kill-driver-committing", "killed", at("committing", driver, nth=2)),
        point("kill-driver-evaluating-finally", "killed", at("evaluating-finally", driver)),
        point("kill-driver-closing", "killed", at("closing", driver)),
        point("kill-driver-resuming", "killed", GOES_BACK, at("resuming", driver)),
        point("kill-everything-building", "killed", at("building", everything)),
        point("kill-everything-saving", "killed", at("saving", everything, nth=4)),
        point("kill-everything-publishing", "killed", at("publishing", everything, nth=5), words=HOST),
    ]


def _kills_of_workers() -> list[Point]:
    trainer, replica, ledger = Send("KILL", "trainer"), Send("KILL", "replica"), Send("KILL", "ledger")
    one_rank = Send("KILL", "trainer", at_most=1)
    return [
        point("kill-trainer-setting-up", "done", at("setting-up-trainer", trainer)),
        point("kill-trainer-judging", "done", at("judging", trainer, nth=JUDGED)),
        point("kill-trainer-stepping", "done", at("stepping", trainer, nth=4)),
        point("kill-trainer-stepped", "done", at("stepped", trainer, nth=4)),
        point("kill-trainer-publishing", "done", at("publishing", trainer, nth=5)),
        point("kill-trainer-publishing-host", "done", at("publishing", trainer, nth=5), words=HOST),
        point("kill-trainer-receiving", "done", at("receiving", trainer, nth=5)),
        point("kill-trainer-saving", "done", at("saving", trainer, nth=5)),
        point("kill-trainer-committing", "done", at("committing", trainer, nth=2)),
        point("kill-trainer-saving-background", "done", at("saving", trainer, nth=4), words=BACKGROUND),
        point("kill-trainer-evaluating", "done", at("evaluating", trainer)),
        point("kill-trainer-evaluating-finally", "done", at("evaluating-finally", trainer)),
        point("kill-trainer-exporting", "done", at("exporting", trainer)),
        point("kill-trainer-closing", "done", at("closing", trainer)),
        point("kill-trainer-unsaved", "done", at("stepping", trainer, nth=4), words=UNSAVED),
        point("kill-trainer-resuming", "done", GOES_BACK, at("resuming", trainer)),
        point("kill-rank-setting-up", "done", at("setting-up-trainer", one_rank), words=TWO_RANKS),
        point("kill-rank-stepping", "done", at("stepping", one_rank, nth=4), words=TWO_RANKS),
        point("kill-rank-saving", "done", at("saving", one_rank, nth=4), words=TWO_RANKS),
        point("kill-replica-setting-up", "done", at("setting-up-replica", replica)),
        point("kill-replica-judging", "done", at("judging", replica, nth=JUDGED)),
        point("kill-replica-publishing", "done", at("publishing", replica, nth=5)),
        point("kill-replica-receiving", "done", at("receiving", replica, nth=5)),
        point("kill-replica-saving", "done", at("saving", replica, nth=4)),
        point("kill-replica-evaluating", "done", at("evaluating", replica)),
        point("kill-replica-evaluating-finally", "done", at("evaluating-finally", replica)),
        point("kill-replica-resuming", "done", GOES_BACK, at("resuming", replica)),
        point("kill-replica-exporting", "done", at("exporting", replica)),
        point("kill-ledger-judging", "error", at("judging", ledger, nth=JUDGED)),
        point("kill-ledger-saving", "error", at("saving", ledger, nth=4)),
        point("kill-ledger-resuming", "error", GOES_BACK, at("resuming", ledger)),
    ]


def _signals() -> list[Point]:
    def to(name: str, victim: str, phase: str, ends: str, *, nth: int = 1) -> Point:
        return point(f"{name.lower()}-{victim}-{phase}", ends, at(phase, Send(name, victim), nth=nth))

    term, once_more = Send("TERM", "driver"), Send("INT", "driver")
    return [
        to("TERM", "driver", "starting", "interrupted"),
        to("TERM", "driver", "building", "interrupted"),
        to("TERM", "driver", "judging", "interrupted", nth=JUDGED),
        to("TERM", "driver", "saving", "interrupted", nth=4),
        to("TERM", "driver", "evaluating-finally", "interrupted done"),
        to("TERM", "driver", "closing", "interrupted done"),
        point("term-driver-resuming", "interrupted", GOES_BACK, at("resuming", term)),
        point("term-group-judging", "interrupted", at("judging", TerminateGroup(), nth=JUDGED)),
        point(
            "term-then-int-driver",
            "interrupted",
            at("judging", term, nth=JUDGED),
            at("saving", once_more),
            words=UNSAVED,
        ),
        to("TERM", "trainer", "stepping", "done", nth=4),
        to("TERM", "trainer", "saving", "done", nth=4),
        to("TERM", "replica", "judging", "done", nth=JUDGED),
        to("TERM", "replica", "evaluating-finally", "done"),
        to("TERM", "ledger", "judging", "error", nth=JUDGED),
        to("INT", "driver", "setting-up-trainer", "interrupted"),
        to("INT", "driver", "judging", "interrupted", nth=JUDGED),
        to("INT", "driver", "committing", "interrupted", nth=2),
        to("INT", "trainer", "stepping", "done error", nth=4),
        to("INT", "replica", "judging", "done error", nth=JUDGED),
        to("INT", "ledger", "judging", "done error", nth=JUDGED),
        to("HUP", "driver", "judging", "interrupted", nth=JUDGED),
        to("HUP", "trainer", "stepping", "done", nth=4),
        to("HUP", "replica", "judging", "done", nth=JUDGED),
    ]


def _freezes() -> list[Point]:
    def of(victim: str, phase: str, ends: str, *, for_s: float | None, name: str, nth: int = 1) -> Point:
        return point(f"{name}-{victim}-{phase}", ends, at(phase, Freeze(victim, for_s), nth=nth))

    points = [
        of(victim, phase, "done", for_s=3.0, name="pause", nth=nth)
        for victim, phase, nth in [
            ("driver", "judging", JUDGED),
            ("trainer", "stepping", 4),
            ("replica", "judging", JUDGED),
            ("replica", "receiving", 5),
            ("ledger", "judging", JUDGED),
            ("raylet", "judging", JUDGED),
            ("gcs", "judging", JUDGED),
            ("raylet", "building", 1),
        ]
    ]
    points += [
        of("trainer", "saving", "done", for_s=1.5 * HEARTBEAT_S, name="long-pause", nth=4),
        of("replica", "judging", "done", for_s=1.5 * HEARTBEAT_S, name="long-pause", nth=JUDGED),
        of("ledger", "judging", "done error", for_s=1.5 * HEARTBEAT_S, name="long-pause", nth=JUDGED),
        of("trainer", "setting-up-trainer", "done", for_s=None, name="freeze"),
        of("trainer", "stepping", "done", for_s=None, name="freeze", nth=4),
        of("trainer", "saving", "done", for_s=None, name="freeze", nth=4),
        of("trainer", "closing", "done", for_s=None, name="freeze"),
        of("replica", "setting-up-replica", "done", for_s=None, name="freeze"),
        of("replica", "judging", "done", for_s=None, name="freeze", nth=JUDGED),
        of("replica", "receiving", "done", for_s=None, name="freeze", nth=5),
        of("replica", "evaluating-finally", "done", for_s=None, name="freeze"),
        of("ledger", "judging", "error", for_s=None, name="freeze", nth=JUDGED),
        point("freeze-raylet-judging", "error done", at("judging", Freeze("raylet"), nth=JUDGED), limit_s=SLOW_LIMIT_S),
    ]
    asleep = Freeze("replica", HEARTBEAT_S)
    return [
        *points,
        point(
            "pause-replica-while-trainer-dies",
            "done",
            at("judging", asleep, Send("KILL", "trainer"), nth=13),
            words=("rollout.replicas=2",),
        ),
    ]


def _of_ray() -> list[Point]:
    points = [
        point(f"kill-{helper}-judging", "done error", at("judging", Send("KILL", helper), nth=JUDGED))
        for helper in HELPERS
    ]
    for victim in ("raylet", "gcs"):
        for name in ("KILL", "TERM"):
            act = Send(name, victim)
            title = f"{name.lower()}-{victim}-judging"
            points.append(point(title, "error done", at("judging", act, nth=JUDGED), limit_s=SLOW_LIMIT_S))
    return [
        *points,
        point("kill-raylet-building", "error", at("building", Send("KILL", "raylet")), limit_s=SLOW_LIMIT_S),
        point("kill-raylet-saving", "error done", at("saving", Send("KILL", "raylet"), nth=4), limit_s=SLOW_LIMIT_S),
    ]


def _disks() -> list[Point]:
    def of(name: str, ends: str, *acts: Act, phase: str = "stepping", nth: int = 4) -> Point:
        return point(name, ends, at(phase, *acts, nth=nth))

    return [
        of("delete-run-directory", "error", Replace("run")),
        of("delete-checkpoints", "error done", Replace("run/checkpoints")),
        of("delete-checkpoints-saving", "error done", Replace("run/checkpoints"), phase="saving"),
        of("checkpoints-become-a-file", "error", Replace("run/checkpoints", by="file")),
        of("metrics-become-a-directory", "error", Replace("run/metrics.jsonl", by="directory")),
        of("delete-metrics", "error done", Replace("run/metrics.jsonl")),
        of("delete-trained-prompts", "error done", Replace("run/trained_prompts.jsonl")),
        of("delete-tensorboard", "error done", Replace("run/tensorboard")),
        of("read-only-run-directory", "error done", Protect("run")),
        of("read-only-checkpoints", "error done", Protect("run/checkpoints")),
        of("small-files-trainer", "error", Limit("trainer", "FSIZE", 4096)),
        of("small-files-driver", "error", Limit("driver", "FSIZE", 4096)),
        of("small-files-replica", "done", Limit("replica", "FSIZE", 4096)),
        of("few-files-driver", "error done", Limit("driver", "NOFILE", 30)),
        of("few-files-trainer", "error done", Limit("trainer", "NOFILE", 30)),
        of("few-files-replica", "error done", Limit("replica", "NOFILE", 30)),
        of("few-files-ledger", "error done", Limit("ledger", "NOFILE", 30)),
        of("few-files-raylet", "error done", Limit("raylet", "NOFILE", 30)),
    ]


def _edits() -> list[Point]:
    def then_dies(name: str, ends: str, act: Act, victim: str, *, words: tuple[str, ...] = ()) -> Point:
        return point(f"{name}-kill-{victim}", ends, at("stepping", act, Send("KILL", victim), nth=4), words=words)

    weights = "model/model.safetensors"
    return [
        then_dies("edit-data", "error", Edit("train.jsonl"), "replica"),
        then_dies("edit-data", "error", Edit("train.jsonl"), "trainer"),
        then_dies("edit-weights", "error done", Edit(weights), "replica"),
        then_dies("edit-weights", "error done", Edit(weights), "trainer"),
        then_dies("edit-weights-unsaved", "error", Edit(weights), "trainer", words=UNSAVED),
        then_dies("edit-reward", "error done", Edit("reward.py"), "replica"),
        then_dies("delete-reward", "error", Replace("reward.py"), "replica"),
        then_dies("delete-model", "error", Replace("model"), "replica"),
        then_dies("delete-model", "error", Replace("model"), "trainer"),
        then_dies("delete-data", "error", Replace("train.jsonl"), "replica"),
        then_dies("edit-evaluation-data", "error done", Edit("eval.jsonl"), "replica"),
        then_dies("delete-config", "done", Replace("config.yaml"), "replica"),
    ]


def _rewards() -> list[Point]:
    return [
        point("reward-hangs-once", "done", reward="hangs_once"),
        point("reward-hangs-always", "error", reward="hangs_always", limit_s=SLOW_LIMIT_S),
        point("reward-hangs-on-evaluation", "error", reward="hangs_on_evaluation"),
        point("reward-hangs-once-on-evaluation", "done", reward="hangs_once_on_evaluation"),
        point("reward-raises-sometimes", "done", reward="raises_sometimes"),
        point("reward-raises-on-evaluation", "error", reward="raises_on_evaluation"),
        point("reward-exits-sometimes", "done", reward="exits_sometimes"),
        point("reward-interrupts-sometimes", "done", reward="interrupts_sometimes"),
        point("reward-ends-its-process-once", "done", reward="ends_its_process_once"),
        point("reward-gives-nan-sometimes", "done", reward="gives_nan_sometimes"),
        point("reward-gives-nan-always", "error", reward="gives_nan_always"),
        point("reward-is-slow", "done", reward="is_slow"),
        point("kill-reward-workers-judging", "done", at("judging", Send("KILL", "reward-workers"), nth=JUDGED)),
        point("freeze-reward-workers-judging", "done", at("judging", Freeze("reward-workers"), nth=JUDGED)),
    ]


def _filters() -> list[Point]:
    def of(name: str, ends: str, *injections: Injection) -> Point:
        return point(name, ends, *injections, words=FILTER, reward="teaches_some")

    driver, trainer, replica = Send("KILL", "driver"), Send("KILL", "trainer"), Send("KILL", "replica")
    return [
        of("filter-kill-driver-judging", "killed", at("judging", driver, nth=3 * JUDGED)),
        of("filter-kill-driver-saving", "killed", at("saving", driver, nth=4)),
        of("filter-kill-trainer-stepping", "done", at("stepping", trainer, nth=4)),
        of("filter-kill-trainer-resuming", "done", GOES_BACK, at("resuming", trainer)),
        of("filter-kill-replica-judging", "done", at("judging", replica, nth=JUDGED)),
        of("filter-kill-ledger-judging", "error", at("judging", Send("KILL", "ledger"), nth=3 * JUDGED)),
    ]


def _workflows() -> list[Point]:
    def of(name: str, ends: str, *injections: Injection) -> Point:
        return point(name, ends, *injections, words=(*FILTER, *WORKFLOW), reward="teaches_some")

    driver, trainer, replica = Send("KILL", "driver"), Send("KILL", "trainer"), Send("KILL", "replica")
    return [
        of("workflow-kill-driver-calling", "killed", at("calling", driver, nth=20)),
        of("workflow-kill-replica-calling", "done", at("calling", replica, nth=8)),
        of("workflow-freeze-replica-calling", "done", at("calling", Freeze("replica"), nth=8)),
        of("workflow-kill-trainer-stepping", "done", at("stepping", trainer, nth=4)),
    ]


def _of_the_machine() -> list[Point]:
    def of(name: str, phase: str, act: Act, *, nth: int = 1, words: tuple[str, ...] = ()) -> Point:
        return point(name, "done", at(phase, act, nth=nth), words=words, limit_s=SLOW_LIMIT_S)

    return [
        of("clock-forward-judging", "judging", DisturbMachine(clock_s=7200.0), nth=JUDGED),
        of("clock-back-judging", "judging", DisturbMachine(clock_s=-7200.0), nth=JUDGED),
        of("clock-back-receiving", "receiving", DisturbMachine(clock_s=-7200.0), nth=5),
        of("slow-disk-saving", "saving", DisturbMachine(sync_s=0.5), nth=4),
        of("slow-disk-saving-background", "saving", DisturbMachine(sync_s=0.5), nth=4, words=BACKGROUND),
        of("out-of-memory-replica-judging", "judging", Starve("replica"), nth=JUDGED),
        of("out-of-memory-trainer-stepping", "stepping", Starve("trainer"), nth=4),
    ]


def _two_writers() -> list[Point]:
    """Points in which a run loses its directory while the trainer waits in its fourth step."""

    def of(name: str, act: Act) -> Point:
        return point(name, "error", at("stepping", act, nth=4), words=PATIENT, limit_s=BUSY_LIMIT_S)

    return [
        of("delete-run-directory-for-good", Lose("run")),
        of("second-run-after-delete", Lose("run", again=True)),
        of("second-run-after-rename", Lose("run", renames=True, again=True)),
    ]


def _finished_work() -> list[Point]:
    error = frozenset({"error"})
    late = ("checkpoint.save_every_steps=50", "eval.every_steps=0", *PATIENT)
    loss = ("algorithm.loss=tests.faults.rewards:loss_fails_once", *UNSAVED, *PATIENT)
    two_ranks = (*loss, *TWO_RANKS)
    killed = (at("judging", Send("KILL", "ledger"), nth=15),)  # of step 4, so that two steps are finished
    beside = ("eval.every_steps=60", "eval.prompts=1000", *UNSAVED, *PATIENT)
    return [
        Point(
            "prompt-fails-after-40-steps",
            error,
            words=late,
            reward="raises_after_160",
            steps=50,
            limit_s=BUSY_LIMIT_S,
            saves=True,
        ),
        Point("loss-fails-unsaved", error, words=loss, limit_s=BUSY_LIMIT_S, saves=True),
        Point("loss-fails-on-one-rank-unsaved", error, words=two_ranks, limit_s=BUSY_LIMIT_S, saves=True),
        Point(
            "kill-ledger-judging-unsaved", error, killed, words=(*UNSAVED, *PATIENT), limit_s=BUSY_LIMIT_S, saves=True
        ),
        Point(
            "evaluation-of-1000-prompts",
            frozenset({"done"}),
            words=beside,
            steps=300,
            limit_s=BUSY_LIMIT_S,
            evaluates=True,
        ),
    ]


POINTS = [
    *_kills_of_driver(),
    *_kills_of_workers(),
    *_signals(),
    *_freezes(),
    *_of_ray(),
    *_disks(),
    *_edits(),
    *_rewards(),
    *_filters(),
    *_workflows(),
    *_of_the_machine(),
    *_two_writers(),
    *_finished_work(),
]
"""Every point. The number in a report is the place in this list."""


def choose(points: Sequence[Point], count: int, *, seed: int) -> list[Point]:
    """Return ``count`` of ``points`` in an order of ``seed``. The first have many kinds and victims in few runs."""
    left = random.Random(seed).sample(points, len(points))
    seen: set[str] = set()
    chosen: list[Point] = []
    while left and len(chosen) < count:
        best = max(left, key=lambda one: len(one.labels - seen) / one.lives)
        left.remove(best)
        seen |= best.labels
        chosen.append(best)
    return chosen
