"""Run something before each line of one function, as if another thread were as fast as that."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

import torch


@contextmanager
def before_each_line(is_wanted: Callable[[CodeType], bool], act: Callable[[], None]) -> Iterator[None]:
    """Call ``act`` before each line of the functions with a wanted code, in this thread, inside the context.

    An error that ``act`` raises at the end of a ``with`` block skips its exit, as no signal does: Python calls it for a
    line of its own. So torch's gradients are switched back here.
    """

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if not is_wanted(frame.f_code):
            return None
        if event == "line":
            act()
        return trace

    before, with_gradients = sys.gettrace(), torch.is_grad_enabled()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)
        torch.set_grad_enabled(with_gradients)
