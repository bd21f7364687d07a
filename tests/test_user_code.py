"""Users' functions are loaded from modules and files; errors name the configuration key."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from hwrl.errors import DataError
from hwrl.user_code import function_file, load_function

CODE = "calls = []\ndef first():\n    calls.append(1)\ndef second():\n    return len(calls)\nclass Kept:\n    pass\n"


def load(path: Path, name: str, source: bytes | None = None) -> object:
    return load_function(f"{path}:{name}", key="algorithm.loss", source=source)()


def test_two_functions_of_a_file_share_its_module(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(CODE)
    load(path, "first")
    assert load(path, "second") == 1
    assert isinstance(pickle.loads(pickle.dumps(load(path, "Kept"))), type(load(path, "Kept")))


def test_files_of_one_name_are_different_modules_and_a_new_source_makes_a_new_one(tmp_path: Path) -> None:
    one, other = tmp_path / "mine.py", tmp_path / "other" / "mine.py"
    other.parent.mkdir()
    for path in (one, other):
        path.write_text(CODE)
    load(one, "first")
    assert load(other, "second") == 0
    assert load(one, "second", source=CODE.replace("[]", "[0, 0]").encode()) == 2


POOL = """\
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
import {helper}

def judged(response):
    return {helper}.value + len(response)

def score(method):
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context(method)) as pool:
        return pool.submit(judged, "abc").result(timeout=200)

if __name__ == "__main__":
    raise SystemExit("a child ran it as its main module")
"""


def test_children_find_a_users_file_and_it_finds_those_beside_it(tmp_path: Path) -> None:
    """Two files of one name, one with the name of another module, and one in a folder that is no name."""
    targets = []
    for number, place in enumerate(["one/reward.py", "two/reward.py", "three/json.py", "a b/plain.py"]):
        file = tmp_path / place
        file.parent.mkdir()
        file.write_text(POOL.replace("{helper}", f"beside_{number}"))
        file.with_name(f"beside_{number}.py").write_text(f"value = {10 * number}")
        targets.append(str(file))
    code = (
        "import json\nfrom hwrl.user_code import load_function\nstandard = json\n"
        f"scores = [load_function(target + ':score', key='reward.function') for target in {targets!r}]\n"
        "print([[score(method) for method in ('fork', 'spawn', 'forkserver')] for score in scores])\n"
        "import json as now\nassert now is standard\n"
    )
    found = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, text=True, capture_output=True, check=False)
    assert found.returncode == 0, found.stderr
    assert found.stdout.strip() == str([[10 * number + 3] * 3 for number in range(4)])


def test_each_file_finds_its_own_of_two_files_of_one_name(tmp_path: Path) -> None:
    for number, folder in enumerate(["one", "two"]):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"user_{number}.py").write_text(
            "import same_name\n\ndef f():\n    return same_name.value\n"
        )
        (tmp_path / folder / "same_name.py").write_text(f"value = {number}")
    code = (
        "from hwrl.user_code import load_function\n"
        "print([load_function(f'{n}/user_{i}.py:f', key='k')() for i, n in enumerate(['one', 'two'])])\n"
    )
    found = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, text=True, capture_output=True, check=False)
    assert found.stdout.strip() == "[0, 1]", found.stderr


def test_the_file_of_a_function_is_found_without_running_it(tmp_path: Path) -> None:
    assert function_file(f"{tmp_path}/absent.py:f") == tmp_path / "absent.py"
    file = function_file("hwrl.run.demo:f")
    assert file is not None and file.name == "demo.py"
    assert function_file("no.such.module:f") is None and function_file("sys:exit") is None


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (
            "nothing",
            "algorithm.loss=nothing names no function\n(.|\n)*for example algorithm.loss=my_code.py:my_function",
        ),
        ("no.such:f", "the module no.such of algorithm.loss cannot be imported"),
        ("absent.py:f", "there is no file absent.py\n  why: algorithm.loss names it"),
        ("hwrl.run.demo:absent", "algorithm.loss=hwrl.run.demo:absent names it"),
    ],
)
def test_an_error_names_the_key(target: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        load_function(target, key="algorithm.loss")
