"""The output of a run for its user: a picture on a terminal, lines elsewhere, objects for programs.

Whatever happens to the terminal or to the program that reads, the run goes on.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, Protocol

from swiftbatch.jobs.run.run import Progress
from swiftbatch.scheduler.display.events import Event, RunEnded
from swiftbatch.scheduler.display.progress_line import summary_line
from swiftbatch.scheduler.process.streams import Lines

OutputMode = Literal["auto", "quiet", "json"]

LINE_SECONDS = 5.0  # between two lines that say where the run is


class Display(Protocol):
    """A place where a command shows what it does."""

    def note(self, event: Event) -> None:
        """Tell of something that has happened."""

    def update(self, progress: Progress) -> None:
        """Show where the run is."""


class PlainDisplay:
    """Lines for a log file: one every few seconds, and one for everything that people want to know; errors apart."""

    def __init__(self, output: Lines, errors: Lines) -> None:
        self._output = output
        self._errors = errors
        self._pace = _Pace()

    def note(self, event: Event) -> None:
        if text := str(event):
            (self._errors if event.is_error else self._output).write(text)

    def update(self, progress: Progress) -> None:
        if self._pace.is_due(progress):
            self._output.write(summary_line(progress))


class QuietDisplay(PlainDisplay):
    """Errors, and at the end how the run stands, in one line."""

    def note(self, event: Event) -> None:
        if isinstance(event, RunEnded):
            self._output.write("; ".join(event.lines()))
        elif event.is_error and (text := str(event)):
            self._errors.write(text)

    def update(self, progress: Progress) -> None:
        pass


class JsonDisplay:
    """One JSON object a line for every event: `event` is its kind, `time` in seconds since the epoch."""

    def __init__(self, output: Lines) -> None:
        self._output = output
        self._pace = _Pace()

    def note(self, event: Event) -> None:
        self._write(event.kind(), event.as_json())

    def update(self, progress: Progress) -> None:
        if self._pace.is_due(progress):
            self._write("progress", progress.model_dump(mode="json"))

    def _write(self, kind: str, fields: dict[str, Any]) -> None:
        self._output.write(json.dumps({"event": kind, "time": round(time.time(), 3), **fields}))


@contextmanager
def open_display(mode: OutputMode = "auto") -> Iterator[Display]:
    """The display that fits the user's wish and, with `auto`, the standard output. It still takes notes when closed.

    It is bound to the streams of this moment: Ray's chatter is turned away later.
    """
    output, errors = Lines(sys.stdout), Lines(sys.stderr)
    if mode == "json":
        yield JsonDisplay(output)
    elif mode == "quiet":
        yield QuietDisplay(output, errors)
    elif sys.stdout.isatty() and os.environ.get("TERM") not in ("dumb", "unknown"):
        from swiftbatch.scheduler.display.terminal import LiveDisplay

        with LiveDisplay(sys.stdout, None if sys.stderr.isatty() else errors) as display:
            yield display
    else:
        yield PlainDisplay(output, errors)


class _Pace:
    """Says when it is time for the next line: every few seconds while a run goes on, and whenever it does not."""

    def __init__(self) -> None:
        self._next_line = 0.0

    def is_due(self, progress: Progress) -> bool:
        now = time.monotonic()
        if now < self._next_line and progress.state == "running":
            return False
        self._next_line = now + LINE_SECONDS
        return True
