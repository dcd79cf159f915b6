"""`repetition_detection`: when the output counts as a loop, with vLLM's names and meaning, and what becomes of it."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from swiftbatch.jobs.input.validation_errors import FieldError
from swiftbatch.jobs.json_records import Strict, whole

MAX_PATTERN = 4096  # tokens
MAX_REPETITIONS = 2**31 - 1
MAX_REWINDS = 100

LoopAction = Literal["stop", "rewind", "close"]


class RepetitionDetection(Strict):
    """The output is a loop where it ends in a pattern of tokens `min_count` times in a row.

    Patterns have `min_pattern_size` (0 is 1) to `max_pattern_size` tokens; with `max_pattern_size` 0 nothing is looked
    for. Raises `pydantic.ValidationError` for values that do not go together.

    With `action` "stop" the output ends there. With "rewind", which vLLM does not have, the tokens from the first
    repetition on are taken back and drawn anew with other noise, `max_rewinds` times; the next loop is the end. With
    "close" a loop within a thought closes it, and the answer follows; any other loop is the end.
    """

    max_pattern_size: int = Field(default=0, ge=0, le=MAX_PATTERN)
    min_pattern_size: int = Field(default=0, ge=0, le=MAX_PATTERN)
    min_count: int = Field(default=0, ge=0, le=MAX_REPETITIONS)
    action: LoopAction = "stop"
    max_rewinds: int = Field(default=3, ge=0, le=MAX_REWINDS)

    @field_validator("max_pattern_size", "min_pattern_size", "min_count", "max_rewinds", mode="before")
    @classmethod
    def _whole(cls, value: Any) -> Any:
        return whole(value)

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
        """The length of the shortest pattern, in tokens."""
        return max(1, self.min_pattern_size)


def loop_guard(action: LoopAction | None) -> RepetitionDetection | None:
    """The detection that `--loop-guard` stands for: a loop has at least 64 tokens, so no row of dots or refrain is one.

    A pattern shorter than 16 tokens is found by one of its multiples. Jobs are named after these numbers.
    """
    if action is None:
        return None
    return RepetitionDetection(max_pattern_size=256, min_pattern_size=16, min_count=4, action=action)


def without_closing(detection: RepetitionDetection) -> RepetitionDetection:
    """The same detection where no thought can be closed: a loop is then the end."""
    return detection.model_copy(update={"action": "stop"}) if detection.action == "close" else detection
