"""SIGINT, SIGTERM and SIGHUP in a run: at once while there is nothing to save, else after the step."""

from __future__ import annotations

import io
import os
import signal
import time
from typing import Any

import pytest

from hwrl.run.interrupts import Interrupts


class Slow(io.FileIO):
    """One end of a pipe. A signal comes in the middle of its first write."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "wb")
        self._signalled = False

    def write(self, data: Any) -> int:
        if not self._signalled:
            self._signalled = True
            signal.raise_signal(signal.SIGTERM)
        return super().write(data)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_raises_at_once_until_there_is_something_to_save(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt), Interrupts():
        signal.raise_signal(number)
    assert signal.getsignal(number) is before


def test_with_a_message_the_first_signal_logs_it_and_the_second_raises(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hwrl.run.interrupts.SAME_SIGNAL_S", 0.05)
    logged: list[str] = []
    with Interrupts(logged.append) as interrupts:
        interrupts.defer_message = "soon"
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)  # as from timeout(1), which signals the process and then its group
        assert interrupts.pending
        time.sleep(0.1)  # the time itself, not a wait for something
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
    assert logged == ["soon; send the signal again to stop at once"]


def test_the_message_is_logged_while_the_program_writes_to_the_same_stream() -> None:
    """A BufferedWriter raises if a signal handler writes to it during a write, so a thread logs the message."""
    read, write = os.pipe()
    with os.fdopen(read, "rb") as reader, io.BufferedWriter(Slow(write)) as stream:

        def log(text: str) -> None:
            stream.write(f"{text}\n".encode())
            stream.flush()

        with Interrupts(log, defer_message="soon"):
            log("before")
        assert reader.readline() == b"before\n" and reader.readline().startswith(b"soon")


def test_a_hangup_ends_a_run_too_unless_it_is_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests themselves may run under nohup
    try:
        with pytest.raises(KeyboardInterrupt), Interrupts():
            signal.raise_signal(signal.SIGHUP)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
        with Interrupts() as interrupts:
            signal.raise_signal(signal.SIGHUP)
            assert not interrupts.pending
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_pending_signal_raises_when_the_signals_are_taken_again(capsys: pytest.CaptureFixture[str]) -> None:
    with Interrupts(defer_message="soon") as interrupts:
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            interrupts.install_handlers()
    assert capsys.readouterr().out == "soon; send the signal again to stop at once\n"


def test_signals_can_be_taken_back_from_another_library() -> None:
    with Interrupts() as interrupts:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        interrupts.install_handlers()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)


def test_a_child_that_is_not_yet_another_program_ignores_a_signal_to_the_group() -> None:
    """subprocess with a preexec_fn runs Python between fork and exec. Ray starts its processes so."""
    logged: list[str] = []
    with Interrupts(logged.append, defer_message="stopping") as interrupts:
        if (child := os.fork()) == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0)  # lets the handler run
            os._exit(int(interrupts.pending))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert not interrupts.pending
    assert logged == []
