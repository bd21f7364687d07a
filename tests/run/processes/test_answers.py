"""Errors of calls to actors, as users read them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import ray

from hwrl.errors import DataError, HwrlError
from hwrl.run.remote import DeviceActor, Remote, value_of

USERS = """
import json

class Own(Exception):
    def __reduce__(self):
        raise TypeError("not to be pickled")

def loss(inputs):
    return halve(inputs)

def halve(inputs):
    if inputs == "library":
        return json.loads("{")
    if inputs == "chained":
        try:
            1 / 0
        except ZeroDivisionError as exc:
            raise ValueError("two\\nlines") from exc
    if inputs == "exit":
        raise SystemExit(0)
    if inputs == "own":
        raise Own("of a user")
    raise ValueError("the loss of a test")
"""


def fail(path: str, case: str) -> None:
    if case == "hwrl":
        raise DataError("what", why="why", fix="fix")
    namespace: dict[str, Any] = {}
    exec(compile(Path(path).read_text(), path, "exec"), namespace)
    namespace["loss"](case)


call = ray.remote(num_cpus=0)(fail)


@pytest.fixture(scope="module", autouse=True)
def _cluster() -> Iterator[None]:
    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield
    ray.shutdown()


def test_an_error_of_users_code_shows_its_lines_and_not_those_of_ray(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(USERS)
    says = {
        "plain": ["ValueError: the loss of a test", 'raise ValueError("the loss of a test")'],
        "library": ["JSONDecodeError", "decoder.py"],
        "chained": ["ValueError: two\nlines"],
        "own": ["of a user"],
    }
    for case, parts in says.items():
        with pytest.raises(DataError) as caught:
            value_of(call.remote(str(path), case), process="trainer rank 1")
        text = str(caught.value)
        for part in [*parts, f'"{path}", line 9, in loss', "in halve", "  fix: "]:
            assert part in text, case
        assert caught.value.what.endswith("failed in trainer rank 1") and type(caught.value) is DataError
        for hidden in ("Traceback", "ray::", "_raylet", "ZeroDivisionError"):
            assert hidden not in text, case


no_users_code = ray.remote(num_cpus=0)(json.loads)


def test_an_error_without_users_code_shows_all_its_lines() -> None:
    with pytest.raises(DataError, match="what"):
        value_of(call.remote("", "hwrl"))
    with pytest.raises(HwrlError, match=r"(?s)a process of the run failed\n  why: json.*decoder.py"):
        value_of(no_users_code.remote("{"))


class Trainer:
    ALLOCATES: ClassVar[dict[str, str]] = {}

    def step(self, path: str) -> None:
        fail(path, "exit")


class Actor(DeviceActor):
    role = "trainer"

    def __init__(self) -> None:
        super().__init__()
        self._part = Trainer()


def test_users_code_that_ends_its_process_is_an_error_with_its_lines(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(USERS)
    actor = Remote[Trainer](Actor, num_cpus=0)
    for _ in range(2):  # the process lives on
        with pytest.raises(DataError, match="failed in a process of the run") as caught:
            value_of(actor.call(Trainer.step, str(path)))
        assert caught.value.why.startswith("RuntimeError: it raised SystemExit(0)") and "in halve" in caught.value.why
    actor.kill()
