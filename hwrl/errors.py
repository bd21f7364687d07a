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
 ├─ PlacementError                  a process got no device, or one that another has
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
 ├─ DataError                       a data set or a reward function is wrong
 ├─ InputChangedError               a file that a run reads changed while it was going on
 ├─ RunDirectoryError               a file of the run directory cannot be written or read
 └─ EngineError                     a train or rollout engine cannot do what was asked
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path


def manual(page: str) -> Path:
    """Return the file of a manual's page: in the package if a wheel is installed, beside it in the tree."""
    shipped = Path(__file__).parent / "docs" / page
    return shipped if shipped.is_file() else Path(__file__).parents[1] / "docs" / page


class HwrlError(Exception):
    """Base of all hwrl errors.

    ``what`` failed, ``why``, and the ``fix``; all three are in the message and are attributes. ``code`` is the
    class's section in ``docs/errors.md``. Survives pickling, so it reads the same from another process.
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
    """Raised when detection cannot pick one backend safely."""


class BackendLoadError(BackendError):
    """Raised when a backend's plugin is broken, duplicate, misspelt or written for another API version."""


class BackendAlreadyChosenError(BackendError):
    """Raised by a second, different ``set_backend``."""


class UnsupportedError(HwrlError):
    """Raised when the backend lacks a capability; never replaced by a no-op."""


class CommError(HwrlError):
    """Raised when a process group or a collective failed."""


class CommTimeoutError(CommError):
    """Raised when a collective or a rendezvous did not finish in time; names the missing peer if it is known."""


class CommAbortedError(CommError):
    """Raised by operations on a group that was aborted or closed."""


class PeerLostError(CommError):
    """Raised when a member of the group closed its connection or died."""


class PlacementError(HwrlError):
    """Raised when a process of a run did not get the device that it was given, or got one that another process has."""


class DeviceMemoryError(HwrlError):
    """Raised when the device has no room for what was asked; says who holds how much of it."""


class MemoryStateError(HwrlError):
    """Raised when offloaded memory is used, or when an offload or load cannot be done."""


class WeightsError(HwrlError):
    """Raised when weights cannot be planned, sent, received or committed."""


class LayoutMismatchError(WeightsError):
    """Raised at connect when sender and receiver disagree about names, dtypes or shapes."""


class TransferFailedError(WeightsError):
    """Raised when a transfer did not commit; the receivers go on serving the old version."""


class ReceiverExcludedError(WeightsError):
    """Raised in a receiver that was excluded; it must connect again before it can serve new versions."""


class CheckpointError(HwrlError):
    """Raised when a checkpoint cannot be written or read."""


class CheckpointNotFoundError(CheckpointError):
    """Raised when there is no complete checkpoint to load."""


class CheckpointCorruptError(CheckpointError):
    """Raised when a checkpoint's files and its manifest disagree."""


class CheckpointSaveError(CheckpointError):
    """Raised when a save, in the foreground or the background, or a join did not commit."""


class ConfigError(HwrlError):
    """Raised when a configuration key or value is wrong."""


class DataError(HwrlError):
    """Raised when a data set or a reward function cannot be used."""


class InputChangedError(HwrlError):
    """Raised when a process of a run finds another content in a file than the run began with."""


class RunDirectoryError(HwrlError):
    """Raised when a file of the run directory cannot be written or read: no space, no permission, or it is gone."""


class EngineError(HwrlError):
    """Raised when a train or rollout engine cannot do what was asked."""


def attempt_all(*acts: Callable[[], object], after: BaseException | None = None) -> None:
    """Call each of ``acts``, also after errors; then raise the first error, with the later ones as notes on it.

    With ``after``, an error that the caller is about to raise, nothing is raised, and all errors are notes on that.
    """
    first = after
    for act in acts:
        try:
            act()
        except Exception as exc:  # noqa: BLE001 - raised below, or noted on what is raised
            if first is None:
                first = exc
            else:
                note(first, exc)
    if first is not None and after is None:
        raise first


def note(error: BaseException, later: Exception) -> None:
    """Add ``later``, which came after ``error``, to it as a note, unless it says the same."""
    text = f"{type(later).__name__}: {str(later) or repr(later)}"
    if str(later) != str(error) and f"then {text}" not in getattr(error, "__notes__", []):
        error.add_note(f"then {text}")


def with_notes(error: BaseException) -> str:
    """Return the message of ``error`` and what was noted on it."""
    return "\n".join([str(error), *getattr(error, "__notes__", [])])
