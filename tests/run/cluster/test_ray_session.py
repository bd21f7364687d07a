"""Ray for a run: joined or started."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import ray

from hwrl.checkpoint import DirectoryLock
from hwrl.errors import ConfigError, EngineError
from hwrl.run.cluster import ray_session
from hwrl.run.cluster.ray_security import check_security, private_ray
from hwrl.run.cluster.ray_session import (
    children_of_ray,
    few_processes,
    not_started,
    ray_cluster,
    raylet_error,
    was_slow,
)
from hwrl.run.config import load_config
from hwrl.run.demo import main, write_demo
from hwrl.run.inputs import is_local
from tests.support.listeners import listeners
from tests.support.speed import slow


@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_a_cluster_that_does_not_answer_is_an_error_at_once(
    scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    monkeypatch.setenv("RAY_ADDRESS", f"{scheme}127.0.0.1:{port}")
    config = load_config(write_demo(tmp_path, seed=1, prompts=16), [])
    says = rf"(?s)no Ray cluster at {scheme}127.0.0.1:{port}.*unset RAY_ADDRESS"
    started_s = time.monotonic()
    with pytest.raises(ConfigError, match=says), ray_cluster(config, log=print):
        pass
    assert time.monotonic() - started_s < slow(25.0), "Ray itself tries for 30 s"


@pytest.mark.parametrize(("address", "local"), [("", True), ("local", True), ("elsewhere:6379", False)])
def test_an_address_decides_if_a_ray_is_started(address: str, local: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    assert is_local() is local


def test_the_demo_is_not_written_under_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run").mkdir()
    monkeypatch.setattr(sys, "argv", ["demo", str(tmp_path)])
    lock = DirectoryLock(tmp_path / "run")
    with pytest.raises(SystemExit, match="a run is active"):
        main()
    lock.close()
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_demo_of_more_prompts_than_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"528 different prompts are needed, but only 110 have \[1, 2\] digits"):
        write_demo(tmp_path, seed=1, digits=(1, 2, 2), prompts=16)


def test_threads_and_children_that_end_while_they_are_listed_are_no_children_of_ray(tmp_path: Path) -> None:
    for task, children in (("1", "10 11 12"), ("2", "13")):
        (tmp_path / "self/task" / task).mkdir(parents=True)
        (tmp_path / "self/task" / task / "children").write_text(children)
    (tmp_path / "self/task/3").mkdir()  # this thread has ended, and so has the process 11
    for pid, command in ((10, b"/lib/ray/raylet\0-x"), (12, b"/bin/sh\0"), (13, b"/lib/ray/gcs_server\0")):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "cmdline").write_bytes(command)
    assert sorted(children_of_ray(tmp_path)) == [10, 13]


TIMED_OUT = Exception("The current node timed out during startup.\nMore.")
RAYLET_LOG = """
[2026-01-01 00:00:00,067 I 9827 9827] (raylet) grpc_server.cc:144: NodeManager server started, on port 39121.
[2026-01-01 00:00:15,888 C 9827 9827] (raylet) node_manager.cc:3588:  An unexpected system state. You have \
likely discovered a bug in Ray. Check failed: statussetor3576.has_value() Timed out waiting for file /r/agent_port
*** StackTrace Information ***
/lib/raylet(+0xff770a) [0x556179d6a70a] ray::operator<<()
"""


def test_a_ray_that_does_not_start_is_told_with_the_limit_that_may_be_the_cause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (0.5, 0.5, 0.5))
    error = not_started(TIMED_OUT, "", file_limit=51_200)
    assert "timed out during startup" in error.why and "51,200 bytes here (ulimit -f)" in error.why
    assert error.fix == "run `ulimit -f unlimited` first"
    error = not_started(RuntimeError(""), "", file_limit=resource.RLIM_INFINITY)
    assert error.why == "RuntimeError" and "/dev/shm" in error.fix


def test_the_raylets_own_error_and_a_busy_machine_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert raylet_error(tmp_path) == ""
    (tmp_path / "session_latest/logs").mkdir(parents=True)
    (tmp_path / "session_latest/logs/raylet.out").write_text(RAYLET_LOG)
    said = raylet_error(tmp_path)
    assert said == "Timed out waiting for file /r/agent_port"
    assert was_slow(TIMED_OUT, said) and was_slow(TIMED_OUT, "")
    assert not was_slow(TIMED_OUT, "No space left on device") and not was_slow(RuntimeError("no"), "")
    monkeypatch.setattr(os, "getloadavg", lambda: (1000.0, 1.0, 1.0))
    error = not_started(TIMED_OUT, said, file_limit=resource.RLIM_INFINITY)
    assert f"the raylet said: {said}" in error.why and "its load is 1000, on" in error.why
    assert "less busy" in error.fix and "/dev/shm" not in error.fix
    error = not_started(TIMED_OUT, "No space left on device", file_limit=resource.RLIM_INFINITY)
    assert "/dev/shm" in error.fix


def test_a_start_that_timed_out_is_tried_again_and_another_failure_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    config = load_config(write_demo(tmp_path, seed=1, prompts=16), [])
    ends = [TIMED_OUT, TIMED_OUT, RuntimeError("no space"), *[TIMED_OUT] * 4]

    def fail(*arguments: object, **options: object) -> None:
        raise ends.pop(0)

    monkeypatch.setattr(ray, "init", fail)
    monkeypatch.setattr(ray_session, "RETRY_PAUSES_S", (0.0, 0.0, 0.0))
    for reason, tries in (("no space", 2), ("timed out", 3)):
        logged: list[str] = []
        with pytest.raises(EngineError, match=reason), ray_cluster(config, log=logged.append):
            pass
        assert len([line for line in logged if "timed out" in line and "trying again in 0 s" in line]) == tries
    assert not ends


SLOW_AGENT = """
import os, sys
if any("dashboard/agent.py" in word for word in sys.orig_argv):
    try:
        os.mkdir(os.environ["HWRL_TEST_FIRST_AGENT"])
    except FileExistsError:
        pass
    else:
        import signal
        os.kill(os.getpid(), signal.SIGSTOP)
