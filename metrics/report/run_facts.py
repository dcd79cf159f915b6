"""The facts of a run for its report."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heappush, heappushpop
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from swiftbatch.jobs.checkpoints.checkpoint_files import AttemptRecord
from swiftbatch.jobs.checkpoints.checkpoint_store import CheckpointStore
from swiftbatch.jobs.checkpoints.token_log import PackedLogs
from swiftbatch.jobs.input.rejects import Reject
from swiftbatch.jobs.job import Job, JobRecord
from swiftbatch.jobs.run.job_index import JobEntry, JobIndex
from swiftbatch.jobs.run.output_line import line_id, shown_text
from swiftbatch.jobs.run.run import Run
from swiftbatch.jobs.run.run_records import DriverClaim, Progress, RunManifest, in_parallel
from swiftbatch.metrics.report.attempts import (
    DRAFTS,
    Attempt,
    Intervals,
    JobFacts,
    Outcome,
    State,
    attempts_of,
    parsed_history,
    rows_of,
)

MAX_BARS = 4000  # attempts on a page
MAX_INTERVALS = 2_000_000  # 48 bytes each
MIN_INTERVALS = 2  # per attempt, however many jobs there are


class LongAttempt(NamedTuple):
    """An attempt that may get a bar, and its job."""

    seconds: float
    order: int  # unique and greatest for the first, so that comparison stops here
    attempt: Attempt
    job_name: str
    job_number: int


class Tally:
    """Running sums over jobs and attempts, and the longest attempts."""

    def __init__(self, num_jobs: int) -> None:
        """The larger `num_jobs` is, the fewer intervals are kept per attempt."""
        self.states: Counter[State] = Counter()
        self.num_prompt_tokens = self.num_tokens = 0
        self.num_tokens_by_draft = dict.fromkeys(DRAFTS, 0)
        self.num_cut_thoughts = self.most_cut_tokens = 0  # the second is the largest limit that cut a thought
        self.outcomes: Counter[Outcome] = Counter()
        self.num_recovered_tokens = self.num_recomputed_tokens = 0
        self.workers: set[tuple[int, str]] = set()  # driver number and name
        # ends of all attempts, and of lost ones
        self.starts, self.ends, self.losses = array("d"), array("d"), array("d")
        self.longest: list[LongAttempt] = []
        self._most_stretches = max(MIN_INTERVALS, MAX_INTERVALS // max(1, num_jobs))
        self._numbers = array("d")

    @property
    def num_jobs(self) -> int:
        return self.states.total()

    def add(self, job: JobFacts) -> None:
        self.states[job.state] += 1
        self.num_prompt_tokens += job.num_prompt_tokens
        self.num_tokens += job.num_tokens
        for kind, count in zip(DRAFTS, job.num_tokens_by_draft or (), strict=False):
            self.num_tokens_by_draft[kind] += count
        if job.is_cut_thought:
            self.num_cut_thoughts += 1
            self.most_cut_tokens = max(self.most_cut_tokens, job.max_tokens)
        for attempt in job.attempts:
            self._add_attempt(job, attempt)
        for row in rows_of(job, self._most_stretches):
            self._numbers.extend(row)

    def stretches(self) -> Intervals:
        start, end, tokens, length, drafts, accepted = np.frombuffer(self._numbers, np.float64).reshape(-1, 6).T
        return Intervals(start, end, tokens, length, drafts, accepted)

    def covered_seconds(self) -> float:
        """Return the seconds with at least one running attempt."""
        if not self.starts:
            return 0.0
        order = np.argsort(self.starts)
        starts, ends = np.array(self.starts)[order], np.array(self.ends)[order]
        last = np.concatenate([[-np.inf], np.maximum.accumulate(ends)[:-1]])
        return float(np.maximum(0.0, ends - np.maximum(starts, last)).sum())

    def _add_attempt(self, job: JobFacts, attempt: Attempt) -> None:
        self.outcomes[attempt.outcome] += 1
        self.starts.append(attempt.start)
        self.ends.append(attempt.end)
        if attempt.outcome == "lost":
            self.losses.append(attempt.end)
        self.workers.add((attempt.driver, attempt.worker_id))
        if attempt.resume is not None:
            self.num_recovered_tokens += attempt.resume.num_recovered_tokens
            self.num_recomputed_tokens += attempt.resume.num_recomputed_tokens
        seconds = attempt.end - attempt.start
        if len(self.longest) < MAX_BARS:
            heappush(self.longest, LongAttempt(seconds, -len(self.starts), attempt, job.name, job.number))
        elif seconds > self.longest[0].seconds:
            heappushpop(self.longest, LongAttempt(seconds, -len(self.starts), attempt, job.name, job.number))


# The facts of jobs and attempts, read from the run's folder.


EXCERPT_CHARACTERS = 280
MAX_JOBS = 5000  # jobs on a page
URGENCY = {"failed": 0, "finished": 2}  # lower ones are listed first

Logged = tuple[list[AttemptRecord], int]
OUTCOMES: dict[State, Outcome] = {  # outcome of a job's newest attempt
    "finished": "finished",
    "cancelled": "cancelled",
    "running": "running",
    "failed": "lost",
    "pending": "lost",
}


@dataclass(frozen=True)
class RunFacts:
    """All facts of a report; `jobs` are the jobs that the report lists, and `tally` covers all jobs."""

    place: str
    manifest: RunManifest
    progress: Progress
    num_drivers: int
    jobs: tuple[JobFacts, ...]
    tally: Tally
    rejects: Sequence[Reject]

    @property
    def enough_for_thoughts(self) -> int:
        """Return a limit that should be enough for thoughts: twice the largest limit that cut one."""
        return 2 * self.tally.most_cut_tokens


def gather(run: Run, progress: Progress, drivers: Sequence[DriverClaim]) -> RunFacts:
    """Read a run; `drivers` are the claims of all its drivers, oldest first. Raises RunError, StoreError."""
    index = run.job_index().without("prompt_keys")
    reader = _Reader(run, progress, sorted(claim.started for claim in drivers), index)
    tally, doubtful = Tally(len(index)), list[JobFacts]()
    listed: dict[State, list[JobFacts]] = {state: [] for state in OUTCOMES}

    def take_in(job: JobFacts, is_late: bool = False) -> None:
        tally.add(job)
        if is_late or len(listed[job.state]) < MAX_JOBS:  # a late one may precede all listed ones
            listed[job.state].append(job)

    for job in reader.jobs():
        if _may_close_loops(job):
            doubtful.append(job)
        else:
            take_in(job)
    for job in reader.with_known_cuts(doubtful):
        take_in(job, is_late=True)
    return RunFacts(
        place=run.store.shown_uri,
        manifest=run.manifest,
        progress=progress,
        num_drivers=len(drivers),
        jobs=reader.with_prompts(_most_urgent(listed)),
        tally=tally,
        rejects=run.rejects(),
    )


def _most_urgent(listed: dict[State, list[JobFacts]]) -> list[JobFacts]:
    """Choose the jobs to list: failed, then unfinished ones first."""
    jobs = sorted(chain.from_iterable(listed.values()), key=lambda job: (URGENCY.get(job.state, 1), job.number))
    return sorted(jobs[:MAX_JOBS], key=lambda job: job.number)


def excerpt(text: str) -> str:
    return text if len(text) <= EXCERPT_CHARACTERS else f"{text[:EXCERPT_CHARACTERS]}…"


def _checkpoints(run: Run, finished: Container[str]) -> dict[str, Logged]:
    """Return attempts and logged tokens of unfinished jobs."""
    checkpoints, started = CheckpointStore.of(run), set(run.store.list("checkpoints"))
    packed = PackedLogs.of(run).read()

    def read(job_id: str) -> Logged:
        running = packed.get(job_id)
        is_there = job_id in started
        history = checkpoints.history(job_id) if is_there else []
        num_tokens = len(checkpoints.read_log(job_id).token_ids) if is_there else 0
        if running is None:
            return history, num_tokens
        return _with_running(history, running.record), max(num_tokens, len(running.log.token_ids))

    job_ids = [job_id for job_id in started.union(packed) if job_id not in finished]
    return dict(zip(job_ids, in_parallel(read, job_ids), strict=True))


def _with_running(history: list[AttemptRecord], running: AttemptRecord) -> list[AttemptRecord]:
    known = {record.number: record for record in history}
    own = known.get(running.number)
    known[running.number] = running if own is None else own.model_copy(update={"timeline": running.timeline})
    return [known[number] for number in sorted(known)]


def _may_be_cut(message: dict[str, Any], finish_reason: str) -> bool:
    """Return whether a chat may have run out of room in its thought."""
    is_thought_alone = bool(message.get("reasoning_content")) and not message["content"]
    return is_thought_alone and finish_reason in ("length", "repetition")


def _may_close_loops(job: JobFacts) -> bool:
    return job.is_cut_thought and job.finish_reason == "repetition"


def _closes_loops(job: Job) -> bool:
    loops = job.sampling.repetition_detection
    return loops is not None and loops.action == "close"


def _prompt(job: Job) -> str:
    """Return the start of a job's prompt; token ids stay ids, because the report has no tokenizer."""
    if job.prompt_ids is not None:
        return excerpt(f"tokens {' '.join(map(str, job.prompt_ids[:EXCERPT_CHARACTERS]))}")
    return excerpt(job.prompt or "\n".join(message.content for message in job.messages or ()))


