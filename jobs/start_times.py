"""Seconds of a process by what it did at its start."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

SECONDS = Counter[str]()


@contextmanager
def timed(what: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    SECONDS[what] += time.perf_counter() - started  # type: ignore[assignment]
