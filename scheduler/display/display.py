"""A run's output: a live picture, lines or JSON objects."""

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

LINE_SECONDS = 5.0  # seconds between two status lines


class Display(Protocol):
    """A display of a command's events and progress."""

    def note(self, event: Event) -> None:
        pass

    def update(self, progress: Progress) -> None:
        pass


class PlainDisplay:
    """Lines for a log file; errors go to another stream."""

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
    """Only errors and a final line."""

    def note(self, event: Event) -> None:
        if isinstance(event, RunEnded):
            self._output.write("; ".join(event.lines()))
        elif event.is_error and (text := str(event)):
            self._errors.write(text)

    def update(self, progress: Progress) -> None:
        pass


class JsonDisplay:
    """One JSON object per line and event."""

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
    """Open the display for `mode`.

    The display keeps the present stdout and stderr, because Ray's output is redirected later.
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
    """Decides when the next line is due."""

    def __init__(self) -> None:
        self._next_line = 0.0

    def is_due(self, progress: Progress) -> bool:
        now = time.monotonic()
        if now < self._next_line and progress.state == "running":
            return False
        self._next_line = now + LINE_SECONDS
        return True


# A terminal's display: a picture redrawn in place below lasting lines.


LABEL_WIDTH = 6
WIDE = 100  # columns needed to show a worker's process
REDRAWS_PER_SECOND = 4  # figures change less often, the terminal's size at any time


class Frame:
    """One picture in the terminal's present size, without wrapped lines."""

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
    """Return a row per worker and, if they fit, per job."""
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
    grid = Table.grid(expand=True, padding=(0, 1))
    grid.add_column(ratio=1)
    grid.add_column(justify="right", no_wrap=True, min_width=22)
    grid.add_row(ProgressBar(total=max(total, 1), completed=min(done, max(total, 1))), _text(figures))
    return grid


def _text(text: str) -> Text:
    return Text(text, no_wrap=True, overflow="ellipsis")


class LiveDisplay(AbstractContextManager["LiveDisplay"]):
    """Redraws a picture from the first `update` on; errors also go to `errors`."""

    def __init__(self, stream: TextIO, errors: Lines | None) -> None:
        self._console = Console(file=cast("IO[str]", SteadyStream(stream)), force_terminal=True)
        self._errors = errors
        # the console must not wrap the stdout that Ray's redirection installs
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
            self._console.show_cursor(True)  # a killed process can't restore it
