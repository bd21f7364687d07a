"""The files of ``docs/cluster``: a job of Slurm runs with stand-ins for its commands; the others fit their schemas."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

import hwrl.cli
from hwrl_trackers.prometheus import TARGETS

CLUSTER = Path(__file__).parents[3] / "docs/cluster"
JOB = CLUSTER / "hwrl.sbatch"

# -- Slurm ----------------------------------------------------------------------------------------------------------

COMMANDS = {
    # The head listens, as Ray's does, so the script goes on; a worker only lives.
    "srun": """
echo "srun $*" >>"$NOTES"
case $* in *--head*) exec "$REAL_PYTHON" -c "
import socket, sys, time
server = socket.create_server(('127.0.0.1', int(sys.argv[1])))
time.sleep(60)" "$HWRL_RAY_PORT" ;; esac
exec sleep 60""",
    "python": """
case $* in
    *get_node_ip_address*) echo 127.0.0.1 ;;
    -\\ *) echo "waits for $2 nodes" >>"$NOTES"; cat >/dev/null ;;
    *) exec "$REAL_PYTHON" "$@" ;;
esac""",
    "hwrl": """
trap 'exit 130' TERM
token=$RAY_AUTH_TOKEN_PATH
echo "hwrl $* $RAY_ADDRESS $RAY_AUTH_MODE $(stat -c %a "$token") $(wc -c <"$token")" >>"$NOTES"
if [ "$1 $2" = "train long.yaml" ]; then while :; do sleep 0.1; done; fi
[ "$2" != bad.yaml ]""",
    "scontrol": 'echo "scontrol $*" >>"$NOTES"',
}


class SlurmJob:
    """The script as a job on two nodes, with stand-ins for the commands of Slurm, Ray and hwrl."""

    def __init__(self, directory: Path, *words: str) -> None:
        self.directory, self._notes = directory, directory / "notes"
        commands = directory / "bin"
        commands.mkdir()
        for name, source in COMMANDS.items():
            (commands / name).write_text(f"#!/bin/bash\n{source}\n")
            (commands / name).chmod(0o700)
        with socket.create_server(("127.0.0.1", 0)) as server:
            self.port = server.getsockname()[1]
        own = {"NOTES": self._notes, "REAL_PYTHON": sys.executable, "HWRL_RAY_PORT": self.port}
        slurm = {"SUBMIT_DIR": directory, "JOB_NUM_NODES": 2, "JOB_ID": 7}
        env = {**own, **{f"SLURM_{name}": value for name, value in slurm.items()}, "SLURMD_NODENAME": "node1"}
        path = f"{commands}:{os.environ['PATH']}"
        self.process = subprocess.Popen(
            ["bash", JOB, *words],
            env={**os.environ, **{name: str(value) for name, value in env.items()}, "PATH": path},
            start_new_session=True,
        )

    def notes(self) -> list[str]:
        return self._notes.read_text().splitlines() if self._notes.exists() else []

    def wait_for(self, beginning: str) -> None:
        deadline_s = time.monotonic() + 200.0
        while not any(line.startswith(beginning) for line in self.notes()):
            assert time.monotonic() < deadline_s and self.process.poll() is None, self.notes()
            time.sleep(0.02)

    def close(self) -> None:
        """Kill the script and what it has left behind."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[list[SlurmJob]]:
    """A list for the jobs of a test; they are ended after it."""
    started: list[SlurmJob] = []
    yield started
    for job in started:
        job.close()


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def test_a_job_starts_ray_on_all_nodes_trains_and_leaves_nothing(tmp_path: Path, jobs: list[SlurmJob]) -> None:
    jobs.append(job := SlurmJob(tmp_path, "config.yaml", "train.steps=3"))
    assert job.process.wait(300) == 0
    head, worker, waits, run = sorted(
        job.notes(), key=lambda line: (line[0] != "s", "--head" not in line, line[0] == "h")
    )
    assert head.startswith("srun --overlap --nodes=1 --ntasks=1 --nodelist=node1 ray start --head --block")
    assert worker.startswith(
        "srun --overlap --nodes=1 --ntasks=1 --exclude=node1 ray start --block --address=127.0.0.1:"
    )
    assert waits == "waits for 2 nodes"
    assert run == f"hwrl train config.yaml resume=true train.steps=3 127.0.0.1:{job.port} token 600 65"
    assert not list(tmp_path.glob(".hwrl-token-*"))
    deadline_s = time.monotonic() + 100.0
    while not is_free(job.port):
        assert time.monotonic() < deadline_s, "Ray ends with the job"
        time.sleep(0.2)  # a connection that nobody accepts fills the server's queue


