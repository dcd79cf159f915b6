"""The course of a batch on its way to its end."""

from __future__ import annotations

import time
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Literal

from swiftbatch.scheduler.serve.batches import Batch
from swiftbatch.scheduler.serve.driving.driver_process import DriverProcess
from swiftbatch.scheduler.serve.driving.queue import Usage

Stage = Literal["to_settle", "settling", "waiting", "running", "ended"]


@dataclass
class Course:
    """The course of a batch. `usage` is what it had, as its folder said or when its driver began."""

    batch: Batch
    stage: Stage = "to_settle"
    driver: DriverProcess | None = None  # the newest one, also once it has ended
    settling: Future[bool] | None = None
    is_asked_to_cancel: bool = False
    num_failures: int = 0  # in a row
    not_before: float = 0.0  # in `time.monotonic()` seconds
    problem: str = ""  # the reason why the last try did not bring it to its end
    usage: Usage | None = None

    def begin(self, driver: DriverProcess) -> None:
        """Note that a driver is at work."""
        self.driver, self.stage = driver, "running"
        self.usage = self.usage_now(time.time())

    def usage_now(self, now: float) -> Usage:
        """The usage so far; `now` in seconds since the epoch."""
        before = self.usage or Usage(0, now, now)
        if self.driver is None or self.stage == "waiting":
            return before
        return Usage(max(before.num_tokens, self.driver.num_total_tokens), before.begun, max(before.ended, now))

    def is_due(self) -> bool:
        """Return whether the batch waits for a driver, and not for a later try."""
        return self.stage == "waiting" and time.monotonic() >= self.not_before
