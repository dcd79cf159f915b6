"""The display of a terminal: a picture of the run that is redrawn in place, and lines that stay above it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import TracebackType
from typing import IO, TextIO, cast

from rich.console import Console
from rich.live import Live

from swiftbatch.jobs.run.run import Progress
from swiftbatch.scheduler.display.events import Event
from swiftbatch.scheduler.display.frame import Frame
from swiftbatch.scheduler.process.streams import Lines, SteadyStream

REDRAWS_PER_SECOND = 4  # the figures change more rarely; the terminal's size may at any time


class LiveDisplay(AbstractContextManager["LiveDisplay"]):
    """Draws from the first `update` to the end of its context; with `errors`, lines about errors go there."""

    def __init__(self, stream: TextIO, errors: Lines | None) -> None:
        self._console = Console(file=cast("IO[str]", SteadyStream(stream)), force_terminal=True)
        self._errors = errors
        # the stream that stands in for stdout while Ray is at work must not be wrapped
        self._live = Live(
            console=self._console,
            refresh_per_second=REDRAWS_PER_SECOND,
            redirect_stdout=False,
            redirect_stderr=False,
        )

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        self._live.stop()

    def note(self, event: Event) -> None:
        if not (text := str(event)):
            return
        if event.is_error and self._errors is not None:
            self._errors.write(text)
        else:
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def update(self, progress: Progress) -> None:
        self._live.update(Frame(progress))
        if not self._live.is_started:
            self._live.start()
            self._console.show_cursor(True)  # a process that is killed can't bring it back
