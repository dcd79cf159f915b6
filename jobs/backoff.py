"""Back-off: pauses between tries that get twice as long with each failure, up to a bound."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tenacity import RetryCallState

LEAST_RANDOM_SECONDS = 0.2
MOST_DOUBLINGS = 64  # more would leave the range of floats some day


@dataclass(frozen=True)
class Backoff:
    """The pauses, from `first` to `longest`, in seconds."""

    first: float
    longest: float

    def seconds(self, num_failures: int) -> float:
        """Return the pause after `num_failures` failures in a row, of which there is at least one."""
        return min(self.longest, self.first * 2.0 ** min(num_failures - 1, MOST_DOUBLINGS))

    def at_random(self, state: RetryCallState) -> float:
        """Draw a part of the pause, for `tenacity`: many that fail at once don't come back at once."""
        return random.uniform(LEAST_RANDOM_SECONDS, max(LEAST_RANDOM_SECONDS, self.seconds(state.attempt_number)))