"""


@pytest.mark.extended
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of Ray's killed processes
def test_a_ray_whose_agent_was_too_slow_is_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    config = load_config(write_demo(tmp_path, seed=1, prompts=16), [])
    (tmp_path / "sitecustomize.py").write_text(SLOW_AGENT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("HWRL_TEST_FIRST_AGENT", str(tmp_path / "first"))
    logged: list[str] = []
    with ray_cluster(config, log=logged.append):
        assert ray.is_initialized()
    assert logged[0] == "starting Ray on this machine"
    assert "Timed out waiting for file" in logged[1] and "trying again in 2 s" in logged[1]


def test_the_directory_and_the_token_are_the_users_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = Path(tempfile.mkdtemp(dir="/tmp"))
    monkeypatch.setenv("RAY_TMPDIR", str(base))
    monkeypatch.setenv("RAY_AUTH_TOKEN", "the user's")
    enter = "from hwrl.run.cluster.ray_security import private_ray; held = private_ray(); held.__enter__()"
    subprocess.run([sys.executable, "-c", f"{enter}; import os; os.kill(os.getpid(), 9)"], check=False, timeout=600)
    (left,) = base.iterdir()
    with private_ray() as directory:
        (own,) = base.iterdir()
        assert own == directory.parent != left, "what the killed run left is still there"
        token = Path(os.environ["RAY_AUTH_TOKEN_PATH"])
        assert [stat.S_IMODE(path.stat().st_mode) for path in (own, token)] == [0o700, 0o600]
        assert os.environ["RAY_AUTH_MODE"] == "token" and "RAY_AUTH_TOKEN" not in os.environ
        with pytest.raises(ZeroDivisionError), private_ray():
            raise ZeroDivisionError
        assert list(base.iterdir()) == [own], "a directory in use was deleted, or one that is not was kept"
    assert list(base.iterdir()) == [] and os.environ["RAY_AUTH_TOKEN"] == "the user's"
    base.rmdir()
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / ("x" * 60)))
    with pytest.raises(ConfigError, match=r"(?s)107 bytes.*set RAY_TMPDIR"), private_ray():
        pass
    monkeypatch.delenv("RAY_TMPDIR")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("x" * 60)))
    with private_ray() as directory:
        assert directory.parent.parent == Path("/tmp"), "a long TMPDIR has no room for sockets"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a directory of another user")
def test_a_directory_of_another_user_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = Path(tempfile.mkdtemp(dir="/tmp"))
    monkeypatch.setenv("RAY_TMPDIR", str(base))
    of_others = base / "hwrl-abcd1234"
    of_others.mkdir()
    (of_others / "token").touch()
    descend = "import os\nfor _ in range(1500): os.mkdir('d'); os.chdir('d')"  # Python's rmtree recurses
    subprocess.run([sys.executable, "-c", descend], cwd=of_others, check=True, timeout=600)
    os.chown(of_others, 65534, 65534)
    with private_ray():
        pass
    assert list(base.iterdir()) == [of_others]
    subprocess.run(["rm", "-r", str(base)], check=True)


STRANGER = "import sys, hwrl.run.cluster.ray_security as p; print(p.admits_without_token(sys.argv[1]))"
OPEN = """
import ray
for last in (False, False, False, True):
    try:
        context = ray.init(address="local", include_dashboard=False)
        break
    except Exception:  # on a busy machine Ray gives its own processes up after 30 s
        if last:
            raise
        ray.shutdown()
