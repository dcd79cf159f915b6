"""Counts of what a call does: the same on every machine, however busy it is."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Work:
    """Python's calls and lines in this thread while they were counted."""

    def __init__(self) -> None:
        self.num_calls = 0  # of functions, also of those in C
        self.num_lines = 0  # where lines are counted


@contextmanager
def counted_calls(work: Work | None = None) -> Iterator[Work]:
    """Count calls inside the block, each turn of a generator as one."""
    work, before = work or Work(), sys.getprofile()

    def count(frame: FrameType, event: str, argument: Any) -> None:
        work.num_calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        yield work
    finally:
        sys.setprofile(before)


def num_lines(call: Callable[[], object]) -> int:
    """Lines of Python that a call runs through, those of a loop at each of its turns."""
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
