"""A stranger: a process of another user on this machine, without the run's keys."""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable
from typing import Any

_NOBODY = 65534


def as_stranger(attack: Callable[[], Any]) -> Any:
    """Return what ``attack`` returns, as JSON has it, in a fork of this process that runs as another user.

    Without root's rights the fork keeps this user, and only lacks what it is not told.
    """
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            "a host".encode("idna")  # Python's own files may be closed to the stranger: load this one now
            if os.geteuid() == 0:
                os.setgroups([])
                os.setgid(_NOBODY)
                os.setuid(_NOBODY)
            os.write(write, json.dumps(attack()).encode())
        except BaseException:  # noqa: BLE001 - the fork must not return into the test
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(write)
    with open(read, "rb") as answer:
        said = answer.read()
    os.waitpid(child, 0)
    assert said, "the stranger failed, see its traceback"
    return json.loads(said)
