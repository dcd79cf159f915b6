"""A clock that goes on where a test says so: what is measured or waited for is the same on every machine."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any, TypeVar

import pytest

Result = TypeVar("Result")


class SimulatedClock:
    """Seconds that pass when somebody sleeps, and when a call that was said to take some is made."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds

    def taking(self, seconds: Callable[..., float], call: Callable[..., Result]) -> Callable[..., Result]:
        """The call, which takes `seconds` of its arguments."""

        @functools.wraps(call)
        def timed(*args: Any, **kwargs: Any) -> Result:
            self.now += seconds(*args, **kwargs)
            return call(*args, **kwargs)

        return timed

    def rule(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Have all code look at this clock, and sleep by it."""
        for name in ("perf_counter", "monotonic"):
            monkeypatch.setattr(time, name, self)
        monkeypatch.setattr(time, "sleep", self.sleep)
