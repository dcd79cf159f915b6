"""A clock that only tests advance."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any, TypeVar

import pytest

Result = TypeVar("Result")


class SimulatedClock:
    """Time passes by sleeping and by timed calls."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds

    def taking(self, seconds: Callable[..., float], call: Callable[..., Result]) -> Callable[..., Result]:
        """Let `call` take `seconds` of its arguments."""

        @functools.wraps(call)
        def timed(*args: Any, **kwargs: Any) -> Result:
            self.now += seconds(*args, **kwargs)
            return call(*args, **kwargs)

        return timed

    def rule(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("perf_counter", "monotonic"):
            monkeypatch.setattr(time, name, self)
        monkeypatch.setattr(time, "sleep", self.sleep)
