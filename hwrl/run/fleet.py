"""The processes of a run: starts them as Ray actors, waits for them, and replaces rollout replicas that die."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from hwrl.checkpoint import find_checkpoints
from hwrl.comm import serve_store, store_address
from hwrl.errors import ConfigError, EngineError, HwrlError
from hwrl.registry import get_backend, process_env
from hwrl.run.actors import LedgerActor, RolloutActor, TrainActor
from hwrl.run.cluster import local_devices
from hwrl.run.config import Config
from hwrl.run.inputs import is_local
from hwrl.run.placement import (
    Assignment,
    Holding,
    Proof,
    Seat,
    has_devices,
    machine_devices,
    number_by_machine,
    plan_placement,
)

POLL_S = 1.0
RESERVE_S = 60.0
DEATH_NOTICE_S = 5.0  # a survivor may fail before Ray has told that its peer is dead
GOODBYE_S = 5.0


class TrainerDiedError(Exception):
    """A trainer rank is gone; the other ranks are of no use without it."""


@dataclasses.dataclass(frozen=True)
class _Replica:
    actor: Any
    incarnation: str
    replaces: bool  # one that died, and may have left its devices full for a while
    run: Any = None  # not before it is set up


class Fleet:
    """One ledger, the trainer's ranks, and the rollout replicas.

    The driver's calls block and watch all replicas meanwhile. A replica that dies is replaced under its old name, up
    to ``rollout.max_restarts`` times; a trainer rank that dies raises TrainerDiedError, after which
    :meth:`relaunch_trainers` is all that helps.
    """

    def __init__(self, config: Config, *, say: Callable[[str], None]) -> None:
        self._config, self._say = config, say
        self._backend = get_backend()
        # Other machines must reach the store; on one machine it is nobody else's business.
        self._store = serve_store("127.0.0.1" if is_local() else ray.util.get_node_ip_address())
        self._store_address = store_address(self._store)
        self._place()
        self._ledger: Any = ray.remote(LedgerActor).options(num_cpus=0).remote(config)
        self._trainers: list[Any] = []
        self._trainers_answer = False
        self._replicas: dict[str, _Replica] = {}
        self._joining: dict[Any, str] = {}
        self._trainer_starts = self._replica_starts = 0
        self._seed = config.seed * 1_000_003 + _newest_step(config)

    # -- start --------------------------------------------------------------------------------------------------

    def launch(self) -> None:
        """Start trainers and replicas side by side; return when the trainers are set up."""
        set_up = self._launch_trainers()
        for name in self._seats:
            self._launch_replica(name)
        self._await_trainers(set_up)

    def await_replicas(self) -> None:
        """Return when every replica has joined and waits for weights."""
        while self._joining:
            self.watch([])

    def relaunch_trainers(self, cause: Exception) -> None:
        """End all trainer ranks and start new ones, unless that has happened too often."""
        if self._trainer_starts > self._config.train.max_restarts:
            raise EngineError(
                f"the trainer died {self._trainer_starts} times",
                why=str(cause),
                fix="mend the cause, or raise train.max_restarts; resume=true continues the run",
            ) from cause
        self._say(f"a trainer died ({cause}); all its ranks start again")
        for trainer in self._trainers:
            ray.kill(trainer)
        self._await_trainers(self._launch_trainers())

    @property
    def size(self) -> str:
        """How many there are, or will be."""
        return f"{self._config.train.ranks} trainer rank(s), {self._config.rollout.replicas} rollout replica(s)"

    def describe(self) -> str:
        """Say who is there, on the devices that they reported."""
        where = f"{self._proof}; {self._seating}" if has_devices(self._backend) else "all share the hosts' processors"
        return (
            f"hwrl on {self._backend.info.name}: {self.size}; {where}; "
            f"weights travel by {self._plan.transport}: {self._plan.why_transport}"
        )

    def _place(self) -> None:
        """Give each process its devices, and choose how weights travel. Raises if there are too few devices."""
        devices, rollout = self._backend.devices, self._config.rollout
        resource, divided = devices.ray_resource or "CPU", has_devices(self._backend)
        if divided and devices.ray_resource is None and not is_local():
            raise _not_counted(self._backend.info.name)
        self._plan = plan_placement(
            self._config,
            self._backend,
            devices=local_devices(self._config) if is_local() else int(ray.available_resources().get(resource, 0)),
            one_machine=is_local() or sum(node["Alive"] for node in ray.nodes()) == 1,
        )
        seating = self._seating = self._plan.seating
        self._shown = {name: value for name, value in os.environ.items() if name == devices.visible_variable}
        self._seats = {f"replica-{index}": place for index, place in enumerate(seating.replicas)}
        self._ranks = {f"trainer rank {rank}": place for rank, place in enumerate(seating.ranks)}
        self._proof = Proof([*self._ranks, *self._seats])
        self._opens: tuple[int, ...] = ()
        if self._plan.transport == "ipc":
            self._opens = machine_devices(os.environ, devices, count=self._backend.device_count())
        ray_numbers = not is_local() and resource in ray.get(ray.remote(num_cpus=0)(_numbered_by_ray).remote())
        self._group: Any = None
        # By itself Ray might put replicas where a rank must go, or leave a machine too few devices for a wide one; and
        # devices that Ray does not number are numbered here, by the machine of their bundle.
        if seating.shared or rollout.tensor_parallel > 1 or (divided and not is_local() and not ray_numbers):
            self._group = _reserve(seating.bundles, resource)
        self._numbers: dict[int, int] = {}
        if divided and is_local():
            self._numbers = {device: device for device in range(seating.devices)}
        elif divided and not ray_numbers:
            self._numbers = number_by_machine(seating.bundles, _machines(self._group))

    def _told(self, place: Seat, *, opens: bool) -> Assignment:
        """Return the devices that the process on ``place`` is to take."""
        return Assignment(
            count=len(place.devices),
            indices=tuple(self._numbers[device] for device in place.devices) if self._numbers else (),
            env=self._shown if is_local() else None,
            opens=self._opens if opens else (),
        )

    def _options(self, role: str, place: Seat) -> dict[str, Any]:
        """Return what Ray is told about one worker: its devices, and the variables that its backend wants."""
        options = self._backend.devices.ray_options(place.share * len(place.devices))
        if self._group is not None:
            strategy = PlacementGroupSchedulingStrategy(self._group, self._seating.bundles.index(place.devices))
            options = {"num_cpus": 0, **options, "scheduling_strategy": strategy}
        variables = process_env(
            role,
            exports_memory=role == "trainer" and self._plan.transport == "ipc",
            shares_device=self._seating.shared,
            devices=self._told(place, opens=False).indices,
        )
        return options | ({"runtime_env": {"env_vars": variables}} if variables else {})

    def _launch_trainers(self) -> list[Any]:
        """Make the trainer's ranks and begin to set them up; return what to wait for."""
        incarnation, self._trainer_starts = self._trainer_starts, self._trainer_starts + 1
        self._trainers_answer = False
        self._trainers = [
            ray.remote(TrainActor).options(**self._options("trainer", place)).remote() for place in self._seating.ranks
        ]
        return [
            trainer.set_up.remote(
                self._config,
                backend=self._backend.info.name,
                told=self._told(self._seating.ranks[rank], opens=False),
                rank=rank,
                store_address=self._store_address,
                incarnation=incarnation,
                transport=self._plan.transport,
            )
            for rank, trainer in enumerate(self._trainers)
        ]

    def _await_trainers(self, set_up: list[Any]) -> None:
        holdings = self._gather(set_up)
        for name in self._ranks:
            self._proof.forget(name)  # what a rank that died has reported
        for (name, place), holding in zip(self._ranks.items(), holdings, strict=True):
            self._prove(name, place, holding)
        self._trainers_answer = True

    def _prove(self, process: str, place: Seat, holding: Holding | None) -> None:
        """Raise PlacementError if a process holds what it was not given; there is no holding without devices."""
        if holding is not None:
            self._proof.add(process, place, holding)

    def _launch_replica(self, name: str) -> None:
        """Start the replica ``name``. One that takes a dead namesake's place also ends the wait for that one's part
        in a weight transfer; its prompts and figures go under a name of its own.
        """
        start, self._replica_starts = self._replica_starts, self._replica_starts + 1
        incarnation = f"{name}#{start}"
        options = self._options("rollout", self._seats[name])
        actor = ray.remote(RolloutActor).options(max_concurrency=4, **options).remote()
        self._replicas[name] = _Replica(actor, incarnation, replaces=start >= self._config.rollout.replicas)
        joining = actor.set_up.remote(
            self._config,
            backend=self._backend.info.name,
            told=self._told(self._seats[name], opens=True),
            replica=name,
            incarnation=incarnation,
            seed=self._seed + 1009 * start,
            store_address=self._store_address,
            ledger=self._ledger,
        )
        self._joining[joining] = name

    # -- calls --------------------------------------------------------------------------------------------------

    def on_trainers(self, method: str, *args: Any) -> list[Any]:
        """Call ``method`` on every rank and return the answers; raises TrainerDiedError, or a rank's own error."""
        return self._gather([trainer.call.remote(method, *args) for trainer in self._trainers])

    def on_ledger(self, method: str, *args: Any) -> Any:
        """Call ``method`` of the ledger and return its answer."""
        return self.ledger_value(getattr(self._ledger, method).remote(*args))

    def take(self, count: int, version: int) -> tuple[Any, Any]:
        """Ask for a batch; return references to the groups and to the note on them."""
        groups, note = self._ledger.take.options(num_returns=2).remote(count, version)
        return groups, note

    def ledger_value(self, reference: Any) -> Any:
        """Return what the ledger answered."""
        try:
            return value_of(reference)
        except RayActorError as exc:
            raise EngineError(
                "the ledger of prompts died",
                why=_first_line(exc),
                fix="resume=true continues from the last checkpoint, if there is one",
            ) from exc

    def serve_joiners(self) -> None:
        """Give the newest weights to replicas that joined since they were published; the trainers must be idle."""
        if self._gather([self._trainers[0].call.remote("joiners")])[0]:
            self.on_trainers("publish")

    def replace_overdue(self) -> None:
        """Replace the replicas that have held a prompt beyond its deadline: they hang."""
        late = self.on_ledger("overdue")
        for name, replica in list(self._replicas.items()):
            if replica.incarnation in late:
                limit_s = self._config.rollout.group_timeout_s
                self._replace(name, f"it held a prompt for more than rollout.group_timeout_s={limit_s:g}")

    def evaluate(self) -> Any:
        """Let a replica that runs evaluate; return a reference to the answer, None if no replica runs."""
        running = [replica.actor for replica in self._replicas.values() if replica.run is not None]
        return running[0].evaluate.remote() if running else None

    def watch(self, references: list[Any]) -> list[Any]:
        """Wait for what happens next, for ``POLL_S`` at most; replace replicas that died; return who of us is ready."""
        runs = {replica.run: name for name, replica in self._replicas.items() if replica.run is not None}
        watched = dict.fromkeys([*references, *runs, *self._joining])
        ready, _ = ray.wait(list(watched), num_returns=1, timeout=POLL_S)
        for reference in ready:
            if reference in runs:
                self._replace(runs[reference], _why_ended(reference))
            elif reference in self._joining:
                self._joined(reference)
        return [reference for reference in ready if reference in references]

    def close(self) -> None:
        """End every process; those that can still answer release files and memory first."""
        goodbyes = [trainer.call.remote("close") for trainer in self._trainers if self._trainers_answer]
        for replica in self._replicas.values():
            replica.actor.stop.remote()
            goodbyes += [replica.run] if replica.run is not None else []
        if goodbyes:
            ray.wait(goodbyes, num_returns=len(goodbyes), timeout=GOODBYE_S)
        for actor in [*self._trainers, *(replica.actor for replica in self._replicas.values()), self._ledger]:
            ray.kill(actor)
        if self._group is not None:
            ray.util.remove_placement_group(self._group)

    # -- what dies ----------------------------------------------------------------------------------------------

    def _gather(self, references: list[Any]) -> list[Any]:
        """Return the trainers' answers; whatever a survivor says, a dead rank is the cause."""
        pending = list(references)
        while pending:
            for reference in self.watch(pending):
                pending.remove(reference)
                try:
                    value_of(reference)
                except RayActorError as exc:
                    raise TrainerDiedError(_first_line(exc)) from exc
                except (HwrlError, RayTaskError) as exc:
                    death = _death_among(pending)
                    if death is None:
                        raise
                    raise death from exc
        return [value_of(reference) for reference in references]

    def _joined(self, joining: Any) -> None:
        """Let a replica run that is set up; one that died in setting up is replaced, one that cannot be is an error."""
        name = self._joining.pop(joining)
        replica = self._replicas[name]
        try:
            self._prove(name, self._seats[name], value_of(joining))
        except RayActorError as exc:
            self._replace(name, _first_line(exc))
            return
        except (HwrlError, RayTaskError) as exc:
            if not replica.replaces:
                raise
            self._replace(name, f"it could not be set up in another's place: {_first_line(exc)}")
            return
        self._replicas[name] = dataclasses.replace(replica, run=replica.actor.run.remote())

    def _replace(self, name: str, reason: str) -> None:
        replica = self._replicas.pop(name)
        self._proof.forget(name)
        self._joining = {reference: other for reference, other in self._joining.items() if other != name}
        ray.kill(replica.actor)
        lost = self.on_ledger("forget", replica.incarnation)
        self._say(f"rollout {name} ended ({reason}); {lost} prompts go to others, a new replica starts")
        deaths = self._replica_starts - self._config.rollout.replicas + 1
        if deaths > self._config.rollout.max_restarts:
            raise EngineError(
                f"rollout replicas died {deaths} times",
                why=reason,
                fix="mend the cause, or raise rollout.max_restarts; resume=true continues the run",
            )
        self._launch_replica(name)


