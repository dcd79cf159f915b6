"""Measures what steps take beside what costs predict, by their kind, as they pass.

That has proposing, candidates, longer updates, caches that something else was in and a busy machine in it. So the cost
of drafting beside its rows is known. Where all steps draft, some now and then do not, so that both kinds stay known.
"""

from __future__ import annotations

import statistics
from collections import deque
from typing import Literal

from swiftbatch.worker.forward.step_costs import seconds_now

StepKind = Literal["plain", "tree", "chain"]
NUM_KEPT = 15  # steps of each kind, of which the median counts
FEWEST = 3  # steps of a kind that tell anything
ENOUGH = 9  # plain steps: of fewer all may have been slow by chance, and drafts seem to pay for hundreds of steps
MOST_BESIDE = 9  # times the expected seconds: on a machine that became busy all steps take twice as long as expected
FORGOTTEN_FOR_RETRIAL = 5  # steps that are forgotten at once: a third, so that three doubts let drafts be tried anew
SETTLED = 2  # steps of a kind before one that counts: what another kind left in the processor's caches takes its time
PROBE_EVERY, PROBE_SOON = 96, 10  # steps with drafts between looks at plain ones; until there are enough of these


def together(forward_seconds: float, beside: float) -> float:
    """The seconds of a step: at least half its forward, however much sooner than expected such steps were done."""
    return max(forward_seconds + beside, forward_seconds / 2)


class StepClock:
    """Times steps, from the planning of one to that of the next."""

    def __init__(self) -> None:
        self._beside: dict[StepKind, deque[float]] = {}
        self._open: tuple[float, float] | None = None  # the running step's begin, and the seconds that it should take
        self._kind: StepKind | None = None  # of the newest step
        self._num_alike = 0  # steps of that kind in a row
        self._num_drafted = 0  # steps with drafts since the last plain one
        self._has_passed_by = False  # whether plain steps were seen that nobody was asked of: these are what plain is

    @property
    def is_plain_due(self) -> bool:
        """True if the coming step should have no drafts, to see what it takes."""
        if self._kind == "plain":
            return self.num_plain_due > 0
        return self._num_drafted >= (PROBE_EVERY if len(self._beside.get("plain", ())) >= ENOUGH else PROBE_SOON)

    @property
    def num_plain_due(self) -> int:
        """Plain steps that should follow the one that was begun, to see what one takes."""
        return max(0, SETTLED + FEWEST - self._num_alike)

    def beside(self, kind: StepKind, otherwise: float) -> float:
        """The seconds of a step beside those expected, below 0 where it is done sooner.

        `otherwise` before enough steps of the kind have passed.
        """
        return statistics.median(self._beside[kind]) if self._is_known(kind) else otherwise

    @property
    def drafting_seconds(self) -> float:
        """The seconds that a tree adds to a step beside the rows of its forward; 0 before enough steps have passed."""
        if not self._is_known("plain"):
            return 0.0
        plain = self.beside("plain", 0.0)
        return max(0.0, self.beside("tree", plain) - plain)

    def begin(self, expected_seconds: float, kind: StepKind) -> None:
        """Begin a step that should take so long; the one before it, if it was begun here, has ended."""
        self.end()
        self._num_alike = self._num_alike + 1 if kind == self._kind else 1
        self._num_drafted = 0 if kind == "plain" else self._num_drafted + 1
        self._kind, self._open = kind, (seconds_now(), expected_seconds)

    def pass_by(self, expected_seconds: float, seconds: list[float]) -> None:
        """Take in plain steps behind the one that was begun, of which nobody was asked: what the newest ones took.

        The begun one was no such step, and its end is not known.
        """
        self._open = None
        self._has_passed_by = self._has_passed_by or bool(seconds)
        for each in seconds[max(0, SETTLED - self._num_alike) :][-FEWEST:]:
            self._keep("plain", each, expected_seconds)
        self._num_alike += len(seconds)

    def expect(self, seconds: float) -> None:
        """Expect the step that was begun to take so much longer."""
        if self._open is not None:
            self._open = self._open[0], self._open[1] + seconds

    def end(self) -> None:
        """End the step. What took ten times as long as it should was no step alone: it counts as ten times, no more."""
        if self._open is not None and self._kind is not None and self._num_alike > SETTLED:
            begun, expected = self._open
            if self._kind != "plain" or not self._has_passed_by:
                self._keep(self._kind, seconds_now() - begun, expected)
        self._open = None

    def doubt(self, kind: StepKind) -> None:
        """Forget the longest known steps of a kind that does not pay, until the kind is new and tried again.

        A neighbour may have slowed the known ones down, and while no such step is made, none tells otherwise.
        """
        for _ in range(FORGOTTEN_FOR_RETRIAL):
            if kept := self._beside.get(kind):
                kept.remove(max(kept))

    def _keep(self, kind: StepKind, seconds: float, expected_seconds: float) -> None:
        kept = self._beside.setdefault(kind, deque(maxlen=NUM_KEPT))
        kept.append(min(seconds - expected_seconds, MOST_BESIDE * expected_seconds))

    def _is_known(self, kind: StepKind) -> bool:
        return len(self._beside.get(kind, ())) >= FEWEST
