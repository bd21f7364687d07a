"""Every error that hwrl raises: what failed, why, and what to do.

HwrlError
 ├─ BackendError
 │   ├─ BackendNotFoundError        no backend has that name
 │   ├─ BackendUnavailableError     the named backend cannot run here
 │   ├─ BackendAmbiguousError       several backends could run, or none safely
 │   ├─ BackendLoadError            a plugin is broken, duplicate, misspelt or for another API version
 │   └─ BackendAlreadyChosenError   a second, different choice
 ├─ UnsupportedError                the backend lacks a capability
 ├─ CommError
 │   ├─ CommTimeoutError            a peer did not come in time
 │   ├─ CommAbortedError            the group was aborted
 │   └─ PeerLostError               a member of the group died
 ├─ PlacementError                  a process got no device, or a device of another process
 ├─ DeviceMemoryError               the device has no room
 ├─ MemoryStateError                offloaded memory was used, or an offload cannot be done
 ├─ WeightsError
 │   ├─ LayoutMismatchError         sender and receiver disagree about the tensors
 │   ├─ TransferFailedError         a weight transfer did not commit
 │   └─ ReceiverExcludedError       this receiver was excluded from the transfer
 ├─ CheckpointError
 │   ├─ CheckpointNotFoundError     nothing complete to resume from
 │   ├─ CheckpointCorruptError      the manifest and the files disagree
 │   └─ CheckpointSaveError         a save did not commit
 ├─ ConfigError                     a configuration value is wrong
 ├─ DataError                       a data set or a user's function is wrong
 ├─ InputChangedError               an input file changed during the run
 ├─ RunDirectoryError               a file of the run directory cannot be written or read
 └─ EngineError                     a train or rollout engine cannot do an operation
     └─ NonFiniteGradientError      the gradients of a training step have NaN or inf
"""

from __future__ import annotations

import difflib
import re
import traceback
from collections.abc import Callable, Collection
from pathlib import Path

_WHY_CHARACTERS = 300


def manual(page: str) -> Path:
    """Return the path of a docs page: inside an installed wheel, or beside the package in the source tree."""
    shipped = Path(__file__).parent / "docs" / page
    return shipped if shipped.is_file() else Path(__file__).parents[1] / "docs" / page


class HwrlError(Exception):
    """Base of all hwrl errors.

    ``what`` failed, ``why``, and the ``fix`` are attributes and parts of the message. ``code`` is the class's section
    in ``docs/errors.md``. Errors can be pickled, so they read the same from another process.
    """

    code = "hwrl"

    def __init_subclass__(cls) -> None:
        cls.code = re.sub(r"(?<=[a-z])(?=[A-Z])", "-", cls.__name__.removesuffix("Error")).lower()

    def __init__(self, what: str, *, why: str = "", fix: str = "") -> None:
        self.what, self.why, self.fix = what, why, fix
        lines = [what]
        if why:
            lines.append(f"  why: {why}")
        if fix:
            lines.append(f"  fix: {fix}")
        super().__init__("\n".join([*lines, f"  see: {manual('errors.md')}#{self.code}"]))

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.what, self.why, self.fix)


def _rebuild(kind: type[HwrlError], what: str, why: str, fix: str) -> HwrlError:
    return kind(what, why=why, fix=fix)


class BackendError(HwrlError):
    """Raised when a backend cannot be found, chosen or loaded."""


class BackendNotFoundError(BackendError):
    """Raised when no installed backend has the requested name."""


class BackendUnavailableError(BackendError):
    """Raised when the requested backend is installed but cannot run on this machine."""


class BackendAmbiguousError(BackendError):
    """Raised when detection cannot choose a backend safely."""


class BackendLoadError(BackendError):
    """Raised when a backend's plugin is broken, duplicate, misspelt or written for another API version."""


class BackendAlreadyChosenError(BackendError):
    """Raised by a second, different ``set_backend``."""


class UnsupportedError(HwrlError):
    """Raised when the backend lacks a capability; hwrl never does nothing instead."""


class CommError(HwrlError):
    """Raised when a process group or a collective fails."""


class CommTimeoutError(CommError):
    """Raised when a collective or a rendezvous does not finish in time; names the missing peer if it is known."""


class CommAbortedError(CommError):
    """Raised by operations on an aborted or closed group."""


class PeerLostError(CommError):
    """Raised when a member of the group closes its connection or dies."""


class PlacementError(HwrlError):
    """Raised when a process of a run does not get its assigned device, or gets a device of another process."""


class DeviceMemoryError(HwrlError):
    """Raised when the device has no room for an allocation; tells how its memory is used."""


class MemoryStateError(HwrlError):
    """Raised when offloaded memory is used, or when an offload or a load fails."""


