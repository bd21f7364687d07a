"""A stranger: a process of another user on this machine, without the run's keys."""

from __future__ import annotations

import os

_NOBODY = 65534


def become_a_stranger() -> None:
    """Make this process another user's. Without root's rights it keeps its user, and only lacks what it is not told.

    Call it first in a function that ``run_processes`` starts: a fork of a test's process might hang, since the test has
    threads.
    """
    "a host".encode("idna")  # Python's own files may be closed to the stranger: load this one now
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(_NOBODY)
        os.setuid(_NOBODY)
