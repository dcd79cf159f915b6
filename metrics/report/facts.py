"""The facts about a run's jobs and their attempts, read from its folder for a report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Literal

from swiftbatch.jobs.checkpoints.checkpoint_store import AttemptRecord, CheckpointStore
from swiftbatch.jobs.checkpoints.packed_logs import PackedLogs
from swiftbatch.jobs.input.reader import Reject
from swiftbatch.jobs.job import JobRecord
from swiftbatch.jobs.run.checked_reading import NUM_READERS
from swiftbatch.jobs.run.run import Progress, Run
from swiftbatch.jobs.run.run_records import DriverClaim, RunManifest
from swiftbatch.metrics.report.attempts import Attempt, Outcome, attempts_of, parsed_history, without_guesses

EXCERPT_CHARACTERS = 280

State = Literal["finished", "failed", "cancelled", "running", "pending"]
OUTCOMES: dict[State, Outcome] = {  # of the newest attempt at a job
    "finished": "finished",
    "cancelled": "cancelled",
    "running": "running",
    "failed": "lost",
    "pending": "lost",
}


@dataclass(frozen=True)
class JobFacts:
    """One job. `metrics` are those of its result line, {} without one; `error` is (code, message)."""

    record: JobRecord
    state: State
    num_tokens: int
    excerpt: str
    finish_reason: str
    error: tuple[str, str] | None
    metrics: dict[str, Any]
    attempts: tuple[Attempt, ...]
    file: str | None = None  # of the run, that has its result or its error
    is_cut_thought: bool = False  # it ended before its thought did, for want of room


@dataclass(frozen=True)
class RunFacts:
    """All that a report shows; `place` is the run's folder without credentials."""

    place: str
    manifest: RunManifest
    progress: Progress
    num_drivers: int
    jobs: tuple[JobFacts, ...]
    rejects: tuple[Reject, ...]

    @property
    def num_cut_thoughts(self) -> int:
        return sum(job.is_cut_thought for job in self.jobs)

    @property
    def enough_for_thoughts(self) -> int:
        """Twice the most tokens that a job may have whose thought was cut: a limit to try next."""
        return 2 * max((job.record.job.sampling.max_tokens for job in self.jobs if job.is_cut_thought), default=0)

    @property
    def attempts(self) -> Iterator[tuple[JobFacts, Attempt]]:
        return ((job, attempt) for job in self.jobs for attempt in job.attempts)


def gather(run: Run, progress: Progress, drivers: Sequence[DriverClaim]) -> RunFacts:
    """Read a run; `progress` is how it stands, `drivers` who held it, oldest first. Raises RunError, StoreError."""
    reader = _Reader(run, progress, sorted(claim.started for claim in drivers))
    jobs: dict[str, JobFacts | None] = {}  # in input order
    unfinished: list[tuple[JobRecord, dict[str, Any] | None]] = []
    for record, line in run.output_lines():
        if line is not None and line["error"] is None:
            jobs[record.job_id] = reader.finished(record, line["response"]["body"])
        else:
            jobs[record.job_id] = None
            unfinished.append((record, line))
    kept = _checkpoints(run, [record for record, _ in unfinished])
    for (record, line), (history, num_tokens) in zip(unfinished, kept, strict=True):
        jobs[record.job_id] = reader.unfinished(record, line, history, num_tokens)
    return RunFacts(
        place=run.store.shown_uri,
        manifest=run.manifest,
        progress=progress,
        num_drivers=len(drivers),
        jobs=_with_known_ends([job for job in jobs.values() if job is not None]),
        rejects=tuple(run.rejects()),
    )


def excerpt(text: str) -> str:
    return text if len(text) <= EXCERPT_CHARACTERS else f"{text[:EXCERPT_CHARACTERS]}…"


