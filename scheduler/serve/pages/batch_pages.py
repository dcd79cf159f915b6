"""The pages of batches: the list, one batch, its jobs and problems."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import Any

from fastapi import Response

from swiftbatch.jobs.errors import UserError
from swiftbatch.jobs.run.job_index import JobEntry
from swiftbatch.jobs.run.output_line_parsing import num_completion_tokens
from swiftbatch.jobs.run.run import Run
from swiftbatch.jobs.run.run_records import NUM_READERS, Progress
from swiftbatch.scheduler.driver.queue_loading import CANCELLED
from swiftbatch.scheduler.runs.cancellation import EXPIRED
from swiftbatch.scheduler.serve.batches.service import Service
from swiftbatch.scheduler.serve.pages.page_responses import Visitor, page_response
from swiftbatch.scheduler.serve.records.batch_status import is_submitted, names_of, partial_texts, unread_status
from swiftbatch.scheduler.serve.records.server_records import EndState, RefusedError, State
from swiftbatch.scheduler.serve.records.stored_objects import Batch

NUM_JOBS = 50  # per page
NUM_PROBLEMS = 100
NUM_KNOWN_RUNS = 8


@dataclass(frozen=True)
class JobRow:
    """One job; unknown texts are empty."""

    name: str
    state: str
    num_tokens: int | None = None
    finish_reason: str = ""
    problem: str = ""


@dataclass(frozen=True)
class JobPage:
    """A page of jobs, numbered from 1."""

    rows: list[JobRow]
    number: int
    num_pages: int
    num_jobs: int


@dataclass(frozen=True)
class Problem:
    """Why a line, or a job by its name, has no result."""

    line: int | None
    name: str
    message: str


def job_page(run: Run, progress: Progress | None, number: int) -> JobPage:
    """Return a page of jobs, at most the last one. Raises RunError, StoreError."""
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
    """Return the first problems of an unfinished batch. Raises RunError, StoreError."""
    rejects = [Problem(each.line_number, each.custom_id or "", each.reason) for each in run.rejects()[:NUM_PROBLEMS]]
    failed = [name.removesuffix(".json") for name in run.store.list("errors")][:NUM_PROBLEMS]
    return [*map(_problem, run.errors(failed)), *rejects][:NUM_PROBLEMS]


def file_problems(pieces: Iterator[bytes]) -> list[Problem]:
    return [_problem(json.loads(line)) for line in islice(_lines(pieces), NUM_PROBLEMS)]


def _row(run: Run, job: JobEntry, running: dict[str, int], result: dict[str, Any] | None) -> JobRow:
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
    """The cached run keeps its result index."""
    return Run.open(uri)


def _problem(line: dict[str, Any]) -> Problem:
    error = line["error"]
    return Problem(error.get("line"), str(line["custom_id"] or ""), str(error["message"]))


def _lines(pieces: Iterator[bytes]) -> Iterator[bytes]:
    rest = b""
    for piece in pieces:
        *whole, rest = (rest + piece).split(b"\n")
        yield from whole


# The pages of all batches and of one.


STATE_WORDS: dict[State, str] = {"in_progress": "in progress"}  # other states read well already
NAME_KEY = "name"  # in a batch's metadata
ENDED: tuple[EndState, ...] = ("completed", "failed", "expired", "cancelled")


@dataclass(frozen=True)
class Figures:
    """The figures of a batch; `most_tokens` are so far and to come.

    Times are in seconds since the epoch.
    """

    id: str
    name: str
    state: State
    num_lines: int
    num_completed: int
    num_failed: int
    num_tokens: int
    most_tokens: int
    tokens_per_second: float | None
    eta_seconds: float | None
    created: float
    problem: str

    @property
    def state_words(self) -> str:
        return STATE_WORDS.get(self.state, self.state)

    @property
    def has_ended(self) -> bool:
        return self.state in ENDED

    @property
    def can_be_cancelled(self) -> bool:
        return not self.has_ended and self.state != "cancelling"

    @property
    def num_done(self) -> int:
        return self.num_completed + self.num_failed


def figures_of(service: Service, batch: Batch) -> Figures:
    """Return a batch's figures; an unreadable folder becomes its problem."""
    try:
        status = service.status(batch)
    except UserError as error:
        status = unread_status(batch, str(service.refusal(error)))
    progress, counts = status.progress, status.counts
    num_tokens = _num_tokens(batch, progress)
    return Figures(
        id=batch.id,
        name=name_of(service, batch),
        state=status.state,
        num_lines=counts.total,
        num_completed=counts.completed,
        num_failed=counts.failed,
        num_tokens=num_tokens,
        most_tokens=num_tokens + (0 if progress is None else progress.num_tokens_left),
        tokens_per_second=_speed(batch, progress),
        eta_seconds=None if progress is None else progress.eta_seconds,
        created=batch.created,
        problem=service.problem(batch, status),
    )


