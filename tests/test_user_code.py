"""Users' functions are loaded from modules and files; errors name the configuration key."""

from __future__ import annotations

import pickle
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
