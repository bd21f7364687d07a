"""Run a plugin's first code, its import and one hook, in a process of its own: foreign code may end or block it."""

from __future__ import annotations

import os
import signal
import tempfile
from importlib.metadata import EntryPoint
from itertools import chain, islice
from pathlib import Path

from hwrl.children import run_python

REHEARSED = "HWRL_REHEARSED_PLUGINS"
"""The environment variable with the plugins that passed. Child processes do not try these again."""
LIMIT_S = 120.0
_MOST_ANSWERS = 1000
_DONE, _CHANGED = "done", "changed "


def why_unsafe(entry: EntryPoint, hook: str) -> str:
    """Return how the import of a plugin, or its ``hook``, ends, blocks or changes a process; ``""`` if it does not.

    An exception in either is no reason: it can be met in this process. Returns ``""`` at once for hwrl's own plugins,
    and for one that passed before.
    """
    passed = os.environ.get(REHEARSED, "").split(",")
    key = f"{entry.value}/{hook}"
    if entry.dist is None or entry.dist.name == "hwrl" or key in passed:
        return ""
    with tempfile.TemporaryDirectory() as folder:
        progress = Path(folder, "progress")
        code = "import sys; from hwrl.discovery import rehearsal; rehearsal.rehearse(*sys.argv[1:])"
        place = [entry.group, entry.name, entry.value, hook, str(progress)]
        status, last = run_python(["-c", code, *place], limit_s=LIMIT_S)
        ended = f"ended its process with status {status} before it answered"
        if status is None:
            ended = f"did not answer within {LIMIT_S:g} s: it is too slow or stuck"
        stages = progress.read_text().splitlines() if progress.is_file() else ["start"]
    if stages[-1] == _DONE:
        os.environ[REHEARSED] = ",".join(filter(None, [*passed, key]))
        return ""
    if stages[-1].startswith(_CHANGED):
        return f"its {stages[-2]} {stages[-1]}"
    return ": ".join([f"its {stages[-1]} {ended}", *last[-1:]])  # the last line often has the reason


def rehearse(group: str, name: str, value: str, hook: str, file: str) -> None:
    """Import the plugin, call its ``hook``, and end the process; write to ``file`` how far it came."""
    from hwrl.discovery.loading import load_hooks
    from hwrl.interfaces import ProbeContext

    def come_to(stage: str) -> None:
        with open(file, "a", encoding="utf-8") as progress:
            progress.write(f"{stage}\n")

    before = _process_state()

    def require_unchanged() -> None:
        for what, value in _process_state().items():
            if value != before[what]:
                come_to(f"{_CHANGED}{what} of its process")
                os._exit(1)

    come_to("import")
    try:
        caller = getattr(load_hooks(EntryPoint(name, value, group), (name,)).hook, hook)
        require_unchanged()
        come_to(hook)
        answers = caller(**({"context": ProbeContext()} if "context" in caller.spec.argnames else {}))
        for _ in islice(chain.from_iterable(answers if isinstance(answers, list) else []), _MOST_ANSWERS):
            pass  # the hooks with several answers may be generators
    except KeyboardInterrupt:
        raise  # nobody pressed a key here
    except BaseException:  # noqa: BLE001 - the process that asked meets it, too, and reports it
        pass
    require_unchanged()
    come_to(_DONE)
    os._exit(0)  # without the plugin's threads and functions for the end of a process


def _process_state() -> dict[str, object]:
    """Return what belongs to the whole process: another value would lead its files and its output elsewhere."""

    def place(descriptor: int) -> object:
        try:
            return os.fstat(descriptor)[1:3]  # its inode and device
        except OSError:
            return None

    os.umask(mask := os.umask(0o077))
    return {
        "the current directory": os.stat(".")[1:3],
        "the umask": mask,
        "the standard files": [place(descriptor) for descriptor in range(3)],
        "the timer": signal.getitimer(signal.ITIMER_REAL)[0] > 0,
        "HWRL_BACKEND": os.environ.get("HWRL_BACKEND"),
    }
