"""What the user sees while a run goes on: bars on a terminal, a plain line every few seconds elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from jobs.job import JobRecord
from jobs.run import Progress
from scheduler.summary import summary_line

MAX_JOB_LINES = 16
PLAIN_SECONDS = 5.0


class Display(Protocol):
    """Where the driver shows what it does."""

    def note(self, text: str) -> None:
        """Show one line that stays."""

    def update(self, progress: Progress, running: list[tuple[JobRecord, int]], num_tokens_left: int) -> None:
        """Show where the run is: `running` jobs with the tokens they have."""


class PlainDisplay:
    """Lines for a log file: one every few seconds, and every note."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._next_line = 0.0

    def note(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def update(self, progress: Progress, running: list[tuple[JobRecord, int]], num_tokens_left: int) -> None:
        now = time.monotonic()
        if now >= self._next_line or progress.state != "running":
            self._next_line = now + PLAIN_SECONDS
            self.note(summary_line(progress))


class BarDisplay:
    """A bar for the run and a line for every running job, redrawn in place."""

    def __init__(self, live: Live) -> None:
        self._live = live

    def note(self, text: str) -> None:
        self._live.console.print(text, markup=False, highlight=False)

    def update(self, progress: Progress, running: list[tuple[JobRecord, int]], num_tokens_left: int) -> None:
        self._live.update(render(progress, running, num_tokens_left))


@contextmanager
def open_display(console: Console) -> Iterator[Display]:
    """The display that fits the console."""
    if not console.is_terminal:
        yield PlainDisplay(console)
        return
    # Ray's chatter is kept off the real stdout elsewhere; rich must not wrap what stands in for it
    with Live(console=console, refresh_per_second=4, redirect_stdout=False, redirect_stderr=False) as live:
        yield BarDisplay(live)


def render(progress: Progress, running: list[tuple[JobRecord, int]], num_tokens_left: int) -> RenderableType:
    """The run's line and bar, then a line per running job."""
    table = Table.grid(padding=(0, 1))
    table.add_column(no_wrap=True, max_width=32, overflow="ellipsis")
    table.add_column(width=30)
    table.add_column(justify="right", no_wrap=True)
    num_tokens = progress.num_generated_tokens
    table.add_row("all jobs", _bar(num_tokens, num_tokens + num_tokens_left), f"{num_tokens:,} tokens")
    worker_of = {custom_id: worker.id for worker in progress.workers for custom_id in worker.jobs}
    for record, count in running[:MAX_JOB_LINES]:
        total = record.job.sampling.max_tokens
        worker = worker_of.get(record.job.custom_id, "")
        table.add_row(Text(f"  {record.job.custom_id}"), _bar(count, total), f"{count:,}/{total:,} {worker}")
    if len(running) > MAX_JOB_LINES:
        table.add_row(f"  and {len(running) - MAX_JOB_LINES} more", "", "")
    return Group(Text(summary_line(progress)), table)


def _bar(done: int, total: int) -> ProgressBar:
    return ProgressBar(total=max(total, 1), completed=min(done, max(total, 1)))
