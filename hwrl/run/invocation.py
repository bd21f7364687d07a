"""The hwrl command, in the form in which the user can type it."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path


def invoked() -> str:
    """Return the shell command that starts this hwrl, for messages with a command to copy.

    It is ``hwrl`` if the shell finds this installation under that name, and otherwise the path of the started script.
    """
    started = Path(sys.argv[0])
    if started.name != "hwrl":
        return "hwrl"
    found = shutil.which("hwrl")
    if found is not None and Path(found).resolve() == started.resolve():
        return "hwrl"
    return shlex.quote(str(started))
