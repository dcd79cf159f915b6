"""The budget of a thought, whose closing marker is forced when it is used up; a grammar begins behind it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from swiftbatch.worker.constraints.thought import MISSED, Thinking, Thought
from swiftbatch.worker.drawing.rules import Constraint, ConstraintError, Rule, mask_of

if TYPE_CHECKING:
    from swiftbatch.worker.drawing.sequence import Sequence


@dataclass(frozen=True)
class ThinkingRule:
    """The `Rule` that no more tokens are thought than the budget, and that what is no thought is a text of `text`.

    A thought that has used up its budget goes on with the rest of the closing marker, as far as it is not there yet.
    """

    thinking: Thinking
    budget: int | None  # tokens; None: as many as may come
    text: Rule | None = None  # the rule of what is no thought; None: any text may come

    def start(self, sequence: Sequence) -> ThinkingConstraint:
        return ThinkingConstraint(self, sequence)


class ThinkingConstraint:
    """A budget, and a rule of the text, behind some output tokens."""

    def __init__(self, rule: ThinkingRule, sequence: Sequence) -> None:
        self._markers, self._budget = rule.thinking.markers, rule.budget
        self._vocab_size = sequence.vocab_size
        self._thought = Thought(rule.thinking)
        self._text: Constraint | None = rule.text.start(sequence) if rule.text is not None else None

    def mask(self) -> np.ndarray | None:
        if (forced := self._forced()) is not None:
            return mask_of((forced,), self._vocab_size)
        if self._text is None or self._thought.is_open:
            return None
        mask = self._text.mask()
        if mask is None or not self._may_open():
            return mask
        opened: np.ndarray = mask | mask_of(self._markers.start[:1], self._vocab_size)
        return opened

    def is_free(self, token_ids: list[int]) -> bool:
        thought, num_tokens = self._thought, len(token_ids)
        has_room = self._budget is None or thought.num_tokens + num_tokens < self._budget
        if self._text is not None:
            return thought.is_open and has_room and self._markers.end[-1] not in token_ids
        return thought.closed_at is not None or has_room

    def guess(self, token_ids: np.ndarray) -> int:
        return int(token_ids[0]) if self._text is None or len(token_ids) == 1 else self._text.guess(token_ids)

    def push(self, token_id: int) -> None:
        if (forced := self._forced()) is not None and token_id != forced:
            raise ConstraintError(f"found token {token_id} where the thought's marker goes on with {forced}")
        num_before = self._num_of_text()
        self._thought.push(token_id)
        if self._text is not None and self._num_of_text() > num_before:
            try:
                self._text.push(token_id)
            except ConstraintError:
                self._thought.pop(1)
                raise

    def pop(self, num_tokens: int) -> None:
        num_before = self._num_of_text()
        self._thought.pop(num_tokens)
        if self._text is not None and (num_gone := num_before - self._num_of_text()):
            self._text.pop(num_gone)

    def _forced(self) -> int | None:
        """The one token that may come: of a marker that has to be gone on with."""
        thought = self._thought
        if thought.is_open:
            is_used_up = self._budget is not None and thought.num_tokens >= self._budget
            return self._markers.end[thought.num_matched] if is_used_up else None
        # a text that a rule says would not know what to make of half a marker
        is_half_open = self._text is not None and thought.opened_at is None and thought.num_matched > 0
        return self._markers.start[thought.num_matched] if is_half_open else None

    def _may_open(self) -> bool:
        return self._thought.opened_at is None and len(self._thought) == 0

    def _num_of_text(self) -> int:
        """Count the output tokens that are no thought and none of its markers."""
        thought = self._thought
        if thought.closed_at is not None:
            return len(thought) - thought.closed_at
        return len(thought) if thought.opened_at is None and thought.num_matched == MISSED else 0