def test_a_job_at_its_time_limit_saves_and_goes_back_into_the_queue(tmp_path: Path, jobs: list[SlurmJob]) -> None:
    jobs.append(job := SlurmJob(tmp_path, "long.yaml"))
    job.wait_for("hwrl train long.yaml")
    job.process.send_signal(signal.SIGTERM)  # to the script alone, as --signal=B:TERM does
    assert job.process.wait(300) == 130
    assert job.notes()[-1] == "scontrol requeue 7"


def test_a_failed_run_fails_the_job_once(tmp_path: Path, jobs: list[SlurmJob]) -> None:
    jobs.append(job := SlurmJob(tmp_path, "bad.yaml"))
    assert job.process.wait(300) == 1
    assert not any(line.startswith("scontrol") for line in job.notes())


def test_shellcheck_finds_nothing() -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed: make test-stack-watching")
    subprocess.run(["shellcheck", JOB], check=True)


# -- Ray ------------------------------------------------------------------------------------------------------------


def ray_commands() -> list[list[str]]:
    """Return the words of each command of Ray in the page and in the job, without ``ray`` itself."""
    page = "\n".join(re.findall(r"^```sh\n(.*?)^```", (CLUSTER.parent / "cluster.md").read_text(), re.M | re.S))
    page += "\n" + "\n".join(re.findall(r"`(ray start [^`]+)`", (CLUSTER.parent / "cluster.md").read_text()))
    lines = f"{page}\n{JOB.read_text().replace('$port', '6379')}".replace("\\\n", " ").splitlines()
    found = (re.search(r"(?:^|\s)ray ((?:start|job|symmetric-run) .*)$", line) for line in lines if line[:1] != "#")
    return [shlex.split(match[1].removesuffix("&")) for match in found if match]


def parse_as_ray(words: list[str]) -> None:
    """Let Ray's own command line parse the words; nothing runs."""
    click = importlib.import_module("click")
    command = importlib.import_module("ray.scripts.scripts").cli
    while hasattr(command, "commands"):
        name, *words = words
        command = command.commands[name]
    with click.Context(command):
        command.make_context(command.name, words)


def test_ray_knows_every_command_of_the_page_and_of_the_job() -> None:
    commands = ray_commands()
    assert len(commands) == 7, commands
    for words in commands:
        parse_as_ray(words)


@pytest.mark.parametrize("wrong", ["start --hed", "start --port=many", "job sumbit -- hwrl", "symmetric-run -- hwrl"])
def test_the_check_of_rays_commands_finds(wrong: str) -> None:
    with pytest.raises((importlib.import_module("click").ClickException, KeyError)):
        parse_as_ray(shlex.split(wrong))


# -- Kubernetes -----------------------------------------------------------------------------------------------------


def closed(required: str = "", **properties: Any) -> dict[str, Any]:
    """Return the schema of an object with these properties and no other."""
    return {
        "type": "object",
        "properties": properties,
        "required": required.split(),
        "additionalProperties": False,
    }


