"""The clock of steps: the time that passes, or the processor time of one thread, which no other program adds to."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator


def _passing() -> float:
    return time.perf_counter()


_read: Callable[[], float] = _passing


def seconds_now() -> float:
    """Read the clock, in seconds. Differences of two readings mean something, a reading alone does not."""
    return _read()


@contextlib.contextmanager
def by_processor() -> Iterator[None]:
    """Count the seconds that the processor spends on the calling thread, while the context lasts.

    That is the work of a step where one thread does all of it.
    """
    global _read
    _read = time.thread_time
    try:
        yield
    finally:
        _read = _passing
