"""An interrupt before any line of a receive or a publish: the state of both ends is the truth, and nothing is lost."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import CodeType

import pytest

from hwrl.comm import Store
from hwrl.errors import HwrlError, ReceiverExcludedError
from tests.support.interrupting import before_each_line
from tests.support.weight_link import beside, model_of, receiver_of, sender_of, store

__all__ = ["store"]  # the fixture
_RECEIVER = ("weights/receiver.py", "weights/intake.py")
_PUBLISHING = {"publish", "_publish", "commit", "store_version", "run", "_decide"}


def _receives(code: CodeType) -> bool:
    return code.co_filename.endswith(_RECEIVER)


def _takes(code: CodeType) -> bool:
    return code.co_filename.endswith(_RECEIVER[1:])


def _publishes(code: CodeType) -> bool:
    return code.co_name in _PUBLISHING and code.co_filename.endswith(("weights/sender.py", "weights/transaction.py"))


def _interrupted_at(number: int, act: Callable[[], object], is_wanted: Callable[[CodeType], bool]) -> bool:
    """Return whether line ``number`` of ``act`` was reached: there it is interrupted."""
    lines = itertools.count(1)

    def interrupt() -> None:
        if next(lines) == number:
            raise KeyboardInterrupt

    try:
        with before_each_line(is_wanted, interrupt):
            act()
    except KeyboardInterrupt:
        return True
    return False


def test_an_interrupted_receive_of_a_stored_version_loses_nothing(store: Store) -> None:
    with sender_of(store, transport="host") as sender, receiver_of(store) as receiver:
        for version in itertools.count(1):
            sender.publish(version, model_of(version))
            if not _interrupted_at(version, lambda: receiver.receive(timeout_s=0.0), _receives):
                break
            assert receiver.version in (None, version - 1, version)
            assert receiver.poll() == version
            received = receiver.receive(timeout_s=0.0)
            assert (received.version, received["b"].item()) == (version, version)
        assert version > 20, "the lines of the calls above"


@pytest.mark.extended
def test_an_interrupted_receive_counts_as_received_by_both_ends_or_by_none(store: Store) -> None:
    with sender_of(store, timeout_s=2.0) as sender, receiver_of(store) as receiver:
        for version in itertools.count(1):
            publishing = beside(lambda: sender.publish(version, model_of(version)))  # noqa: B023 - ends below
            interrupted = _interrupted_at(version, receiver.receive, _takes)  # before that, the sender waits for it
            publishing()
            if not interrupted:
                break
            try:
                poll = receiver.poll()  # joins again if it has left
            except ReceiverExcludedError:
                receiver.join()
                poll = None
            if poll is None and receiver.version != version:
                assert sender.new_receivers() == ("r0",)
                publishing = beside(lambda: sender.publish(version, model_of(version)))  # noqa: B023 - ends below
                assert receiver.receive().version == version
                publishing()
            else:
                assert receiver.receive(timeout_s=60.0).version == version
        assert version > 20, "the lines of the calls above"


@pytest.mark.parametrize("transport", [pytest.param("device", marks=pytest.mark.extended), "host"])
def test_an_interrupted_publish_has_the_version_that_receivers_have(store: Store, transport: str) -> None:
    with sender_of(store, transport=transport) as sender, receiver_of(store) as receiver:
        for version in itertools.count(1):
            receiving = beside(lambda: receiver.receive(timeout_s=600.0))
            interrupted = _interrupted_at(version, lambda: sender.publish(version, model_of(1)), _publishes)  # noqa: B023 - it is called here
            if sender.version == version:
                assert receiving().version == version
            else:
                receiver.cancel()
                with pytest.raises(HwrlError):
                    receiving()
                receiver.forget_cancellation()  # it may have come after an error of the receive, or before that news
                with pytest.raises(HwrlError):
                    receiver.receive(timeout_s=0.0)
                assert receiver.version == sender.version
            if not interrupted:
                break
        assert version > 20, "the lines of the calls above"