def _checkpoints(run: Run, records: Sequence[JobRecord]) -> list[tuple[list[AttemptRecord], int]]:
    """The attempts and the number of logged tokens of jobs without a result."""
    checkpoints, started = CheckpointStore.of(run), set(run.store.list("checkpoints"))
    packed = PackedLogs.of(run).read()

    def read(record: JobRecord) -> tuple[list[AttemptRecord], int]:
        running = packed.get(record.job_id)
        is_there = record.job_id in started
        history = checkpoints.history(record.job_id) if is_there else []
        num_tokens = len(checkpoints.read_tokens(record.job_id)) if is_there else 0
        if running is None:
            return history, num_tokens
        return _with_running(history, running.record), max(num_tokens, len(running.log.token_ids))

    with ThreadPoolExecutor(NUM_READERS) as pool:
        return list(pool.map(read, records))


def _with_running(history: list[AttemptRecord], running: AttemptRecord) -> list[AttemptRecord]:
    """The attempts with one whose timeline is in its worker's file; its own folder may have its beginning."""
    known = {record.number: record for record in history}
    own = known.get(running.number)
    known[running.number] = running if own is None else own.model_copy(update={"timeline": running.timeline})
    return [known[number] for number in sorted(known)]


def _with_known_ends(jobs: list[JobFacts]) -> tuple[JobFacts, ...]:
    if not any(attempt.timeline for job in jobs for attempt in job.attempts):
        return tuple(jobs)
    return tuple(replace(job, attempts=without_guesses(job.attempts)) for job in jobs)


def _is_cut(record: JobRecord, finish_reason: str) -> bool:
    """Return whether a thought without an answer ended for want of room: a loop that closes thoughts does it else."""
    loops = record.job.sampling.repetition_detection
    closes = loops is not None and loops.action == "close"
    return finish_reason == "length" or (finish_reason == "repetition" and closes)


class _Reader:
    """Makes facts of result lines and checkpoints."""

    def __init__(self, run: Run, progress: Progress, driver_starts: list[float]) -> None:
        self._run = run
        self._progress = progress
        self._driver_starts = driver_starts
        self._held = {custom_id for worker in progress.workers for custom_id in worker.jobs}

    def finished(self, record: JobRecord, body: dict[str, Any]) -> JobFacts:
        choice, metrics = body["choices"][0], body["metrics"]
        message = choice.get("message", {})
        text = message["content"] if message else choice["text"]
        is_thought_alone = bool(message.get("reasoning_content")) and not text
        history, ended = parsed_history(metrics.get("attempts")), float(body.get("created", 0))
        return JobFacts(
            record=record,
            state="finished",
            num_tokens=body["usage"]["completion_tokens"],
            excerpt=excerpt(text),
            finish_reason=choice["finish_reason"],
            error=None,
            metrics={name: value for name, value in metrics.items() if name != "attempts"},
            attempts=attempts_of(history, OUTCOMES["finished"], ended, self._driver_starts),
            file=self._run.result_file(record.job_id),
            is_cut_thought=is_thought_alone and _is_cut(record, choice["finish_reason"]),
        )

    def unfinished(
        self, record: JobRecord, line: dict[str, Any] | None, history: list[AttemptRecord], num_logged_tokens: int
    ) -> JobFacts:
        """A job without a result: what its error and its checkpoints say."""
        error = None if line is None else (str(line["error"]["code"]), str(line["error"]["message"]))
        state, custom_id = self._state(record, error), record.job.name
        last_end = self._progress.updated if state == "running" else 0.0
        return JobFacts(
            record=record,
            state=state,
            num_tokens=max(num_logged_tokens, self._progress.running.get(custom_id, 0)),
            excerpt="",
            finish_reason="",
            error=error,
            metrics={},
            attempts=attempts_of(history, OUTCOMES[state], last_end, self._driver_starts),
            file=None if error is None else f"errors/{record.job_id}.json",
        )

    def _state(self, record: JobRecord, error: tuple[str, str] | None) -> State:
        if error is not None:
            return "cancelled" if error[0] == "cancelled" else "failed"
        return "running" if record.job.name in self._held else "pending"