print(context.address_info["gcs_address"], flush=True)
input()
"""


def test_a_ray_of_the_runs_own_is_closed_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    config = load_config(write_demo(tmp_path, seed=1, prompts=16), [])
    logged: list[str] = []
    before = listeners()  # of other tests
    with ray_cluster(config, log=logged.append):
        home = Path(os.environ["RAY_AUTH_TOKEN_PATH"]).parent
        children = {int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal() and is_below(path)}
        opened = {host for host, _ in listeners({os.getpid(), *children}) - before}
        assert children and opened <= {"127.0.0.1", "::ffff:127.0.0.1"}
        commands = " ".join((Path("/proc") / str(pid) / "cmdline").read_text() for pid in children)
        assert "gcs_server" in commands and "raylet" in commands
        assert not [name for name in ("monitor.py", "dashboard.py") if name in commands], "the run uses none of them"
        address = ray.get_runtime_context().gcs_address
        ended = subprocess.run([sys.executable, "-c", STRANGER, address], text=True, capture_output=True, timeout=600)
        assert ended.stdout.strip() == "False", ended.stderr
    assert logged == ["starting Ray on this machine"]
    assert not home.exists() and "RAY_AUTH_TOKEN_PATH" not in os.environ


def test_tls_without_its_files_is_an_error_before_a_cluster_is_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    monkeypatch.setenv("RAY_TLS_SERVER_CERT", __file__)
    config = load_config(write_demo(tmp_path, seed=1, prompts=16), ["cluster_security=tls"])
    says = r"RAY_TLS_SERVER_KEY, RAY_TLS_CA_CERT must name readable files"
    with pytest.raises(ConfigError, match=says), ray_cluster(config, log=print):
        pass
    assert "RAY_USE_TLS" not in os.environ


@pytest.mark.parametrize("address", ["ray://127.0.0.1", "auto"])
def test_a_cluster_that_cannot_be_checked_is_refused_if_security_is_wanted(address: str) -> None:
    with pytest.raises(ConfigError, match="only an address host:port of its head can be checked"):
        check_security("token", address, is_open=None)
    check_security(None, address, is_open=None)


def test_a_ray_without_its_private_class_of_nodes_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray._private.node", None)
    with few_processes():
        pass


def is_below(process: Path) -> bool:
    with contextlib.suppress(OSError):
        return f"PPid:\t{os.getpid()}\n" in (process / "status").read_text()
    return False


def test_joining_a_cluster_that_lets_anyone_in_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    env = os.environ | {"RAY_AUTH_MODE": "disabled"}
    other = subprocess.Popen([sys.executable, "-c", OPEN], env=env, text=True, stdin=-1, stdout=-1, stderr=-3)
    assert other.stdout is not None
    monkeypatch.setenv("RAY_ADDRESS", other.stdout.readline().strip())
    logged: list[str] = []
    path = write_demo(tmp_path, seed=1, prompts=16)
    says = r"(?s)does not satisfy cluster_security=token.*admits clients without a token"
    with pytest.raises(ConfigError, match=says), ray_cluster(load_config(path, ["cluster_security=token"]), log=print):
        pass
    with ray_cluster(load_config(path, []), log=logged.append):
        pass
    assert "has no authentication" in logged[-1] and "RAY_AUTH_MODE=token" in logged[-1]
    other.communicate("", timeout=600)