def _reserve(bundles: list[tuple[int, ...]], resource: str) -> Any:
    """Return a placement group of ``bundles``. Raises ConfigError if no machines have them."""
    group = ray.util.placement_group([{resource: len(devices)} for devices in bundles])
    if not group.wait(RESERVE_S):
        ray.util.remove_placement_group(group)
        widest = max(len(devices) for devices in bundles)
        raise ConfigError(
            "the run's processes cannot be placed",
            why=f"Ray could not reserve devices for all {len(bundles)} in {RESERVE_S:g} s; the widest needs {widest} "
            "on one machine",
            fix="set rollout.tensor_parallel to what a machine has left besides the trainer, or add machines",
        )
    return group


def _numbered_by_ray() -> list[str]:
    """Return the resources of which Ray tells each worker the numbers."""
    return list(ray.get_runtime_context().get_accelerator_ids())


def _machines(group: Any) -> list[str]:
    """Return the machine of each bundle of a placement group."""
    nodes: dict[int, str] = ray.util.placement_group_table(group)["bundles_to_node_id"]
    return [nodes[index] for index in range(len(nodes))]


def _not_counted(name: str) -> ConfigError:
    return ConfigError(
        f"the devices of backend {name!r} cannot be counted on a cluster",
        why="RAY_ADDRESS names one, and the backend's DeviceMap has no ray_resource",
        fix="give it one and start the cluster's nodes with that resource, or unset RAY_ADDRESS",
    )


