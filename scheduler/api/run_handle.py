"""`swiftbatch.Run`: a run for Python programs and notebooks."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
import warnings
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from swiftbatch.jobs.errors import UserError
from swiftbatch.jobs.run.output import ended_lines, joined
from swiftbatch.jobs.run.output_table import table_file
from swiftbatch.jobs.run.run import Run
from swiftbatch.scheduler.driver.run_lease import current_progress, liveness
from swiftbatch.scheduler.runs.cancellation import cancel_jobs, stop_driver

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa
    from numpy.typing import NDArray

    from swiftbatch.jobs.input.rejects import Reject
    from swiftbatch.jobs.run.job_index import JobIndex
    from swiftbatch.jobs.run.run_records import Progress
    from swiftbatch.scheduler.api.run_process import RunProcess

Path = str | os.PathLike[str]
Result = dict[str, Any]
POLL_SECONDS = 0.5
REST = 10  # times as long as the last look took, so that a million jobs do not keep a core busy


class RunHandle:
    """A run in its folder, and the process that works on it if this program started one.

    Methods raise UserError: one line with what was wrong, where, and what to do next.
    """

    def __init__(self, folder: Run, process: RunProcess | None = None) -> None:
        """Programs call `submit` or `swiftbatch.Run.open`."""
        self._folder = folder
        self._process = process

    @classmethod
    def open(cls, uri: Path) -> Self:
        """Open the run of a folder, whoever works on it."""
        return cls(Run.open(os.fspath(uri)))

    def __repr__(self) -> str:
        progress = self.progress()
        jobs = ", ".join(f"{count} {state}" for state, count in progress.jobs.items() if count)
        return f"<Run {self.uri}: {progress.state}; {jobs}; {progress.num_generated_tokens} tokens>"

    @property
    def uri(self) -> str:
        return self._folder.store.shown_uri

    @property
    def rejects(self) -> Sequence[Reject]:
        """Return the lines of the last submission that are no jobs, with the reasons."""
        return list(self._folder.rejects())

    def progress(self) -> Progress:
        """Return the run's state, its jobs by state, tokens, speed and workers."""
        return current_progress(self._folder)

    def wait(self, timeout: float | None = None, *, bar: bool = False) -> Progress:
        """Wait until no process works on the run, and return its progress.

        The wait ends after `timeout` seconds, too. `bar` shows tokens and jobs on a terminal or in a notebook. A run
        that stopped before its end has the state `interrupted`. Raises UserError if the run had to stop.
        """
        end = float("inf") if timeout is None else time.monotonic() + timeout
        with _bar() if bar else contextlib.nullcontext(lambda _: None) as show:
            while not self._is_over(max(0.0, min(POLL_SECONDS, end - time.monotonic()))):
                show(self)
                if time.monotonic() >= end:
                    break
            show(self)
        return self.progress()

    async def wait_async(self, timeout: float | None = None) -> Progress:
        """Do what `wait` does, without blocking the event loop."""
        return await asyncio.to_thread(self.wait, timeout)

    def results(self) -> Iterator[Result]:
        """Yield the OpenAI Batch line of each job as it ends, until no process works on the run.

        A line with several choices comes when all of them have ended. Raises UserError if the run had to stop.
        """
        index = self._folder.job_index()
        is_told = np.zeros(len(index), np.bool_)
        is_over = False
        while not is_over:
            is_over = self._is_over(0.0)
            began = time.monotonic()
            is_new = self._has_ended(index) & ~is_told
            is_told |= is_new
            yield from self._lines(index.some(np.flatnonzero(is_new)))
            if not is_over:
                self._is_over(max(POLL_SECONDS, REST * (time.monotonic() - began)))

    async def results_async(self) -> AsyncIterator[Result]:
        """Do what `results` does, without blocking the event loop."""
        results = self.results()
        while (result := await asyncio.to_thread(next, results, None)) is not None:
            yield result

    def lines(self) -> Iterator[Result]:
        """Yield the OpenAI Batch lines so far, in the order of the jobs."""
        return self._folder.joined_lines()

    def to_arrow(self) -> pa.Table:
        """Return the results so far, with a row for each choice: the columns of `output.parquet`."""
        from pyarrow import parquet

        with table_file(self._folder.ended_lines()) as (file, _):
            return parquet.read_table(file)

    def to_pandas(self) -> pd.DataFrame:
        """Return `to_arrow` as a table of pandas, which must be installed."""
        try:
            return self.to_arrow().to_pandas()
        except ImportError:
            raise UserError("to_pandas() needs pandas: pip install pandas, or take to_arrow()") from None

    def cancel(self, custom_id: str | None = None) -> str:
        """Cancel one job or the whole run; results stay. Return what was done, in a line."""
        return cancel_jobs(self._folder, custom_id)

    def stop(self) -> Progress:
        """Save all tokens and end the process that works on the run, if it is on this machine, whoever started it.

        The same `submit` goes on. Raises UserError for a process of another machine.
        """
        if self._process is not None:
            self._process.stop()
        else:
            stop_driver(self._folder)
        return self.progress()

    def _is_over(self, seconds: float) -> bool:
        """Wait up to `seconds` and return whether no process works on the run."""
        if self._process is not None:
            return self._process.wait(seconds)
        time.sleep(seconds)
        return liveness(self._folder, self._folder.progress()) == "gone"

    def _has_ended(self, index: JobIndex) -> NDArray[np.bool_]:
        """Return for each job whether all choices of its line have ended."""
        finished, failed = self._folder.ended()
        is_open = [job_id not in finished and job_id not in failed for job_id in index.job_ids()]
        line = index.columns["custom_id"].dictionary_encode().indices.to_numpy()
        has_ended: NDArray[np.bool_] = (np.bincount(line, weights=is_open) == 0)[line]
        return has_ended

    def _lines(self, index: JobIndex) -> Iterator[Result]:
        entries = zip(self._folder.records_at(index.places), self._folder.lines_of(index), strict=True)
        return map(joined, ended_lines(entries))


@contextlib.contextmanager
def _bar() -> Iterator[Any]:
    """Open a bar of tokens; yield what shows a run's progress in it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a notebook without ipywidgets gets a bar of letters
        from tqdm.auto import tqdm

    with tqdm(unit=" tokens", unit_scale=True) as bar:

        def show(run: RunHandle) -> None:
            progress = run.progress()
            bar.total = progress.num_generated_tokens + progress.num_tokens_left
            bar.set_postfix_str(", ".join(f"{count} {state}" for state, count in progress.jobs.items() if count))
            bar.update(progress.num_generated_tokens - bar.n)

        yield show
