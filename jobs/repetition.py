"""`repetition_detection`: when the output counts as a loop, with vLLM's names and meaning; and the run-wide guard."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from jobs.frozen import Strict
from jobs.input.reasons import FieldError

MAX_PATTERN = 4096  # tokens
MAX_REPETITIONS = 2**31 - 1


class RepetitionDetection(Strict):
    """The output is a loop where it ends in a pattern of tokens `min_count` times in a row.

    Patterns have `min_pattern_size` (0 is 1) to `max_pattern_size` tokens; with `max_pattern_size` 0 nothing is looked
    for. Raises `pydantic.ValidationError` for values that do not go together.
    """

    max_pattern_size: int = Field(default=0, ge=0, le=MAX_PATTERN)
    min_pattern_size: int = Field(default=0, ge=0, le=MAX_PATTERN)
    min_count: int = Field(default=0, ge=0, le=MAX_REPETITIONS)

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        if self.is_on and self.min_count < 2:
            raise FieldError("min_count", f"found {self.min_count}, expected at least 2 with max_pattern_size")
        if self.is_on and self.min_pattern_size > self.max_pattern_size:
            raise FieldError(
                "min_pattern_size",
                f"found {self.min_pattern_size}, expected at most max_pattern_size, {self.max_pattern_size}",
            )
        return self

    @property
    def is_on(self) -> bool:
        return self.max_pattern_size > 0

    @property
    def smallest_pattern(self) -> int:
        """In tokens."""
        return max(1, self.min_pattern_size)


# Of `--loop-guard`: 64 tokens in a loop at least, so that neither a row of dots nor a refrain is one. A pattern shorter
# than 16 tokens is found by one of its multiples. Jobs are named after it: another guard is another name of the option.
LOOP_GUARD = RepetitionDetection(max_pattern_size=256, min_pattern_size=16, min_count=4)
