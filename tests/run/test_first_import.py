"""The first use of a user's code, in a child process with a limit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hwrl.errors import DataError
from hwrl.run.first_import import try_in_child
from hwrl.user_code import load_function
from tests.support.speed import slow


def load(step: Callable[[str], None], *targets: str) -> list[str]:
    for target in targets:
        step(f"reward.function={target}")
        load_function(target, key="reward.function")
    return list(targets)


BAD_STR = """
class Bad(Exception):
    def __str__(self):
        raise ValueError("no text")
    __repr__ = __str__
raise Bad
"""


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import os; os._exit(0)", r"reward.function=.*bad.py:f failed in its first use(.|\n)*with status 0"),
        (
            "import os; print('almost there', flush=True); os._exit(3)",
            r"status 3; its output ended with 'almost there",
        ),
        (
            "import sys; sys.exit(0)",
            r"the code of reward.function in .*bad.py cannot be loaded(.|\n)*ended the process",
        ),
        ("import time; time.sleep(1e6)", r"bad.py:f failed(.|\n)*did not return within LIMIT s"),
        (
            "import time\nwhile True: print('x' * 1000); time.sleep(0.01)",
            r"bad.py:f failed(.|\n)*did not return within LIMIT s; its output ended with 'x",
        ),
        (BAD_STR, r"the code of reward.function in .*bad.py cannot be loaded(.|\n)*Bad"),
        ("raise KeyboardInterrupt", r"bad.py"),
        ("raise BaseException('a base')", r"bad.py(.|\n)*a base"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", r"bad.py:f failed(.|\n)*with status -11"),
    ],
)
def test_code_that_ends_its_process_hangs_or_prints_without_end_is_named(
    tmp_path: Path, code: str, reason: str
) -> None:
    (tmp_path / "good.py").write_text("def f(): pass")
    (tmp_path / "bad.py").write_text(code)
    limit_s = slow(3.0) if "LIMIT" in reason else 100.0
    with pytest.raises(DataError, match=reason.replace("LIMIT", f"{limit_s:g}")):
        try_in_child(load, f"{tmp_path}/good.py:f", f"{tmp_path}/bad.py:f", limit_s=limit_s)


def test_megabytes_of_output_and_children_that_live_on_are_no_harm(tmp_path: Path) -> None:
    code = "import subprocess; subprocess.Popen(['sleep', '1000']); print('x' * (8 << 20))\ndef f(): pass"
    (tmp_path / "loud.py").write_text(code)
    target = f"{tmp_path}/loud.py:f"
    assert try_in_child(load, target) == [target]