def value_of(reference: Any) -> Any:
    """Return the value; an hwrl error from another process comes out as itself."""
    try:
        return ray.get(reference)
    except RayTaskError as exc:
        if isinstance(exc.cause, HwrlError):
            raise exc.cause from exc
        raise


def _death_among(references: list[Any]) -> TrainerDiedError | None:
    if not references:
        return None
    ready, _ = ray.wait(references, num_returns=len(references), timeout=DEATH_NOTICE_S)
    for reference in ready:
        try:
            ray.get(reference)
        except RayActorError as exc:
            return TrainerDiedError(_first_line(exc))
        except RayTaskError:
            continue
    return None


def _why_ended(reference: Any) -> str:
    try:
        ray.get(reference)
    except RayActorError as exc:
        return _first_line(exc)
    except RayTaskError as exc:
        if isinstance(exc.cause, HwrlError):
            return f"{exc.cause.what}: {exc.cause.why}"
        return [line for line in str(exc).splitlines() if line.strip()][-1].strip()
    return "it returned"


def _first_line(exc: Exception) -> str:
    return next((line.strip() for line in str(exc).splitlines() if line.strip()), type(exc).__name__)


def _newest_step(config: Config) -> int:
    """Return the step that a resume will start from, so that sampling does not repeat what it drew before."""
    directory = config.dir / "checkpoints"
    complete = find_checkpoints(directory)[0] if config.resume and directory.is_dir() else []
    return max((info.step for info in complete), default=0)
