"""An attempt's token counts over time, for reports."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from swiftbatch.jobs.json_records import Strict

Moment = Annotated[float, Field(ge=0, lt=253_402_300_800)]  # seconds since the epoch, up to the year 9999

MAX_MARKS = 64
MIN_STRIDE_SECONDS = 1.0


class Timeline(Strict):
    """Columns `[num_marks]` of an attempt's progress; the first mark is at its first verified step.

    `num_tokens` includes tokens recovered from earlier attempts; the other counts cover this attempt alone.
    """

    started: Moment  # time of the first mark
    seconds: tuple[float, ...]  # time since `started`
    num_tokens: tuple[int, ...]
    num_drafts: tuple[int, ...]
    num_accepted_tokens: tuple[int, ...]
    is_released: bool = False  # the attempt ended at its last mark with all its tokens in the log

    @model_validator(mode="after")
    def _has_equal_columns(self) -> Self:
        lengths = {len(c) for c in (self.seconds, self.num_tokens, self.num_drafts, self.num_accepted_tokens)}
        if len(lengths) != 1 or lengths == {0}:
            raise ValueError(f"found columns of {sorted(lengths)} marks, expected the same number, at least one")
        return self


class TimelineRecorder:
    """Records at most `MAX_MARKS` marks.

    When they are full, every second one is dropped and the interval doubles.
    """

    def __init__(self) -> None:
        self._marks: list[tuple[float, int, int, int]] = []
        self._stride = MIN_STRIDE_SECONDS
        self._started = 0.0
        self._newest: tuple[float, int, int, int] | None = None
        self.has_news = False  # some marks are not in a taken timeline

    def note(self, now: float, wall: float, num_tokens: int, num_drafts: int, num_accepted_tokens: int) -> None:
        """Record progress; `now` is `time.monotonic()`, `wall` seconds since the epoch."""
        mark = (now, num_tokens, num_drafts, num_accepted_tokens)
        if not self._marks:
            self._started = wall
        self._newest = mark
        if self._marks and now - self._marks[-1][0] < self._stride:
            return
        self._marks.append(mark)
        self.has_news = True
        if len(self._marks) > MAX_MARKS - 1:  # the newest one is added to these
            del self._marks[1::2]
            self._stride *= 2

    def take(self, is_released: bool = False) -> Timeline | None:
        """Return the timeline so far, or None before the first step."""
        if self._newest is None:
            return None
        self.has_news = False
        marks = self._marks if self._marks[-1] == self._newest else [*self._marks, self._newest]
        first = marks[0][0]
        return Timeline(
            started=round(self._started, 3),
            seconds=tuple(round(now - first, 3) for now, *_ in marks),
            num_tokens=tuple(mark[1] for mark in marks),
            num_drafts=tuple(mark[2] for mark in marks),
            num_accepted_tokens=tuple(mark[3] for mark in marks),
            is_released=is_released,
        )
