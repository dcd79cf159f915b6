"""The jobs of a batch, a page at a time, and what went wrong with its lines."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import Any

from swiftbatch.jobs.run.checked_reading import NUM_READERS
from swiftbatch.jobs.run.job_index import JobName
from swiftbatch.jobs.run.output_line_fields import num_completion_tokens
from swiftbatch.jobs.run.run import Run
from swiftbatch.jobs.run.run_records import Progress
from swiftbatch.scheduler.driver.queue_loading import CANCELLED
from swiftbatch.scheduler.runs.cancellation import EXPIRED
from swiftbatch.scheduler.serve.running_texts import names_of

NUM_JOBS = 50  # of a page
NUM_PROBLEMS = 100
NUM_KNOWN_RUNS = 8


@dataclass(frozen=True)
class JobRow:
    """One job; its finish reason is empty before it has ended, the problem where there is none."""

    name: str
    state: str
    num_tokens: int | None = None
    finish_reason: str = ""
    problem: str = ""


@dataclass(frozen=True)
class JobPage:
    """The page with this number, from 1, of how many, and of how many jobs in all."""

    rows: list[JobRow]
    number: int
    num_pages: int
    num_jobs: int


@dataclass(frozen=True)
class Problem:
    """The reason why a line, or a job by its name, has no result."""

    line: int | None
    name: str
    message: str


def job_page(run: Run, progress: Progress | None, number: int) -> JobPage:
    """A page of the jobs in input order; the last one for a number that is too high. Raises RunError, StoreError."""
    names = names_of(run.store)
    num_pages = max(1, -(-len(names) // NUM_JOBS))
    number = min(max(1, number), num_pages)
    running = {} if progress is None else progress.running
    shown = names[(number - 1) * NUM_JOBS : number * NUM_JOBS]
    results = _results(run.store.uri, [job.job_id for job in shown if job.name not in running])
    with ThreadPoolExecutor(NUM_READERS) as pool:
        rows = list(pool.map(lambda job: _row(run, job, running, results.get(job.job_id)), shown))
    return JobPage(rows, number, num_pages, len(names))


def run_problems(run: Run) -> list[Problem]:
    """The first problems of a batch that has not ended. Raises RunError, StoreError."""
    rejects = [Problem(each.line_number, each.custom_id or "", each.reason) for each in run.rejects()[:NUM_PROBLEMS]]
    failed = [name.removesuffix(".json") for name in run.store.list("errors")][:NUM_PROBLEMS]
    return [*map(_problem, run.errors(failed)), *rejects][:NUM_PROBLEMS]


def file_problems(pieces: Iterator[bytes]) -> list[Problem]:
    """The first problems in the error file of a batch that has ended."""
    return [_problem(json.loads(line)) for line in islice(_lines(pieces), NUM_PROBLEMS)]


def _row(run: Run, job: JobName, running: dict[str, int], result: dict[str, Any] | None) -> JobRow:
    if job.name in running:
        return JobRow(job.name, "running", running[job.name])
    if result is not None:
        reason = str(result["response"]["body"]["choices"][0]["finish_reason"])
        return JobRow(job.name, "finished", num_completion_tokens(result), reason)
    line = run.error(job.job_id)
    if line is None:
        return JobRow(job.name, "pending")
    state = {CANCELLED: "cancelled", EXPIRED: "expired"}.get(str(line["error"]["code"]), "failed")
    return JobRow(job.name, state, problem=str(line["error"]["message"]))


def _results(uri: str, job_ids: list[str]) -> dict[str, dict[str, Any] | None]:
    return dict(zip(job_ids, _known_run(uri).result_lines(job_ids), strict=True))


@functools.lru_cache(maxsize=NUM_KNOWN_RUNS)
def _known_run(uri: str) -> Run:
    """A run that knows where its results are: pages and clients ask again and again."""
    return Run.open(uri)


def _problem(line: dict[str, Any]) -> Problem:
    """The problem of an output line with an error."""
    error = line["error"]
    return Problem(error.get("line"), str(line["custom_id"] or ""), str(error["message"]))


def _lines(pieces: Iterator[bytes]) -> Iterator[bytes]:
    rest = b""
    for piece in pieces:
        *whole, rest = (rest + piece).split(b"\n")
        yield from whole
