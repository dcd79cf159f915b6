"""A clock that only tests advance, equal on every machine."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any, TypeVar

import pytest

Result = TypeVar("Result")


class SimulatedClock:
    """Seconds that pass by sleeping and by timed calls."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds

    def taking(self, seconds: Callable[..., float], call: Callable[..., Result]) -> Callable[..., Result]:
        """Wrap a call so that it takes `seconds` of its arguments."""

        @functools.wraps(call)
        def timed(*args: Any, **kwargs: Any) -> Result:
            self.now += seconds(*args, **kwargs)
            return call(*args, **kwargs)

        return timed

    def rule(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Make all code use this clock."""
        for name in ("perf_counter", "monotonic"):
            monkeypatch.setattr(time, name, self)
        monkeypatch.setattr(time, "sleep", self.sleep)