TEXT, NUMBER, FLAG = {"type": "string"}, {"type": "integer"}, {"type": "boolean"}
TEXTS = {"type": "object", "additionalProperties": TEXT}
PORT = closed("containerPort", name={"type": "string", "maxLength": 15}, containerPort=NUMBER)
VOLUME = closed(
    "name",
    name=TEXT,
    persistentVolumeClaim=closed("claimName", claimName=TEXT),
    emptyDir=closed(medium={"enum": ["", "Memory"]}, sizeLimit=TEXT),
)
CONTAINER = closed(
    "name",
    name=TEXT,
    image=TEXT,
    env={"type": "array", "items": closed("name", name=TEXT, value=TEXT)},
    ports={"type": "array", "items": PORT},
    resources=closed(requests=TEXTS, limits=TEXTS),
    volumeMounts={"type": "array", "items": closed("name mountPath", name=TEXT, mountPath=TEXT)},
)
POD = closed(
    spec=closed(
        "containers",
        terminationGracePeriodSeconds=NUMBER,
        containers={"type": "array", "items": CONTAINER},
        volumes={"type": "array", "items": VOLUME},
    )
)
WORKERS = closed(
    "groupName maxReplicas minReplicas template",
    groupName=TEXT,
    replicas=NUMBER,
    minReplicas=NUMBER,
    maxReplicas=NUMBER,
    rayStartParams=TEXTS,
    template=POD,
)
RAY_JOB = closed(
    "apiVersion kind metadata spec",
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayJob"},
    metadata=closed("name", name=TEXT),
    spec=closed(
        entrypoint=TEXT,
        backoffLimit=NUMBER,
        shutdownAfterJobFinishes=FLAG,
        ttlSecondsAfterFinished=NUMBER,
        rayClusterSpec=closed(
            "headGroupSpec",
            rayVersion=TEXT,
            authOptions=closed(mode={"enum": ["disabled", "token"]}),
            headGroupSpec=closed("template", rayStartParams=TEXTS, template=POD),
            workerGroupSpecs={"type": "array", "items": WORKERS},
        ),
    ),
)
"""What the file uses of KubeRay's definition of a RayJob (ray.io/v1, of version 1.7) and of Kubernetes' pods."""


def load(name: str) -> Any:
    return yaml.safe_load((CLUSTER / name).read_text(encoding="utf-8"))


def test_the_job_of_kuberay_fits_its_definition() -> None:
    jsonschema.validate(load("rayjob.yaml"), RAY_JOB)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("spec", "rayClusterSpec", "workerGroupSpecs", 0, "minReplica"), 1),
        (("spec", "rayClusterSpec", "authOptions", "mode"), "tokens"),
        (("spec", "rayClusterSpec", "headGroupSpec", "rayStartParams", "num-cpus"), 0),
    ],
)
def test_the_definition_finds(path: tuple[str | int, ...], value: object) -> None:
    wrong = deepcopy(load("rayjob.yaml"))
    place = wrong
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(wrong, RAY_JOB)


def test_the_job_of_kuberay_runs_hwrl_closed_to_others_with_shared_files() -> None:
    spec = load("rayjob.yaml")["spec"]
    cluster = spec["rayClusterSpec"]
    program, *words = shlex.split(spec["entrypoint"])
    assert program == "hwrl" and "resume=true" in hwrl.cli.parse(words).overrides
    assert cluster["authOptions"] == {"mode": "token"}
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        (container,) = group["template"]["spec"]["containers"]
        assert {mount["mountPath"] for mount in container["volumeMounts"]} == {"/shared", "/dev/shm"}


def test_prometheus_reads_what_runs_and_pods_offer() -> None:
    ((job,),) = load("prometheus.yaml").values()
    ((pattern,),) = (one["files"] for one in job["file_sd_configs"])
    assert pattern.endswith(f"/{TARGETS}")
    (endpoint,) = load("podmonitor.yaml")["spec"]["podMetricsEndpoints"]
    pod = load("rayjob.yaml")["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    assert endpoint["port"] in {port["name"] for port in pod["containers"][0]["ports"]}
