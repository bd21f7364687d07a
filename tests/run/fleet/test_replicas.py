"""The replicas of a run, with stand-ins for their processes and for the ledger."""

from __future__ import annotations

import time
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest

from hwrl.errors import EngineError, InputChangedError
from hwrl.run.ledger import ForgottenReplica
from hwrl.run.replica import Replica
from hwrl.run.replicas import Replicas, RestartPlan
from tests.support.run_config import config_of


class StandInRemote:
    """The process of a replica. Its answers are its errors, or None."""

    set_up_errors: tuple[Exception | None, ...] = ()
    remotes: tuple[StandInRemote, ...] = ()

    def __class_getitem__(cls, part: object) -> type[StandInRemote]:
        return cls

    def __init__(self, actor_class: type, **options: Any) -> None:
        start = len(StandInRemote.remotes)
        StandInRemote.remotes += (self,)
        errors = StandInRemote.set_up_errors
        self.set_up_answer = (f"set up {start}", errors[start] if start < len(errors) else None)
        self.run_answer = (f"run {start}", None)
        self.killed = self.leaving = False

    def set_up(self, *arguments: Any, **keywords: Any) -> Any:
        return self.set_up_answer

    def call(self, method: Any) -> Any:
        self.leaving |= method is Replica.leave
        return self.run_answer

    def kill(self) -> None:
        self.killed = True


def value_of(answer: tuple[str, Exception | None], *, process: str = "") -> None:
    if answer[1] is not None:
        raise answer[1]


def ignore(*arguments: Any) -> Any:
    """Take the place of a call without an effect here."""
    return 0


@dataclass
class World:
    """Replicas of a run, and everything that they tell others."""

    replicas: Replicas
    logged: list[str]
    withdrawn: list[str]
    finished: set[str]
    """The replica ids that have handed in a prompt."""
    updates: dict[str, int]
    """How many updates each of them had taken; many if it is not here."""
    clock: SimpleNamespace
    awaiting: set[str]
    """The replicas that Ray may have no devices for."""

    def set_up(self) -> None:
        """Let all replicas that are being set up run."""
        for remote in StandInRemote.remotes:
            self.replicas.handle_event(cast(Any, remote.set_up_answer))

    def end(self, number: int) -> None:
        """End the process of start ``number``."""
        self.replicas.handle_event(cast(Any, StandInRemote.remotes[number].run_answer))

    def wait(self, seconds: float) -> None:
        """Let so much time pass."""
        self.clock.now_s += seconds
        self.replicas.start_pending()


def stand_in_devices(replicas: int, awaiting: set[str]) -> SimpleNamespace:
    """Return devices for so many ``replicas``; Ray may have none for those in ``awaiting``."""
    return SimpleNamespace(
        replicas=[f"replica-{index}" for index in range(replicas)],
        ray_options=lambda name: {},
        may_wait=awaiting.__contains__,
        count_waiting=ignore,
        **dict.fromkeys(["check_report", "forget", "check_growth", "add_replica", "remove_replica"], ignore),
    )


def world_of(monkeypatch: pytest.MonkeyPatch, *set_up_errors: Exception | None, **rollout: Any) -> World:
    """Return the replicas of a run, whose starts have these errors. A set-up may take 0.1 s."""
    monkeypatch.setattr("hwrl.run.replicas.Remote", StandInRemote)
    monkeypatch.setattr("hwrl.run.replicas.value_of", value_of)
    monkeypatch.setattr("hwrl.run.replicas.why_ended", lambda answer: "killed")
    clock = SimpleNamespace(now_s=0.0)
    plan = lambda limit: RestartPlan(limit, clock=lambda: clock.now_s)  # noqa: E731 - a constructor with the clock
    monkeypatch.setattr("hwrl.run.replicas.RestartPlan", plan)
    monkeypatch.setattr(StandInRemote, "set_up_errors", set_up_errors)
    monkeypatch.setattr(StandInRemote, "remotes", ())
    config = config_of(rollout=rollout, timeouts={"start_s": 0.1})
    logged: list[str] = []
    withdrawn: list[str] = []
    finished: set[str] = set()
    updates: dict[str, int] = {}
    awaiting: set[str] = set()
    devices = stand_in_devices(config.rollout.replicas, awaiting)
    ledger = SimpleNamespace(
        remote=None,
        ask=lambda method, *ids: ForgottenReplica(0, ids[0] in finished, updates.get(ids[0], 9)) if ids else [],
    )
    monitor = SimpleNamespace(
        watch=ignore, forget=ignore, locate=str, loop_turn_s=lambda name: 0.0, is_up=lambda name: False
    )
    replicas = Replicas(
        config,
        devices=cast(Any, devices),
        ledger=cast(Any, ledger),
        monitor=cast(Any, monitor),
        setup_of=ignore,
        seed=1,
        withdraw=withdrawn.append,
        log=cast(Any, lambda text, *, kind: logged.append(f"{kind}: {text}")),
    )
    replicas.start()
    return World(replicas, logged, withdrawn, finished, updates, clock, awaiting)