class _Reader:
    """Reads facts from result lines and checkpoints."""

    def __init__(self, run: Run, progress: Progress, driver_starts: list[float], index: JobIndex) -> None:
        self._run, self._progress, self._index = run, progress, index
        self._driver_starts = driver_starts
        self._held = {custom_id for worker in progress.workers for custom_id in worker.jobs}

    def jobs(self) -> Iterator[JobFacts]:
        lines = self._run.lines_of(self._index)
        logged = _checkpoints(self._run, self._run.finished_ids())
        for number, (entry, line) in enumerate(zip(self._index.entries(), lines, strict=True), start=1):
            if line is not None and line["error"] is None:
                yield self._finished(number, entry, line["response"]["body"])
            else:
                yield self._unfinished(number, entry, line, *logged.get(entry.job_id, ([], 0)))

    def with_known_cuts(self, jobs: Sequence[JobFacts]) -> list[JobFacts]:
        """Clear `is_cut_thought` of jobs whose loop ended the thought."""
        records = self._records([job.number for job in jobs if _may_close_loops(job)])
        other = {number for number, record in records if not _closes_loops(record.job)}
        return [replace(job, is_cut_thought=False) if job.number in other else job for job in jobs]

    def with_prompts(self, jobs: Sequence[JobFacts]) -> tuple[JobFacts, ...]:
        prompts = {number: _prompt(record.job) for number, record in self._records([job.number for job in jobs])}
        return tuple(replace(job, prompt=prompts[job.number]) for job in jobs)

    def _records(self, numbers: Sequence[int]) -> Iterator[tuple[int, JobRecord]]:
        by_place = sorted(numbers, key=lambda number: self._index.places[number - 1])
        places = self._index.places[np.array(by_place, np.int64) - 1]
        return zip(by_place, self._run.records_at(places), strict=True)

    def _finished(self, number: int, entry: JobEntry, body: dict[str, Any]) -> JobFacts:
        choice, metrics = body["choices"][0], body["metrics"]
        message, reason = choice.get("message", {}), choice["finish_reason"]
        answer = {"message": message | {"reasoning_content": None}} if message else choice
        history, ended = parsed_history(metrics.get("attempts")), float(body.get("created", 0))
        by_draft = metrics.get("num_tokens_by_draft")
        return JobFacts(
            number=number,
            name=entry.name,
            num_prompt_tokens=entry.num_prompt_tokens,
            max_tokens=entry.max_tokens,
            state="finished",
            num_tokens=body["usage"]["completion_tokens"],
            excerpt=excerpt(shown_text(answer)),
            finish_reason=reason,
            num_drafts=int(metrics.get("num_drafts") or 0),
            num_accepted_tokens=int(metrics.get("num_accepted_tokens") or 0),
            num_tokens_by_draft=tuple(by_draft.get(kind, 0) for kind in DRAFTS) if by_draft else None,
            attempts=attempts_of(history, OUTCOMES["finished"], ended, self._driver_starts),
            file=self._run.result_file(entry.job_id),
            line_id=line_id(entry.job_id),
            is_cut_thought=_may_be_cut(message, reason),
        )

    def _unfinished(
        self, number: int, entry: JobEntry, line: dict[str, Any] | None, history: list[AttemptRecord], num_logged: int
    ) -> JobFacts:
        """Take the facts from error and checkpoints."""
        error = None if line is None else (str(line["error"]["code"]), str(line["error"]["message"]))
        state = self._state(entry, error)
        last_end = self._progress.updated if state == "running" else 0.0
        return JobFacts(
            number=number,
            name=entry.name,
            num_prompt_tokens=entry.num_prompt_tokens,
            max_tokens=entry.max_tokens,
            state=state,
            num_tokens=max(num_logged, self._progress.running.get(entry.name, 0)),
            error=error,
            attempts=attempts_of(history, OUTCOMES[state], last_end, self._driver_starts),
            file=None if error is None else f"errors/{entry.job_id}.json",
        )

    def _state(self, entry: JobEntry, error: tuple[str, str] | None) -> State:
        if error is not None:
            return "cancelled" if error[0] == "cancelled" else "failed"
        return "running" if entry.name in self._held else "pending"
