"""The processes that score responses: whatever the reward function does, each prompt gets its answer."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from pathlib import Path

import numpy as np
import pytest

from hwrl.errors import DataError
from hwrl.rollout import Prompt, RewardWorkers, Scores, reward_handle
from hwrl.rollout.reward_process import Notes, send_frame
from tests.support.interrupting import before_each_line
from tests.support.scripted_rollout import Desk, Lengths, rollouter_of, step_until
from tests.support.speed import slow
from tests.support.started_rewards import FUNCTIONS, Start, responses_of


def prompt_of(answer: object) -> Prompt:
    return Prompt("say", np.ones(1, dtype=np.int32), answer)


def score(workers: RewardWorkers, answer: object = None, lengths: Sequence[int] = (1, 2, 3)) -> Future[Scores]:
    return workers.score(prompt_of(answer), responses_of(lengths))


def ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 600
    while not condition():
        assert time.monotonic() < deadline_s, "it never came"
        time.sleep(0.01)


def test_responses_are_scored_in_order_in_a_light_process_that_lives_on(start: Start) -> None:
    assert score(start("length")).result(600).metrics == [{"reward": 1.0}, {"reward": 2.0}, {"reward": 3.0}]
    workers = start("identify")
    workers.wait_until_ready()
    rows = [row for _ in range(2) for row in score(workers).result(600).metrics]
    assert {row["pid"] for row in rows} == {rows[0]["pid"]} and rows[0]["pid"] != os.getpid()
    assert [row["calls"] for row in rows] == [1, 2, 3, 4, 5, 6], "a module's globals stay"
    assert rows[0]["large"] == 0


@pytest.mark.parametrize(
    ("order", "reason"),
    [
        ("raise", "ZeroDivisionError('no luck')"),
        ("exit", "SystemExit(3)"),
        ("interrupt", "KeyboardInterrupt"),
        ("cancel", "CancelledError"),
        ("end a generator", "GeneratorExit"),
    ],
)
def test_a_call_that_raises_is_repeated_in_the_same_process_then_the_prompt_has_failed(
    start: Start, order: str, reason: str
) -> None:
    workers = start("obey", attempts=2)
    scores = score(workers, order).result(600)
    assert (scores.metrics, scores.errors) == ([{"reward": 1.0}], 2)
    assert scores.failure is not None and reason in scores.failure and "for the response '1 2'" in scores.failure
    assert score(workers, order, [1]).result(600) == Scores([{"reward": 1.0}])


def test_a_call_that_succeeds_at_last_counts_its_errors(start: Start) -> None:
    assert score(start("fails_twice"), lengths=[1]).result(600) == Scores([{"reward": 1.0}], errors=2)


@pytest.mark.parametrize(
    ("order", "reason"),
    [
        ("end the process", "ended with status 7"),
        ("crash", "was killed by SIGSEGV"),
        ("run out of memory", "was killed by SIGKILL"),
        ("fork and run out of memory", "was killed by SIGKILL"),
        ("close everything", "its worker"),
        ("hang", f"did not return within {slow(2):g} s"),
        ("hold the lock", f"did not return within {slow(2):g} s"),
    ],
)
def test_a_call_that_ends_or_holds_its_process_fails_its_prompt_only(start: Start, order: str, reason: str) -> None:
    workers = start("obey", workers=1, timeout_s=slow(2.0))
    failing, next_one = score(workers, order), score(workers, order, [1])
    scores = failing.result(600)
    assert scores.failure is not None and reason in scores.failure
    newest = "'1 2 3'" if order == "close everything" else "'1 2'"  # calls go on until the answer cannot be sent
    assert f"for the response {newest}" in scores.failure
    assert scores.errors == 1 + (reason[:7] != "did not"), "a death is tried again in a new process"
    assert next_one.result(600) == Scores([{"reward": 1.0}]), "a new process"


def test_a_death_that_does_not_come_again_costs_no_prompt(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "reward.py"
    path.write_text(
        "import os, pathlib\n\ndef f(prompt, response, answer):\n    file = pathlib.Path(answer)\n"
        "    if not file.exists():\n        file.touch()\n        os._exit(1)\n    return 1.0\n"
    )
    scores = score(start(f"{path}:f", workers=1), str(tmp_path / "died")).result(600)
    assert scores == Scores([{"reward": 1.0}] * 3, errors=1)


def test_a_call_leaves_other_prompts_the_directory_and_the_standard_files(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "reward.py"
    path.write_text(
        f"import os\nfrom {FUNCTIONS} import obey\n\ndef f(prompt, response, answer):\n"
        "    if answer:\n        return obey(prompt, response, answer)\n"
        "    print('here')\n    return {'reward': 1.0, 'here': os.getcwd() == " + repr(os.getcwd()) + "}\n"
    )
    workers = start(f"{path}:f", workers=1)
    for order in ("leave the directory", "close the standard files"):
        assert score(workers, order, [2]).result(600).metrics == [{"reward": 1.0}]
        assert score(workers, None, [2]).result(600) == Scores([{"reward": 1.0, "here": 1.0}])


def test_a_call_that_forks_and_returns_twice_gives_no_answer_to_another_prompt(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "reward.py"
    path.write_text(
        "import os\n\nloaded = os.getpid()\n\n"
        "def f(prompt, response, answer):\n"
        "    answer == 'fork' and os.fork()\n"
        "    return {'reward': len(response), 'loaded': loaded}\n"
    )
    workers = start(f"{path}:f", workers=1)
    first = score(workers, "fork", [1]).result(600)
    row = {"reward": 1.0, "loaded": first.metrics[0]["loaded"]}

    def is_replaced() -> bool:
        scores = score(workers, None, [2]).result(600)
        if scores.failure is not None:
            assert "answer to no question" in scores.failure
            return False
        assert scores.metrics[0]["reward"] == 3, "it has the length of the other prompt's response"
        return scores.metrics[0]["loaded"] != row["loaded"]

    assert first.metrics == [row]
    wait_until(is_replaced)


def test_a_frame_of_another_form_fails_its_prompt_only(start: Start, tmp_path: Path) -> None:
    """The function finds the worker's socket, and writes into it."""
    path = tmp_path / "reward.py"
    path.write_text(
        "import os, stat, struct\n\n"
        "def f(prompt, response, answer):\n"
        "    for fd in map(int, os.listdir('/proc/self/fd')) if answer else ():\n"
        "        try:\n"
        "            if fd > 2 and stat.S_ISSOCK(os.fstat(fd).st_mode):\n"
        "                os.write(fd, struct.pack('<Q', len(answer)) + answer)\n"
        "        except OSError:\n"
        "            pass\n"
        "    return 1.0\n"
    )
    workers = start(f"{path}:f", workers=1)
    of_another_prompt = b'[1, [[{"reward": 7.0}], 0, null, false]]'
    wrong_form = (b"{}", b"[3, []]", b"[4, [[], 0, null, false]]", b"[5, [[1], 0, null, false]]", b"[" * 9999)
    for frame in (b"5", *wrong_form, of_another_prompt):
        assert "answer to no question" in str(score(workers, frame, [1]).result(600).failure), frame
    assert score(workers, b"", [1]).result(600) == Scores([{"reward": 1.0}])


