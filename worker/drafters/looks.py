"""Gives a sequence that drafts nothing a draft as a trial: the longer these bring nothing, the rarer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

MOST_DOUBLED = 16  # times the shortest interval
PROMISING = 3  # accepted tokens of a look: the text may have begun to repeat itself


@dataclass
class LookRhythm:
    """Counts the steps of one sequence."""

    shortest: int  # steps between two looks
    interval: int = 0  # steps until the coming look, no less than the shortest
    num_waited: int = 0  # steps without a tree

    def __post_init__(self) -> None:
        self.interval = max(self.interval, self.shortest)

    @property
    def is_due(self) -> bool:
        return self.num_waited >= self.interval

    @property
    def num_left(self) -> int:
        """Steps without a tree until the coming look."""
        return max(0, self.interval - self.num_waited)

    def observe(self, is_drafted: bool, num_accepted: int = 0) -> None:
        """Note that a step went by, with a tree or without. A look that found nothing to draft brought nothing."""
        if not is_drafted and not self.is_due:
            self.num_waited += 1
        elif self.num_waited and num_accepted >= PROMISING:  # it was a look
            self.num_waited, self.interval = 0, self.shortest
        elif self.num_waited:
            self.num_waited, self.interval = 0, min(2 * self.interval, MOST_DOUBLED * self.shortest)
        else:
            self.interval = self.shortest

    def state(self) -> np.ndarray:
        """The steps waited and the interval, `[2] float64`."""
        return np.array([self.num_waited, self.interval], dtype=np.float64)

    def restore(self, state: np.ndarray) -> None:
        """Take back what `state` returned. Unfit arrays raise ValueError and change nothing."""
        longest = MOST_DOUBLED * self.shortest
        if state.shape != (2,) or not np.isfinite(state).all() or (state < (0, 1)).any() or state[1] > longest:
            raise ValueError(f"rhythm of looks: found {state}, expected two numbers of steps")
        self.num_waited, self.interval = (int(number) for number in state)
