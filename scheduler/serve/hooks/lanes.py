"""Messages in order of their receivers: each host has a lane, so that one that is away holds up no other."""

from __future__ import annotations

import random
import time
from collections import deque
from dataclasses import dataclass, field

from swiftbatch.jobs.backoff import Backoff
from swiftbatch.scheduler.serve.batches import Batch
from swiftbatch.scheduler.serve.hooks.outstanding import Target

PAUSES = Backoff(first=5.0, longest=3600.0)

Item = tuple[Batch, Target]
"""A batch, and to whom its end is to be told."""


@dataclass
class Lane:
    """The messages that wait for one host; `not_before` in `time.monotonic()` seconds."""

    items: deque[Item] = field(default_factory=deque)
    is_busy: bool = False
    num_failures: int = 0  # in a row
    not_before: float = 0.0

    def is_due(self) -> bool:
        return bool(self.items) and not self.is_busy and time.monotonic() >= self.not_before

    def succeed(self) -> None:
        """Drop the first message: it was taken, or is given up."""
        self.items.popleft()
        self.num_failures, self.not_before = 0, 0.0

    def fail(self) -> None:
        """Put the first message, which was not taken, behind the others; all of them wait for a while."""
        self.items.rotate(-1)
        self.num_failures += 1
        pause = PAUSES.seconds(self.num_failures) * random.uniform(0.5, 1)  # of many servers not all at once
        self.not_before = time.monotonic() + pause
