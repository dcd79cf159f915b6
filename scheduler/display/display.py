"""The output of a run: a picture redrawn on a terminal, lines elsewhere, JSON objects for programs."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import IO, Any, Literal, Protocol, TextIO, cast

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from swiftbatch.jobs.run.run_records import Progress, WorkerStatus
from swiftbatch.scheduler.display.events import Event, RunEnded
from swiftbatch.scheduler.display.progress_line import (
    counted,
    duration,
    job_counts,
    printable,
    safety,
    speed_of,
    summary_line,
)
from swiftbatch.scheduler.process.streams import Lines, SteadyStream

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


# The display of a terminal: a picture of the run that is redrawn in place, and lines that stay above it.


LABEL_WIDTH = 6
WIDE = 100  # columns from which a worker's process is shown, too
REDRAWS_PER_SECOND = 4  # the figures change more rarely; the terminal's size may at any time


class Frame:
    """One picture, which takes the terminal's size as it is whenever it is drawn. No line wraps."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        figures = _figures(self._progress)
        room = console.height - 1 - figures.row_count  # the cursor has the last line
        yield figures
        yield from _worker_rows(self._progress, room, is_wide=options.max_width >= WIDE)


def _figures(progress: Progress) -> Table:
    grid = Table.grid(expand=True, padding=(0, 1))
    grid.add_column(width=LABEL_WIDTH, no_wrap=True)
    grid.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    took = duration(progress.updated - progress.started)
    if progress.state == "running":
        left = "" if progress.eta_seconds is None else f", at most {duration(progress.eta_seconds)} left"
        grid.add_row("run", _text(f"running for {took}{left}"))
    else:
        grid.add_row("run", _text(f"{progress.state} after {took}"))
    num_tokens, num_left = progress.num_generated_tokens, progress.num_tokens_left
    total = f"{num_tokens:,} of up to {num_tokens + num_left:,}" if num_left else f"{num_tokens:,}"
    grid.add_row("tokens", _bar(num_tokens, num_tokens + num_left, total))
    rejects = f"; {counted(progress.num_rejects, 'line')} rejected" if progress.num_rejects else ""
    grid.add_row("jobs", _text(job_counts(progress.jobs) + rejects))
    if progress.state == "running":
        grid.add_row("speed", _text(speed_of(progress)))
    if parts := safety(progress):
        grid.add_row("safety", _text("; ".join(parts)))
    return grid


def _worker_rows(progress: Progress, room: int, is_wide: bool) -> list[RenderableType]:
    """A line per worker and, where there is room for all of them, a line per job."""
    workers = progress.workers
    blocks = [(_worker_row(progress, worker, is_wide), *_jobs(progress, worker)) for worker in workers]
    starting = f"{counted(progress.num_starting_workers, 'worker')} starting" if progress.num_starting_workers else ""
    rows: Sequence[RenderableType] = [row for block in blocks for row in block]
    if len(rows) + bool(starting) > room:
        rows = [block[0] for block in blocks]
    if len(rows) + bool(starting) > room:
        num_shown = max(0, room - 1)
        more = counted(len(workers) - num_shown, "more worker")
        starting = f"and {more}" + (f", {starting}" if starting else "")
        rows = rows[:num_shown]
    return [*rows, *([_text(starting)] if starting else [])][: max(0, room)]


def _worker_row(progress: Progress, worker: WorkerStatus, is_wide: bool) -> Table:
    place = f"{worker.id} on {worker.host}{f', process {worker.pid}' if is_wide else ''}"
    figures = f"{counted(len(worker.jobs), 'job')}, {worker.tokens_per_second:,.1f} tokens/s"
    if worker.jobs and worker.last_checkpoint is not None:
        figures += f", checkpoint {max(0.0, progress.updated - worker.last_checkpoint):.0f} s ago"
    grid = Table.grid(expand=True, padding=(0, 1))
    grid.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    grid.add_column(justify="right", no_wrap=True)
    grid.add_row(_text(place), _text(figures))
    return grid


def _jobs(progress: Progress, worker: WorkerStatus) -> list[Table]:
    """A line per job of a worker."""
    rows = []
    for custom_id in worker.jobs:
        num_tokens, most = progress.running.get(custom_id, 0), progress.max_tokens.get(custom_id, 0)
        grid = Table.grid(expand=True, padding=(0, 1))
        grid.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
        grid.add_column(ratio=2)
        grid.add_row(_text(f"  {printable(custom_id)}"), _bar(num_tokens, most, f"{num_tokens:,} of up to {most:,}"))
        rows.append(grid)
    return rows


def _bar(done: int, total: int, figures: str) -> Table:
    """A bar and, right of it, the figures that it draws."""
    grid = Table.grid(expand=True, padding=(0, 1))
    grid.add_column(ratio=1)
    grid.add_column(justify="right", no_wrap=True, min_width=22)
    grid.add_row(ProgressBar(total=max(total, 1), completed=min(done, max(total, 1))), _text(figures))
    return grid


def _text(text: str) -> Text:
    return Text(text, no_wrap=True, overflow="ellipsis")


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