def test_long_errors_and_responses_are_shortened(start: Start) -> None:
    failure = str(score(start("obey", attempts=1), "raise a long text", [2]).result(600).failure)
    assert "ValueError('xxx" in failure and "…" in failure and len(failure) < 600


def test_a_second_process_that_hangs_while_it_loads_fails_a_prompt_and_holds_up_no_other(
    start: Start, tmp_path: Path
) -> None:
    path = tmp_path / "reward.py"
    path.write_text(
        "import os, time\nfrom pathlib import Path\n\n"
        "number = len(list(Path(__file__).parent.iterdir()))\n"
        "Path(__file__).with_name(f'load{number}').touch()\n"
        "time.sleep(1e6 if number == 2 else 0)\n\n"
        "def f(prompt, response, answer):\n    return 1.0 if answer is None else os._exit(3)\n"
    )
    workers = start(f"{path}:f", workers=1, timeout_s=slow(0.5), load_timeout_s=slow(4.0))
    workers.wait_until_ready()
    dying, next_one = score(workers, "end"), score(workers, lengths=[1])
    assert "was not ready within" in str(dying.result(600).failure), "the process that was to judge it again"
    assert next_one.result(600) == Scores([{"reward": 1.0}])


def test_a_job_that_can_never_be_sent_fails(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = set()

    def send(connection: socket.socket, content: bytes) -> None:
        if connection in begun:
            raise BrokenPipeError("nobody listens")
        begun.add(connection)
        send_frame(connection, content)

    monkeypatch.setattr(reward_handle, "send_frame", send)
    assert "was killed by SIGKILL" in str(score(start("length")).result(600).failure)


def test_a_process_that_does_not_take_its_first_frame_has_failed_to_start(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nexec sleep 1000\n")
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    with pytest.raises(DataError, match="no reward worker can start"):
        start(f"{tmp_path}/reward.py:f", source=b"#" * (8 << 20), frame_timeout_s=0.2).wait_until_ready()


@pytest.mark.parametrize("error", [RuntimeError("no luck"), OSError("no luck")])
def test_an_error_of_the_first_start_is_told_and_leaves_nothing_open(
    start: Start, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr(tempfile, "TemporaryFile", fail)
    before = len(os.listdir("/proc/self/fd"))
    workers = start("length")
    with pytest.raises((RuntimeError, DataError), match="no luck"):
        workers.wait_until_ready()
    workers.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_after_a_failed_start_another_one_is_tried_later(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "reward.py"
    path.write_text(
        "import os, time\nfrom pathlib import Path\n\n"
        "number = len(list(Path(__file__).parent.iterdir()))\n"
        "Path(__file__).with_name(f'load{number}').touch()\n"
        "assert number != 2\n\n"
        "def f(prompt, response, answer):\n    time.sleep(0.3)\n    return {'reward': 1.0, 'pid': os.getpid()}\n"
    )
    workers = start(f"{path}:f", workers=2, retry_s=0.5)
    workers.wait_until_ready()
    scores = [future.result(600) for future in [score(workers, lengths=[1]) for _ in range(12)]]
    assert len({one.metrics[0]["pid"] for one in scores}) == 2
    assert (tmp_path / "load2").exists()


def test_the_users_module_has_none_of_our_future_imports(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "reward.py"
    path.write_text(
        "def typed(x: float): ...\n\n"
        "def f(prompt, response, answer):\n    return float(typed.__annotations__['x'] is float)\n"
    )
    assert score(start(f"{path}:f"), lengths=[1]).result(600).metrics == [{"reward": 1.0}]


@pytest.mark.parametrize("order", ["print", "ignore Ctrl-C", "set an alarm"])
def test_what_a_call_may_do(start: Start, order: str) -> None:
    assert score(start("obey"), order).result(600) == Scores([{"reward": 1.0}] * 3)


def test_an_error_without_a_text_is_reported(start: Start) -> None:
    assert "ValueError" in str(score(start("obey"), "raise without a text").result(600).failure)


def test_responses_and_answers_that_cannot_be_sent_fail_their_prompt(start: Start) -> None:
    workers = start("length")
    assert "pickle" in str(score(workers, threading.Lock()).result(600).failure)
    assert score(workers, lengths=[5]).result(600).metrics == [{"reward": 5.0}]
    broken = RewardWorkers(f"{FUNCTIONS}:length", decode=lambda ids: str(ids[7]))
    assert "IndexError" in str(score(broken).result(600).failure)
    broken.close()


def test_waiting_prompts_get_more_processes_up_to_the_limit(start: Start) -> None:
    workers = start("takes_a_while", workers=2)
    workers.wait_until_ready()
    scores = [score(workers, 0.3, [1]).result(600) for _ in range(2)]
    assert len({row["pid"] for one in scores for row in one.metrics}) == 1, "nothing waited"
    futures = [score(workers, 0.3, [1]) for _ in range(6)]
    assert len({row["pid"] for future in futures for row in future.result(600).metrics}) == 2


@pytest.mark.parametrize("line", range(5))
def test_a_prompt_that_comes_while_the_workers_end_is_cancelled(start: Start, line: int) -> None:
    """The workers end before a line of ``score``, one line after the other, as if in another thread."""
    workers, lines = start("length"), itertools.count()

    def end_at_the_line() -> None:
        if next(lines) == line:
            workers.close()

    with before_each_line(lambda code: code is RewardWorkers.score.__code__, end_at_the_line):
        scores = score(workers)
    workers.close()
    assert scores.cancelled()


def test_a_prompt_that_nobody_wants_is_not_scored(start: Start) -> None:
    workers = start("takes_a_while", workers=1)
    begun, dropped, last = (score(workers, seconds, [1]) for seconds in (0.3, 1e6, 0.0))
    assert dropped.cancel()
    assert begun.result(600).failure is None and last.result(600).failure is None


@pytest.mark.parametrize("place", ["{path}:missing", "{path}/none.py:f", "tests.support.missing:f"])
def test_a_function_that_cannot_be_loaded_is_told(start: Start, tmp_path: Path, place: str) -> None:
    (tmp_path / "reward.py").write_text("")
    workers = start(place.format(path=tmp_path / "reward.py"))
    with pytest.raises(DataError, match="reward"):
        workers.wait_until_ready()
    assert score(workers).result(600).failure is not None


def test_a_function_that_only_one_process_can_load_is_called_by_that_one(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "reward.py"
    path.write_text(
        "import time\nfrom pathlib import Path\n\n"
        "Path(__file__).with_name('claimed').touch(exist_ok=False)\n\n"
        "def f(prompt, response, answer):\n    time.sleep(answer)\n    return 1.0\n"
    )
    workers = start(f"{path}:f", workers=4)
    workers.wait_until_ready()
    assert [future.result(600).failure for future in [score(workers, 0.2, [1]) for _ in range(4)]] == [None] * 4


def test_a_module_that_ends_its_process_is_told(start: Start, tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text("import os\nos._exit(5)\n")
    with pytest.raises(DataError, match="ended with status 5"):
        start(f"{tmp_path / 'reward.py'}:f").wait_until_ready()


def test_a_new_process_runs_the_code_that_the_first_one_ran(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "reward.py"
    path.write_text("import os\n\ndef f(prompt, response, answer):\n    return answer or os._exit(0)\n")
    workers = start(f"{path}:f", source=path.read_bytes())
    path.write_text("def f(prompt, response, answer):\n    return 5.0\n")
    assert score(workers, 0.0).result(600).failure is not None
    assert score(workers, 2.0, [1]).result(600).metrics == [{"reward": 2.0}]


def test_a_call_that_is_killed_takes_along_what_it_started(start: Start, tmp_path: Path) -> None:
    file = tmp_path / "child"
    scores = score(start("leaves_a_child", timeout_s=slow(4.0)), str(file), [1]).result(600)
    assert "did not return" in str(scores.failure)
    wait_until(lambda: ended(int(file.read_text())))


@pytest.mark.parametrize("function", ["identify", "forks"])
def test_a_process_that_dies_while_it_is_idle_costs_no_prompt(start: Start, function: str) -> None:
    workers = start(function, workers=1, timeout_s=200.0)
    first = int(score(workers).result(600).metrics[0]["pid"])
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: ended(first))
    again = score(workers).result(600)
    assert again.failure is None and again.metrics[0]["pid"] != first


def test_closing_ends_processes_inside_of_a_call_and_cancels_what_waits(start: Start) -> None:
    workers = start("identify", workers=1)
    pid = int(score(workers).result(600).metrics[0]["pid"])
    busy = start("obey", workers=1)
    running, waiting = score(busy, "hang"), score(busy, "hang")
    for each in (workers, busy):
        each.close()
    assert ended(pid) and running.cancelled() and waiting.cancelled()
    with pytest.raises(CancelledError):
        score(busy).result(0)


def test_processes_end_with_their_replica_also_inside_of_a_call(tmp_path: Path) -> None:
    """A replica may be killed at any moment, and the function may hold the interpreter's lock."""
    function = tmp_path / "reward.py"
    function.write_text(
        "import os, pathlib\n\n"
        "def f(prompt, response, answer):\n"
        "    pathlib.Path(answer).write_text(str(os.getpid()))\n"
        "    return sum(iter(int, 1))\n"
    )
    code = (
        "import sys, time\n"
        "import numpy as np\n"
        "from hwrl.rollout import Prompt, RewardWorkers\n"
        "ids = np.ones(1, dtype=np.int32)\n"
        "workers = RewardWorkers(sys.argv[1] + ':f', decode=str)\n"
        "workers.score(Prompt('', ids, sys.argv[2]), [ids])\n"
        "time.sleep(1e6)\n"
    )
    file = tmp_path / "pid"
    replica = subprocess.Popen([sys.executable, "-c", code, str(function), str(file)])
    wait_until(lambda: file.exists() and bool(file.read_text()))
    replica.send_signal(signal.SIGKILL)
    replica.wait(200)
    wait_until(lambda: ended(int(file.read_text())))


def test_a_rollouter_hands_in_what_real_workers_scored_and_fails_what_hangs(start: Start) -> None:
    desk = Desk([0, 1])
    workers = start("obey", timeout_s=slow(2.0))
    rollouter = rollouter_of(desk, rewards=workers, prompts=Ordering())
    step_until(rollouter, lambda: bool(desk.failed and desk.groups))
    assert [group.sequence_number for group in desk.groups] == [0]
    assert desk.failed[0][0] == 1 and f"did not return within {slow(2):g} s for the response '1 2'" in desk.failed[0][1]
    assert rollouter.stats()["reward_errors"] == 1


class Ordering(Lengths):
    """Prompt n wants n + 1 tokens, and its reward hangs at two."""

    def __getitem__(self, sequence_number: int) -> Prompt:
        return Prompt(str(sequence_number), np.array([sequence_number + 1], dtype=np.int32), "hang")


def test_an_evaluation_whose_reward_hangs_says_so(start: Start) -> None:
    rollouter = rollouter_of(Desk([]), rewards=start("obey", timeout_s=slow(2.0)))
    answer = rollouter.evaluate([Ordering()[1]])

    def scored() -> bool:
        time.sleep(1e-3)  # nothing is generated meanwhile
        return answer.done()

    step_until(rollouter, scored)
    with pytest.raises(DataError, match=r"1 of 1 evaluation prompts(.|\n)*did not return within " + f"{slow(2):g} s"):
        answer.result(timeout=0)


def test_a_sign_of_life_is_never_read_in_the_middle_of_its_write() -> None:
    writes = "import sys; from hwrl.rollout.reward_process import Notes; notes = Notes(int(sys.argv[1]))\n"
    writes += "while True: notes.note_call(5, 6, 7)"
    with tempfile.TemporaryFile() as file:
        file.truncate(Notes.size)
        notes, descriptor = Notes(file.fileno()), file.fileno()
        with subprocess.Popen([sys.executable, "-c", writes, str(descriptor)], pass_fds=[descriptor]) as writer:
            wait_until(lambda: notes.read()[0] > 0.0)
            before_s = notes.read()[0]
            newest_s = [notes.read()[0] for _ in range(1_000_000)]
            writer.kill()
        assert min(newest_s) >= before_s and notes.read()[1:] == (5, 6, 7)
