"""SIGINT and SIGTERM of a run: at once while nothing is to be saved, else after the step; twice ends it."""

from __future__ import annotations

import signal

import pytest

from hwrl.run import interrupts
from hwrl.run.interrupts import Interrupts


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
        assert heard.pending and said == ["soon; once more to stop at once"]
        monkeypatch.setattr(interrupts, "_ONE_SIGNAL_S", 0.0)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)


def test_one_that_was_answered_raises_when_that_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    with Interrupts(answer="soon") as heard:
        signal.raise_signal(signal.SIGTERM)
        assert capsys.readouterr().out == "soon; once more to stop at once\n"
        with pytest.raises(KeyboardInterrupt):
            heard.listen()


def test_what_another_library_has_taken_is_taken_back() -> None:
    with Interrupts() as heard:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        heard.listen()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
