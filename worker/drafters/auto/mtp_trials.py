"""Two ways to draft, by turns: steps go the way that brings more tokens per second here, as the clock says.

The other way is tried again now and then, the rarer the longer it stays the slower one. Both hear of all steps, but for
hidden states: those far in front of a trial nobody takes, since each costs a launch on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many

import numpy as np
import torch

from swiftbatch.worker.drafters.auto.plain_trials import Passed, TokenRate, passed_in
from swiftbatch.worker.drafters.auto.repeated_text import RepeatingDrafter
from swiftbatch.worker.drafters.drafter_interface import DraftCounters, Drafter, DraftRequest, ReadRows, Verified
from swiftbatch.worker.forward.step_costs import seconds_now
from swiftbatch.worker.kv.full_cache import FullKVCache
from swiftbatch.worker.sampling.draft_tree import DraftTree
from swiftbatch.worker.sampling.sequence import Sequence
from swiftbatch.worker.sampling.verification import Verification

SETTLING = 4  # steps at the beginning of a turn that tell nothing
FIRST_PERIOD, TRIAL = 48, 24  # steps
SHORTEST_PERIOD, LONGEST_PERIOD = 256, 4096  # steps between trials
HEARD = 512  # steps in front of a turn that predicts, whose hidden states are taken
BETTER = 1.05  # times the tokens per second of the way that steps go


class TrialDrafter(Drafter):
    """Drafts as `otherwise` does, or with `predicting`, a drafter that reads hidden states, where that is faster."""

    needs_top_k = needs_hidden = True

    def __init__(
        self, otherwise: RepeatingDrafter, predicting: Drafter, clock: Callable[[], float] = seconds_now
    ) -> None:
        self.otherwise, self.predicting, self.phases = otherwise, predicting, otherwise.phases
        self._clock = clock
        self.is_predicting = False  # in the newest step
        self._prefers_predicting = False  # else the turn is a trial, where it predicts
        self._period, self._interval = (
            FIRST_PERIOD,
            SHORTEST_PERIOD,
        )  # steps of this turn; of the next one between trials
        self._num_steps = 0  # of this turn
        self._rates = {False: TokenRate(), True: TokenRate()}
        self._names: list[str] = []  # of the newest step's sequences
        self._begun = 0.0
        self._passed = Passed()  # what the newest step brought

    @property
    def draft_kind(self) -> str:
        return self.predicting.draft_kind if self.is_predicting else self.otherwise.draft_kind

    @property
    def wants_candidates(self) -> bool:
        return self.is_predicting or self.otherwise.wants_candidates

    @property
    def wants_hidden(self) -> bool:
        return self.is_predicting or self._period - self._num_steps < HEARD

    @property
    def counters(self) -> DraftCounters:
        return self.otherwise.counters

    def start(self, sequence: Sequence, cache: FullKVCache) -> None:
        self.otherwise.start(sequence, cache)
        self.predicting.start(sequence, cache)

    def propose(self, requests: list[DraftRequest]) -> list[DraftTree]:
        self._observe([request.sequence.sequence_id for request in requests])
        self._end_period()
        if not self.is_predicting:
            return self.otherwise.propose(requests)
        self.otherwise.leave_out_step()
        return self.predicting.propose(requests)

    def learn(self, rows: ReadRows) -> None:
        self.otherwise.learn(rows)

    def read(self, sequence: Sequence, position: int, hidden: torch.Tensor) -> None:
        self.predicting.read(sequence, position, hidden)

    def update(self, sequence: Sequence, verification: Verification) -> None:
        self.update_all([(sequence, verification)])

    def update_all(self, verified: Many[Verified]) -> None:
        self._passed = passed_in(verified)
        if self.is_predicting:
            self.predicting.update_all(verified)
            for each in verified:
                self.otherwise.hear(*each)
            return
        self.otherwise.update_all(verified)
        for sequence, verification in verified:
            if verification.hidden is not None:
                position = len(sequence) - len(verification.committed_ids) - 1
                self.predicting.read(sequence, position, verification.hidden)

    def stop(self, sequence: Sequence) -> None:
        self.otherwise.stop(sequence)
        self.predicting.stop(sequence)

    def state(self, sequence: Sequence) -> dict[str, np.ndarray]:
        """Return what `otherwise` keeps. The faster way is left out: another machine soon finds its own."""
        return self.otherwise.state(sequence)

    def restore(self, sequence: Sequence, state: dict[str, np.ndarray]) -> None:
        self.otherwise.restore(sequence, state)

    def _observe(self, names: list[str]) -> None:
        """Take in the step that ended, unless others share the coming one: who came was read meanwhile."""
        now = self._clock()
        if names == self._names and self._num_steps > SETTLING:
            self._rates[self.is_predicting].observe(self._passed, now - self._begun)
        if len(names) != len(self._names):  # shared steps cost otherwise
            self._interval = SHORTEST_PERIOD
            self._period = min(self._period, self._num_steps + SHORTEST_PERIOD)
        self._names, self._begun, self._passed = names, now, Passed()

    def _end_period(self) -> None:
        """Count the coming step, and begin another turn where this one is over."""
        self._num_steps += 1
        if self._num_steps <= self._period:
            return
        if self.is_predicting == self._prefers_predicting:
            self._begin(not self.is_predicting, TRIAL)
            self._rates[self.is_predicting] = TokenRate()
            return
        tried, other = self._rates[self.is_predicting].value, self._rates[not self.is_predicting].value
        if tried > BETTER * other:
            self._prefers_predicting, self._interval = self.is_predicting, SHORTEST_PERIOD
        else:
            self._interval = min(2 * self._interval, LONGEST_PERIOD)
        self._begin(self._prefers_predicting, self._interval)

    def _begin(self, is_predicting: bool, num_steps: int) -> None:
        self.is_predicting, self._period, self._num_steps = is_predicting, num_steps, 1
