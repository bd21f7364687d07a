"""Run something before each line of one function, as if another thread were as fast as that."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any


@contextmanager
def before_each_line(is_wanted: Callable[[CodeType], bool], act: Callable[[], None]) -> Iterator[None]:
    """Call ``act`` before each line of the functions with a wanted code, in this thread, inside the context."""

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if not is_wanted(frame.f_code):
            return None
        if event == "line":
            act()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)
