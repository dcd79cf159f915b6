"""What steps take beside the forward that costs predict, with drafts and without: measured as they pass.

Proposing, candidates, longer updates and a busy machine are in it. The difference of the two is what drafting costs
beside its rows. Where all steps draft, one now and then does not, so that both are known.
"""

from __future__ import annotations

import statistics
import time
from collections import deque

NUM_KEPT = 15  # steps of each kind, of which the median counts
FEWEST = 3  # that tell anything
LOOK_EVERY, LOOK_SOON = 64, 16  # steps with drafts between two without; until there are enough of these


class StepClock:
    """From the planning of one step to that of the next."""

    def __init__(self) -> None:
        self._beside: dict[bool, deque[float]] = {is_drafted: deque(maxlen=NUM_KEPT) for is_drafted in (False, True)}
        self._open: tuple[float, float, bool] | None = None
        self._num_drafted = 0  # steps since the last one without drafts

    @property
    def is_plain_due(self) -> bool:
        """Whether the coming step should have no drafts, to see what it takes."""
        return self._num_drafted >= (LOOK_SOON if len(self._beside[False]) < FEWEST else LOOK_EVERY)

    @property
    def drafting_seconds(self) -> float:
        """What drafting adds to a step beside the rows of its forward; 0 before enough steps have passed."""
        if min(len(seconds) for seconds in self._beside.values()) < FEWEST:
            return 0.0
        plain, drafted = (statistics.median(self._beside[is_drafted]) for is_drafted in (False, True))
        return max(0.0, drafted - plain)

    def begin(self, forward_seconds: float, is_drafted: bool) -> None:
        """A step begins whose forward should take so long; the one before it, if it was begun here, has ended."""
        self.end()
        self._open = time.perf_counter(), forward_seconds, is_drafted
        self._num_drafted = self._num_drafted + 1 if is_drafted else 0

    def end(self) -> None:
        """The step is over. What takes twice as long as it should was no step alone: it counts as that and no more."""
        if self._open is not None:
            begun, expected, is_drafted = self._open
            self._beside[is_drafted].append(min(time.perf_counter() - begun - expected, expected))
            self._open = None

    def forget(self) -> None:
        """What goes on now is no step of either kind."""
        self._open = None
