"""`repetition_detection` with vLLM's names and meaning."""

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
    """Detects an output that ends with a pattern repeated `min_count` times.

    Patterns have `min_pattern_size` to `max_pattern_size` tokens; a maximum of 0 turns it off. "stop" ends the output.
    "rewind" (not in vLLM) drops the repetitions and draws again, up to `max_rewinds` times. "close" closes a looping
    thought. Raises `pydantic.ValidationError`.
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
        return max(1, self.min_pattern_size)


def loop_guard(action: LoopAction | None) -> RepetitionDetection | None:
    """Return the detection for `--loop-guard`: patterns of at least 64 tokens, so that a row of dots does not count.

    Shorter patterns are found as multiples of themselves. Job ids depend on these values.
    """
    if action is None:
        return None
    return RepetitionDetection(max_pattern_size=256, min_pattern_size=16, min_count=4, action=action)


def without_closing(detection: RepetitionDetection) -> RepetitionDetection:
    return detection.model_copy(update={"action": "stop"}) if detection.action == "close" else detection