class WeightsError(HwrlError):
    """Raised when weights cannot be planned, sent, received or committed."""


class LayoutMismatchError(WeightsError):
    """Raised at connect when sender and receiver disagree about names, dtypes or shapes."""


class TransferFailedError(WeightsError):
    """Raised when a transfer did not commit; the receivers continue with the old version."""


class ReceiverExcludedError(WeightsError):
    """Raised in an excluded receiver; it must connect again before it can serve new versions."""


class CheckpointError(HwrlError):
    """Raised when a checkpoint cannot be written or read."""


class CheckpointNotFoundError(CheckpointError):
    """Raised when there is no complete checkpoint to load."""


class CheckpointCorruptError(CheckpointError):
    """Raised when a checkpoint's files and its manifest disagree."""


class CheckpointSaveError(CheckpointError):
    """Raised when a save, in the foreground or the background, or a join does not commit."""


class ConfigError(HwrlError):
    """Raised when a configuration key or value is wrong."""


class DataError(HwrlError):
    """Raised when a data set or a user's function cannot be used."""


class InputChangedError(HwrlError):
    """Raised when a process of a run finds an input file changed since the start of the run."""


class RunDirectoryError(HwrlError):
    """Raised when a file of the run directory cannot be written or read: no space, no permission, or it is gone."""


class EngineError(HwrlError):
    """Raised when a train or rollout engine cannot do a requested operation."""


class NonFiniteGradientError(EngineError):
    """Raised by a train engine if the norm of the gradients is NaN or infinite; the step has changed nothing."""


def attempt_all(*acts: Callable[[], object], after: BaseException | None = None) -> None:
    """Call each of ``acts``, even after errors; then raise the first error, with the later ones as notes.

    If the caller is about to raise an error, it passes it as ``after``: then all errors become notes on ``after``, and
    nothing is raised here.
    """
    first = after
    for act in acts:
        try:
            act()
        except Exception as exc:  # noqa: BLE001 - raised below, or added as a note
            if first is None:
                first = exc
            else:
                note(first, exc)
    if first is not None and after is None:
        raise first


def note(error: BaseException, later: Exception) -> None:
    """Add the later error ``later`` to ``error`` as a note, unless the messages are equal."""
    text = f"{type(later).__name__}: {message_of(later)}"
    if message_of(later) != message_of(error) and f"then {text}" not in getattr(error, "__notes__", []):
        error.add_note(f"then {text}")


def did_you_mean(name: str, known: Collection[str], *, otherwise: str = "") -> str:
    """Return the question whether the most similar of the ``known`` names was meant; ``otherwise`` if none is similar.

    >>> did_you_mean("cup", ["cpu", "other"]), did_you_mean("x", ["cpu"], otherwise="remove it")
    ("did you mean 'cpu'?", 'remove it')
    """
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]!r}?" if close else otherwise


def with_notes(error: BaseException) -> str:
    """Return the message of ``error`` and its notes."""
    return "\n".join([message_of(error), *getattr(error, "__notes__", [])])


def first_line(error: BaseException) -> str:
    """Return the first line of the error's message that is not empty, or its type without one.

    Errors of torch and Ray have a stack below it. The ``__str__`` of a user's error may raise; this does not.
    """
    shown = _shown(str, error)
    return next((line.strip() for line in shown.splitlines() if line.strip()), type(error).__name__)


def in_one_line(error: BaseException) -> str:
    """Return the error's type and the first line of its message, at most 300 characters."""
    line = first_line(error)
    return line if line == type(error).__name__ else f"{type(error).__name__}: {line[:_WHY_CHARACTERS]}"


def lines_of(error: BaseException) -> str:
    """Return the lines of a user's function that raised ``error``, each after a newline; for the one who called it."""
    trace = error.__traceback__
    below = traceback.format_tb(trace.tb_next) if trace is not None else []
    return "".join(f"\n{frame.rstrip()}" for frame in below)


def message_of(error: BaseException) -> str:
    """Return the message of ``error``, or its repr without one. Both may be user code and raise; this does not."""
    return _shown(str, error) or _shown(repr, error)


def short_repr(value: object) -> str:
    """Return ``repr(value)``, cut off after 200 characters. A user's ``__repr__`` may raise; this does not."""
    text = _shown(repr, value)
    return text if len(text) <= 200 else f"{text[:200]}…"


def _shown(show: Callable[[object], str], value: object) -> str:
    try:
        return str.__str__(show(value))  # the text of a subclass may raise, too
    except BaseException as exc:  # noqa: BLE001 - users' code may raise anything, also SystemExit
        return f"<{type(value).__name__}; its {show.__name__} raised {type(exc).__name__}>"