def test_a_replacement_that_found_a_changed_input_is_never_late(monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = InputChangedError("train.jsonl changed during the run", why="an edit", fix="restore it")
    replicas = world_of(monkeypatch, None, refusal, refusal).replicas
    replicas.handle_event(replicas.answers[0])  # it is set up
    replicas.handle_event(replicas.answers[0])  # it has died
    with pytest.raises(InputChangedError, match="changed during the run"):
        replicas.handle_event(replicas.answers[0])  # its replacement refuses to start
    time.sleep(0.12)  # the limit itself, not a wait for something
    replicas.replace_stuck()
    assert len(StandInRemote.remotes) == 2 and StandInRemote.remotes[1].killed
    assert not replicas.are_starting and replicas.answers == []


def test_a_restarted_replica_has_a_limit_for_its_start_unless_ray_may_have_no_devices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = world_of(monkeypatch, replicas=2)
    world.set_up()
    world.awaiting.add("replica-1")
    world.end(0)
    world.end(1)
    time.sleep(0.12)  # the limit itself, not a wait for something
    world.replicas.replace_stuck()
    assert [remote.killed for remote in StandInRemote.remotes] == [True, True, True, False]


def test_a_crash_loop_has_growing_pauses_and_is_given_up_while_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = world_of(monkeypatch, replicas=2, min_replicas=1, max_restarts=4)
    world.set_up()
    world.end(1)
    for number, pause_s in enumerate((1.0, 2.0, 4.0), start=2):
        assert len(StandInRemote.remotes) == number + 1, "the first restart is immediate"
        world.set_up()
        world.end(number)
        assert world.logged[-1].endswith(f"a new replica starts in {pause_s:g} s")
        world.wait(pause_s - 0.1)
        assert len(StandInRemote.remotes) == number + 1
        world.wait(0.2)
    world.set_up()
    world.end(5)
    assert world.logged[-1].startswith("scale: rollout replica-1 ended (killed)")
    assert world.logged[-1].endswith("it died 5 times in a row and is given up; 1 replicas are left")
    assert world.withdrawn == ["replica-1"] * 5 and world.replicas.wanted == 1
    world.wait(1e6)
    assert len(StandInRemote.remotes) == 6


def test_the_pause_before_a_restart_has_a_limit_after_any_number_of_deaths() -> None:
    plan = RestartPlan(limit=5000)
    pauses_s = [plan.add_death("replica-0", finished=False) for _ in range(2000)]
    assert pauses_s[:9] == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0] and pauses_s[-1] == 60.0


def test_a_replica_that_finishes_prompts_between_its_deaths_is_never_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    world = world_of(monkeypatch, max_restarts=1)
    for start in range(20):
        world.set_up()
        world.finished.add(f"replica-0#{start}")
        world.end(start)
    assert len(StandInRemote.remotes) == 21 and not any("in 1 s" in line for line in world.logged)


def test_too_few_replicas_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    world = world_of(monkeypatch, max_restarts=1)
    world.set_up()
    world.end(0)
    world.set_up()
    with pytest.raises(EngineError, match=r"died 2 times in a row[\s\S]*killed[\s\S]*rollout\.min_replicas"):
        world.end(1)


def test_a_replica_that_may_not_restart_is_not_said_to_have_finished_no_prompt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = world_of(monkeypatch, max_restarts=0)
    world.set_up()
    world.finished.add("replica-0#0")
    with pytest.raises(EngineError, match=r"rollout replica-0 died once\n"):
        world.end(0)


def test_replicas_join_and_leave_and_a_leaving_one_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    world = world_of(monkeypatch)
    world.set_up()
    assert world.replicas.scale(3) == "replica-1, replica-2 will join when their models are built"
    world.set_up()
    assert world.replicas.running_ids() == ["replica-0#0", "replica-1#1", "replica-2#2"]
    assert world.replicas.scale(3) == "3 replicas are already running or starting"
    assert world.replicas.scale(1).startswith("replica-2, replica-1 will leave")
    assert [remote.leaving for remote in StandInRemote.remotes] == [False, True, True]
    assert world.replicas.running_ids() == ["replica-0#0"]
    assert world.replicas.scale(2).startswith("replica-3"), "the name of a leaving one is still in use"
    world.end(1)
    world.end(2)
    assert world.logged[-1] == "scale: rollout replica-2 left (killed); 0 prompts go to others; 1 replicas run now"
    assert len(StandInRemote.remotes) == 4 and world.withdrawn == ["replica-1", "replica-2"]
    assert world.replicas.scale(1) == "replica-3 left at once", "one that does not run yet leaves first"
    assert StandInRemote.remotes[3].killed and not world.replicas.are_starting


def test_a_replica_that_cannot_join_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = EngineError("no memory", why="a test", fix="none")
    world = world_of(monkeypatch, None, broken, broken, max_restarts=1)
    world.set_up()
    world.replicas.scale(2)
    world.set_up()
    world.set_up()
    assert "given up; 1 replicas are left" in world.logged[-1] and world.replicas.wanted == 1


def test_a_replica_that_dies_of_one_cause_at_each_update_is_given_up_and_the_runs_end_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = world_of(monkeypatch, replicas=2, min_replicas=1, max_restarts=2)
    causes = iter([f"AcceleratorError: invalid argument at 0x{number:x}" for number in range(9)])
    monkeypatch.setattr("hwrl.run.replicas.why_ended", lambda answer: next(causes))
    world.set_up()
    for number, start in enumerate((0, 2, 3)):
        world.finished.add(f"replica-0#{start}")
        world.updates[f"replica-0#{start}"] = 1
        assert len(world.replicas.repeated_deaths()) == (number >= 3)
        world.end(start)
        world.wait(60.0)
        if number < 2:
            world.replicas.handle_event(cast(Any, StandInRemote.remotes[-1].set_up_answer))
    assert "it died 3 times in a row and is given up; 1 replicas are left" in world.logged[-1]
    (sentence,) = world.replicas.repeated_deaths()
    assert sentence == "replicas ended 3 times by the same cause: AcceleratorError: invalid argument at #"
