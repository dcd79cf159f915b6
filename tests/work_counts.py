"""Counts of a call's work, equal on every machine."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Work:
    """Calls and lines of Python counted in this thread."""

    def __init__(self) -> None:
        self.num_calls = 0  # of functions, also in C
        self.num_lines = 0  # where lines are counted


@contextmanager
def counted_calls(work: Work | None = None) -> Iterator[Work]:
    """Count each turn of a generator as a call."""
    work, before = work or Work(), sys.getprofile()

    def count(frame: FrameType, event: str, argument: Any) -> None:
        work.num_calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        yield work
    finally:
        sys.setprofile(before)


def num_lines(call: Callable[[], object]) -> int:
    """Count the lines of Python that a call runs, repeated ones again."""
    work, before = Work(), sys.gettrace()

    def count(frame: FrameType, event: str, argument: Any) -> Any:
        work.num_lines += event == "line"
        return count

    sys.settrace(count)
    try:
        call()
    finally:
        sys.settrace(before)
    return work.num_lines
