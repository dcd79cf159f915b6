"""Plain decoding of several tokens in one native call: what lies between steps is done once for all of them."""

from __future__ import annotations

import math

from swiftbatch.metrics.worker_counters import EngineCounters
from swiftbatch.worker.drawing.verification import Walk
from swiftbatch.worker.engine.slot import Slot
from swiftbatch.worker.engine.stopping import ending_tokens
from swiftbatch.worker.target.target import TargetModel
from swiftbatch.worker.target.tiles import row_ahead

MOST_STEPS = 32  # in a call: what lies between two calls is little beside them then
FEW_STEPS = 8  # where a text or a loop may end a sequence: what is drawn behind its end was drawn for nothing
MOST_SECONDS = 0.1  # of a call: whoever wants something of a worker waits for its end
FEW_POSITIONS = 1024  # fewer take little time beside all else in a step


class PlainRuns:
    """Runs of plain steps, where the kernels can take some at once: their tokens are those of steps one by one."""

    def __init__(self, target: TargetModel, counters: EngineCounters) -> None:
        forwards = target.forwards
        is_fit = target.cache_shape.recurrent is None and not forwards.has_experts and not target.is_offloaded
        self._draw_chains = forwards.draw_chains if is_fit else None
        self._counters = counters
        self._newest = _Newest()

    def most_steps(self, slots: list[Slot]) -> int:
        """The steps that sequences can take at once, the coming one included; 1 where each needs a look."""
        if self._draw_chains is None or any(_needs_a_look(slot) for slot in slots):
            return 1
        step_seconds = self._newest.step_seconds(self._counters, len(slots), sum(slot.cache.length for slot in slots))
        most = min(FEW_STEPS, MOST_STEPS) if any(slot.stop_rule.looks_back for slot in slots) else MOST_STEPS
        room = min(slot.sequence.num_remaining_tokens for slot in slots)
        return max(1, min(most, room, int(MOST_SECONDS / max(step_seconds, MOST_SECONDS / most))))

    def walks(self, slots: list[Slot], num_steps: int) -> list[Walk]:
        """Draw so many tokens of each sequence, fewer where one ends; none at all where one has none to draw."""
        assert self._draw_chains is not None
        rows = [row_ahead(slot.cache, slot.sequence.last_token_id) for slot in slots]
        ends = [ending_tokens(slot.sequence) for slot in slots]
        drawn = self._draw_chains(rows, [slot.sampler for slot in slots], num_steps, ends)
        return [Walk([], each.token_ids) for each in drawn] if all(each.token_ids for each in drawn) else []


class _Newest:
    """The seconds of the newest steps, and their rows and positions: a mean of all steps would miss that jobs grew."""

    def __init__(self) -> None:
        self._num_steps, self._seconds = 0, 0.0  # all, when the coming step was last asked about
        self._num_rows, self._num_positions = 1, FEW_POSITIONS  # of the step that came then
        self._step_seconds = math.inf  # on average since then

    def step_seconds(self, counters: EngineCounters, num_rows: int, num_positions: int) -> float:
        """Return the measured seconds of a step, scaled up to so many rows and to the positions that they see together.

        A step's time grows at most in proportion to either.
        """
        num_steps, seconds = counters.num_steps, counters.step_seconds["verify"]
        if num_new := num_steps - self._num_steps:
            growth = max(1.0, num_rows / self._num_rows, num_positions / self._num_positions)
            self._step_seconds = growth * (seconds - self._seconds) / num_new
            self._num_steps, self._seconds = num_steps, seconds
            self._num_rows, self._num_positions = num_rows, max(FEW_POSITIONS, num_positions)
        return self._step_seconds


def _needs_a_look(slot: Slot) -> bool:
    """Return whether each step's logits are looked at, or each step's tokens decide on those to come."""
    return slot.sequence.logprobs is not None or bool(slot.sequence.rules)