def name_of(service: Service, batch: Batch) -> str:
    """Return a batch's name from its metadata or file."""
    if name := (batch.record.metadata or {}).get(NAME_KEY):
        return name
    try:
        return service.files.get(batch.record.input_file_id, batch.owner).filename
    except RefusedError:
        return ""


def _num_tokens(batch: Batch, progress: Progress | None) -> int:
    if batch.ended is not None:
        return batch.ended.num_generated_tokens
    return 0 if progress is None else progress.num_generated_tokens


def _speed(batch: Batch, progress: Progress | None) -> float | None:
    """Return the present rate, after the end the average."""
    if (ended := batch.ended) is not None:
        if ended.in_progress is None or not ended.num_generated_tokens:
            return None
        return ended.num_generated_tokens / max(1.0, ended.finalizing - ended.in_progress)
    return progress.tokens_per_second if progress is not None and progress.state == "running" else None


SAID = {"endpoint": "/v1/completions", "window": "24h", "metadata": "", "priority": "0", "webhook": ""}
NUM_BATCHES = 50  # per page
REFRESH_SECONDS = 2  # while figures change
REFRESH_SECONDS_OBJECT_STORE = 10  # because each look costs money
NUM_TEXTS, LAST_TOKENS = 12, 120  # running jobs on a page, and last tokens of each


@dataclass(frozen=True)
class RunView:
    """The jobs of a batch's run; `unread` says what can't be read."""

    jobs: JobPage | None = None
    problems: tuple[Problem, ...] = ()
    texts: tuple[Mapping[str, Any], ...] = ()
    num_running: int = 0
    has_report: bool = False
    unread: str = ""


def list_page(
    service: Service,
    visitor: Visitor,
    after: str | None = None,
    problem: str = "",
    status: int = 200,
    said: Mapping[str, str] | None = None,
) -> Response:
    """Show the batches after `after`; `problem` is why the form with `said` was refused."""
    batches, has_more = service.batches.page(visitor.name, after, NUM_BATCHES, "desc")
    rows = [figures_of(service, batch) for batch in batches]
    own = [batch for batch in service.batches.all() if batch.owner == visitor.name]
    values = {
        "rows": rows,
        "num_batches": len(own),
        "num_unfinished": sum(batch.ended is None for batch in own),
        "is_first": after is None,
        "last_id": rows[-1].id if has_more else None,
        "problem": problem,
        "said": SAID | dict(said or {}),
        "takes_webhooks": service.takes_webhooks,
        "max_bytes": service.max_file_bytes,
        "visitor": visitor,
        "refresh_seconds": REFRESH_SECONDS,
    }
    return page_response("list", values, status)


def batch_page(service: Service, visitor: Visitor, batch: Batch, number: int) -> Response:
    """Show one batch; the run's errors appear on the page."""
    figures = figures_of(service, batch)
    values = {
        "batch": figures,
        "record": batch.record,
        "ended": batch.ended,
        "progress": None if batch.ended else _progress(service, batch),
        "waits_for": None if batch.ended else service.keeper.hindrance(batch),
        "view": _run_view(service, batch, number),
        "last_tokens": LAST_TOKENS,
        "visitor": visitor,
        "refresh_seconds": None if figures.has_ended else _refresh_seconds(batch),
    }
    return page_response("batch", values)


def _refresh_seconds(batch: Batch) -> int:
    return REFRESH_SECONDS if batch.store.is_local else REFRESH_SECONDS_OBJECT_STORE


def _progress(service: Service, batch: Batch) -> Progress | None:
    try:
        return service.status(batch).progress
    except UserError:  # the figures show the error
        return None


def _run_view(service: Service, batch: Batch, number: int) -> RunView:
    try:
        if not is_submitted(batch.store):
            return RunView(problems=_problems(service, batch, None))
        run = Run.open(batch.store.uri)
        progress = None if batch.ended else service.status(batch).progress
        running = {} if progress is None else progress.running
        return RunView(
            jobs=job_page(run, progress, number),
            problems=_problems(service, batch, run),
            texts=_texts(run, running),
            num_running=len(running),
            has_report=True,
        )
    except UserError as error:
        return RunView(unread=str(service.refusal(error)))


def _problems(service: Service, batch: Batch, run: Run | None) -> tuple[Problem, ...]:
    ended = batch.ended
    if ended is None:
        return () if run is None else tuple(run_problems(run))
    if ended.error_file_id is None:
        return tuple(Problem(each.line, "", each.message) for each in ended.problems if each.line is not None)
    return tuple(file_problems(service.files.content(service.files.get(ended.error_file_id, batch.owner))))


def _texts(run: Run, running: Mapping[str, int]) -> tuple[Mapping[str, Any], ...]:
    longest = sorted(running, key=lambda name: -running[name])[:NUM_TEXTS]
    return tuple(partial_texts(run, longest, LAST_TOKENS)) if longest else ()
