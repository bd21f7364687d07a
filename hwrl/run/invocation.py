"""The hwrl command as the user started it."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path


def invoked() -> str:
    """Return what starts the hwrl command here, for advice to copy into a shell.

    It is ``hwrl`` if the shell finds this installation by that name, otherwise the path that started this process.
    """
    started = Path(sys.argv[0])
    if started.name != "hwrl":
        return "hwrl"
    found = shutil.which("hwrl")
    if found is not None and Path(found).resolve() == started.resolve():
        return "hwrl"
    return shlex.quote(str(started))
