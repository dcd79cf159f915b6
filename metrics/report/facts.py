"""The facts about a run's jobs and their attempts, read from its folder for a report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Literal

from swiftbatch.jobs.checkpoints.checkpoint_store import AttemptRecord, CheckpointStore
from swiftbatch.jobs.checkpoints.packed_logs import PackedLogs
from swiftbatch.jobs.input.reader import Reject
from swiftbatch.jobs.job import Job, JobRecord
from swiftbatch.jobs.run.checked_reading import NUM_READERS
from swiftbatch.jobs.run.run import Progress, Run
from swiftbatch.jobs.run.run_records import DriverClaim, RunManifest
from swiftbatch.metrics.report.attempts import Attempt, Outcome, attempts_of, parsed_history, without_guesses

EXCERPT_CHARACTERS = 280
MAX_JOBS = 5000  # on a page
DRAFTS = ("chain", "tree", "none")  # the ways in which tokens come

State = Literal["finished", "failed", "cancelled", "running", "pending"]
OUTCOMES: dict[State, Outcome] = {  # of the newest attempt at a job
    "finished": "finished",
    "cancelled": "cancelled",
    "running": "running",
    "failed": "lost",
    "pending": "lost",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFacts:
    """One job, in few bytes, for there may be a million. `error` is (code, message).

    `prompt` and `excerpt`, of its answer, are empty where so many others have them that no page shows this job's.
    """

    name: str
    num_prompt_tokens: int
    max_tokens: int
    state: State
    num_tokens: int
    prompt: str
    excerpt: str = ""
    finish_reason: str = ""
    error: tuple[str, str] | None = None
    num_drafts: int = 0
    num_accepted_tokens: int = 0
    num_tokens_by_draft: tuple[int, ...] | None = None  # in the order of `DRAFTS`
    attempts: tuple[Attempt, ...] = ()
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
        return 2 * max((job.max_tokens for job in self.jobs if job.is_cut_thought), default=0)

    @property
    def attempts(self) -> Iterator[tuple[JobFacts, Attempt]]:
        return ((job, attempt) for job in self.jobs for attempt in job.attempts)


def gather(run: Run, progress: Progress, drivers: Sequence[DriverClaim]) -> RunFacts:
    """Read a run; `progress` is how it stands, `drivers` who held it, oldest first. Raises RunError, StoreError."""
    reader = _Reader(run, progress, sorted(claim.started for claim in drivers))
    jobs: list[JobFacts] = []  # in input order
    unfinished: dict[str, int] = {}  # the places of jobs in that
    for record, line in run.output_lines():
        if line is not None and line["error"] is None:
            jobs.append(reader.finished(record, line["response"]["body"]))
        else:
            unfinished[record.job_id] = len(jobs)
            jobs.append(reader.unfinished(record, line))
    for job_id, history, num_tokens in _checkpoints(run, unfinished):
        place = unfinished[job_id]
        jobs[place] = reader.with_checkpoint(jobs[place], history, num_tokens)
    return RunFacts(
        place=run.store.shown_uri,
        manifest=run.manifest,
        progress=progress,
        num_drivers=len(drivers),
        jobs=_with_known_ends(jobs),
        rejects=tuple(run.rejects()),
    )


def excerpt(text: str) -> str:
    return text if len(text) <= EXCERPT_CHARACTERS else f"{text[:EXCERPT_CHARACTERS]}…"


def _checkpoints(run: Run, job_ids: Container[str]) -> list[tuple[str, list[AttemptRecord], int]]:
    """The attempts, and the number of logged tokens, of those of some jobs that have left any."""
    checkpoints, started = CheckpointStore.of(run), set(run.store.list("checkpoints"))
    packed = PackedLogs.of(run).read()

    def read(job_id: str) -> tuple[str, list[AttemptRecord], int]:
        running = packed.get(job_id)
        is_there = job_id in started
        history = checkpoints.history(job_id) if is_there else []
        num_tokens = len(checkpoints.read_tokens(job_id)) if is_there else 0
        if running is None:
            return job_id, history, num_tokens
        return job_id, _with_running(history, running.record), max(num_tokens, len(running.log.token_ids))

    with ThreadPoolExecutor(NUM_READERS) as pool:
        return list(pool.map(read, [job_id for job_id in started.union(packed) if job_id in job_ids]))


def _with_running(history: list[AttemptRecord], running: AttemptRecord) -> list[AttemptRecord]:
    """The attempts with one whose timeline is in its worker's file; its own folder may have its beginning."""
    known = {record.number: record for record in history}
    own = known.get(running.number)
    known[running.number] = running if own is None else own.model_copy(update={"timeline": running.timeline})
    return [known[number] for number in sorted(known)]


