"""SIGINT and SIGTERM of a run: at once while nothing is to be saved, else after the step; twice ends it."""

from __future__ import annotations

import io
import os
import signal
from typing import Any

import pytest

from hwrl.run import interrupts
from hwrl.run.interrupts import Interrupts


class Slow(io.FileIO):
    """A pipe's end of which each write is met by a signal, once."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "wb")
        self._met = False

    def write(self, data: Any) -> int:
        if not self._met:
            self._met = True
            signal.raise_signal(signal.SIGTERM)
        return super().write(data)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_raises_at_once_until_there_is_something_to_save(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt), Interrupts():
        signal.raise_signal(number)
    assert signal.getsignal(number) is before


def test_where_there_is_an_answer_the_first_gets_it_and_the_second_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    with Interrupts(said.append) as heard:
        heard.answer = "soon"
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)  # as of timeout(1), which sends it to the process and to its group
        assert heard.pending
        monkeypatch.setattr(interrupts, "_ONE_SIGNAL_S", 0.0)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
    assert said == ["soon; once more to stop at once"]


def test_it_is_answered_while_the_same_stream_is_written_to() -> None:
    """A BufferedWriter raises if a handler writes to it in the midst of a write; the answer comes from elsewhere."""
    read, write = os.pipe()
    with os.fdopen(read, "rb") as reader, io.BufferedWriter(Slow(write)) as stream:

        def say(text: str) -> None:
            stream.write(f"{text}\n".encode())
            stream.flush()

        with Interrupts(say, answer="soon"):
            say("before")
        assert reader.readline() == b"before\n" and reader.readline().startswith(b"soon")


def test_a_hangup_ends_a_run_too_unless_it_is_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests themselves may run under nohup
    try:
        with pytest.raises(KeyboardInterrupt), Interrupts():
            signal.raise_signal(signal.SIGHUP)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
        with Interrupts() as heard:
            signal.raise_signal(signal.SIGHUP)
            assert not heard.pending
    finally:
        signal.signal(signal.SIGHUP, before)


def test_one_that_was_answered_raises_when_that_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    with Interrupts(answer="soon") as heard:
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            heard.listen()
    assert capsys.readouterr().out == "soon; once more to stop at once\n"


def test_what_another_library_has_taken_is_taken_back() -> None:
    with Interrupts() as heard:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        heard.listen()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