def _with_known_ends(jobs: list[JobFacts]) -> tuple[JobFacts, ...]:
    if not any(attempt.marks for job in jobs for attempt in job.attempts):
        return tuple(jobs)
    return tuple(
        replace(job, attempts=without_guesses(job.attempts))
        if any(attempt.has_guessed_end for attempt in job.attempts)
        else job
        for job in jobs
    )


def _is_cut(record: JobRecord, finish_reason: str) -> bool:
    """Return whether a thought without an answer ended for want of room: a loop that closes thoughts does it else."""
    loops = record.job.sampling.repetition_detection
    closes = loops is not None and loops.action == "close"
    return finish_reason == "length" or (finish_reason == "repetition" and closes)


def _named(record: JobRecord) -> dict[str, Any]:
    """The facts about a job that were known before it ran."""
    max_tokens = record.job.sampling.max_tokens
    return {"name": record.job.name, "num_prompt_tokens": record.num_prompt_tokens, "max_tokens": max_tokens}


def _prompt(job: Job) -> str:
    """The beginning of a job's prompt; token ids are numbers to a page, which has no tokenizer."""
    if job.prompt_ids is not None:
        return excerpt(f"tokens {' '.join(map(str, job.prompt_ids[:EXCERPT_CHARACTERS]))}")
    return excerpt(job.prompt or "\n".join(message.content for message in job.messages or ()))


class _Reader:
    """Makes facts of result lines and checkpoints."""

    def __init__(self, run: Run, progress: Progress, driver_starts: list[float]) -> None:
        self._run = run
        self._progress = progress
        self._driver_starts = driver_starts
        self._held = {custom_id for worker in progress.workers for custom_id in worker.jobs}
        self._num_met: Counter[State] = Counter()

    def finished(self, record: JobRecord, body: dict[str, Any]) -> JobFacts:
        choice, metrics = body["choices"][0], body["metrics"]
        message = choice.get("message", {})
        text = message["content"] if message else choice["text"]
        is_thought_alone = bool(message.get("reasoning_content")) and not text
        history, ended = parsed_history(metrics.get("attempts")), float(body.get("created", 0))
        by_draft = metrics.get("num_tokens_by_draft")
        is_shown = self._may_be_shown("finished")
        return JobFacts(
            **_named(record),
            state="finished",
            num_tokens=body["usage"]["completion_tokens"],
            prompt=_prompt(record.job) if is_shown else "",
            excerpt=excerpt(text) if is_shown else "",
            finish_reason=choice["finish_reason"],
            num_drafts=int(metrics.get("num_drafts") or 0),
            num_accepted_tokens=int(metrics.get("num_accepted_tokens") or 0),
            num_tokens_by_draft=tuple(by_draft.get(kind, 0) for kind in DRAFTS) if by_draft else None,
            attempts=attempts_of(history, OUTCOMES["finished"], ended, self._driver_starts),
            file=self._run.result_file(record.job_id),
            is_cut_thought=is_thought_alone and _is_cut(record, choice["finish_reason"]),
        )

    def unfinished(self, record: JobRecord, line: dict[str, Any] | None) -> JobFacts:
        """A job without a result: what its error says, if it has one."""
        error = None if line is None else (str(line["error"]["code"]), str(line["error"]["message"]))
        state = self._state(record, error)
        return JobFacts(
            **_named(record),
            state=state,
            num_tokens=self._progress.running.get(record.job.name, 0),
            prompt=_prompt(record.job) if self._may_be_shown(state) else "",
            error=error,
            file=None if error is None else f"errors/{record.job_id}.json",
        )

    def with_checkpoint(self, job: JobFacts, history: list[AttemptRecord], num_logged_tokens: int) -> JobFacts:
        """The facts about a job without a result, with what its checkpoints say."""
        last_end = self._progress.updated if job.state == "running" else 0.0
        attempts = attempts_of(history, OUTCOMES[job.state], last_end, self._driver_starts)
        return replace(job, num_tokens=max(num_logged_tokens, job.num_tokens), attempts=attempts)

    def _may_be_shown(self, state: State) -> bool:
        """Count a job of a state; tells whether a page that shows the first ones of each may show it."""
        self._num_met[state] += 1
        return self._num_met[state] <= MAX_JOBS

    def _state(self, record: JobRecord, error: tuple[str, str] | None) -> State:
        if error is not None:
            return "cancelled" if error[0] == "cancelled" else "failed"
        return "running" if record.job.name in self._held else "pending"
