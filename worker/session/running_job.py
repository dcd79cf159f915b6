"""One job on a worker: its assignment, its sequence, and what was done for it in this attempt.

Where the caches of a worker's jobs outgrow its memory, some of them go back to the queue.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from swiftbatch.jobs.checkpoints.checkpoint_store import AttemptRecord, AttemptStart, ResumeRecord
from swiftbatch.jobs.checkpoints.timeline import TimelineRecorder
from swiftbatch.metrics.worker_counters import DRAFT_KINDS
from swiftbatch.worker.caches.full import FullKVCache
from swiftbatch.worker.caches.memory.pages import ROOM_BEHIND, WindowPages, pages_of
from swiftbatch.worker.caches.room import HeldPositions
from swiftbatch.worker.constraints.thought import Thinking
from swiftbatch.worker.drawing.sequence import Sequence as TokenSequence
from swiftbatch.worker.drawing.verification import Verification
from swiftbatch.worker.kernels.sizes import ROW_CHOICES
from swiftbatch.worker.session.diversity import distinct
from swiftbatch.worker.session.resume import Recovery
from swiftbatch.worker.session.work import Assignment, JobProgress

MOST_READ = 5 * ROW_CHOICES[-1]  # known tokens of a job in a step: twice copied, then read in three forwards at most


@dataclass
class RunningJob:
    """A job on a worker. Times are of `time.monotonic()`, counts of this attempt."""

    assignment: Assignment
    sequence: TokenSequence
    cache: FullKVCache
    recovery: Recovery | None  # None in a first attempt
    start: AttemptStart  # what its files say of it
    has_files: bool = False  # known once its checkpoints are closed
    started: float = field(default_factory=time.monotonic)
    thinking: Thinking | None = None  # None for a model that does not
    logged: float = field(default_factory=time.monotonic)
    num_logged_tokens: int = 0
    has_advanced: bool = False  # a first new token is there
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_tokens_by_draft: Counter[str] = field(default_factory=Counter)
    recorder: TimelineRecorder = field(default_factory=TimelineRecorder)

    @property
    def job_id(self) -> str:
        return self.assignment.job_id

    @property
    def progress(self) -> JobProgress:
        return JobProgress(self.job_id, self.sequence.num_generated_tokens)

    @property
    def num_recovered_tokens(self) -> int:
        return self.recovery.num_tokens if self.recovery else 0

    @property
    def num_recomputed_tokens(self) -> int:
        """Tokens that the last attempt was heard to have, and that this one has to draw again."""
        return max(0, self.assignment.num_reported_tokens - self.num_recovered_tokens)

    def resume_record(self) -> ResumeRecord:
        """Record how this attempt began. `seconds` are those since: until the first new token when called there."""
        assert self.recovery is not None
        return ResumeRecord(
            kind=self.recovery.kind,
            num_recovered_tokens=self.recovery.num_tokens,
            num_recomputed_tokens=self.num_recomputed_tokens,
            num_loaded_positions=self.recovery.num_loaded_positions,
            seconds=round(time.monotonic() - self.started, 3),
            resumed=time.time(),
        )

    def count(self, verification: Verification) -> None:
        """Count one verified step, whose tokens the sequence has already."""
        self.num_drafts += verification.num_draft_tokens > 0
        self.num_draft_tokens += verification.num_draft_tokens
        self.num_accepted_tokens += verification.num_accepted_tokens
        self.num_tokens_by_draft[verification.draft_kind] += len(verification.committed_ids)
        counts = (self.sequence.num_generated_tokens, self.num_drafts, self.num_accepted_tokens)
        self.recorder.note(time.monotonic(), time.time(), *counts)

    def is_log_due(self, seconds: float, num_tokens: int) -> bool:
        """Return whether the token log is older than `seconds` or `num_tokens` behind."""
        num_new = self.sequence.num_generated_tokens - self.num_logged_tokens
        return num_new >= num_tokens or (num_new > 0 and time.monotonic() - self.logged >= seconds)

    def metrics(self, attempts: Sequence[AttemptRecord], exactness: str) -> dict[str, Any]:
        """Numbers for the result line. Drafts and times are the last attempt's, recomputed tokens those of all.

        Distinct-1 to Distinct-4 are those of the whole output.
        """
        seconds = time.monotonic() - self.started
        num_new_tokens = sum(self.num_tokens_by_draft.values())
        rewinds = self.sequence.rewinds
        resumes = [attempt.resume for attempt in attempts if attempt.resume is not None]
        return {
            "exactness": exactness,
            "num_drafts": self.num_drafts,
            "num_draft_tokens": self.num_draft_tokens,
            "num_accepted_tokens": self.num_accepted_tokens,
            "num_tokens_by_draft": {kind: self.num_tokens_by_draft[kind] for kind in DRAFT_KINDS},
            "mean_acceptance_length": round(1 + self.num_accepted_tokens / max(1, self.num_drafts), 3),
            "ms_per_token": round(1000 * seconds / max(1, num_new_tokens), 3),
            **distinct(self.sequence.output_ids),
            "num_attempts": self.assignment.num_attempts,
            "num_resumes": self.assignment.num_attempts - 1,
            "num_recovered_tokens": self.num_recovered_tokens,
            "num_rewinds": len(rewinds),
            "num_rewound_tokens": sum(rewind.num_tokens - rewind.num_kept for rewind in rewinds),
            "num_recomputed_tokens": sum(resume.num_recomputed_tokens for resume in resumes),
            "attempts": [attempt.model_dump() for attempt in attempts],
        }

    def history(self, found: Sequence[AttemptRecord]) -> list[AttemptRecord]:
        """The attempts that have left files, and this one as it is now: its files are older, or absent."""
        number = self.assignment.attempt
        resume = next((each.resume for each in found if each.number == number), None)
        known = {**self.start.model_dump(), "number": number, "resume": resume, "timeline": self.recorder.take()}
        return [*(each for each in found if each.number != number), AttemptRecord.model_validate(known)]


@dataclass(frozen=True)
class JobSizes:
    """The memory of a worker's jobs."""

    num_beside: int = 0  # positions that the states of a job's layers take room of
    page: int | None = None  # positions of a page, as `pages_of` has it
    held: HeldPositions | None = None  # of a job's positions; None for all
    windows: WindowPages | None = None  # of layers that have pages of their own

    def num_pages(self, jobs: Iterable[RunningJob]) -> int:
        """The pages that jobs take for all tokens that they have, those that are still to be read included."""
        return sum(pages_of(self._held(job) + self.num_beside, self.page) for job in jobs)

    def num_window_pages(self, jobs: Iterable[RunningJob]) -> int:
        """The same of layers with a window: what a checkpoint that lags keeps there counts, too."""
        return 0 if self.windows is None else sum(self._in_windows(job, self.windows.held) for job in jobs)

    def _in_windows(self, job: RunningJob, held: HeldPositions) -> int:
        """What it is expected to hold, or has and takes for a step; what it holds for others gives way."""
        num_tokens, cache = len(job.sequence), job.cache
        end = min(num_tokens + ROOM_BEHIND, cache.length + MOST_READ)
        return max(pages_of(held.of(num_tokens), self.page), cache.num_window_pages_for(end))

    def _held(self, job: RunningJob) -> int:
        """The positions that take as much; those of a shared prompt are all held, for others."""
        num_positions = len(job.sequence)
        return num_positions if self.held is None else self.held.of(num_positions, job.assignment.num_shared_tokens)


def without_room(
    jobs: Collection[RunningJob],
    num_pages: int | None,
    sizes: JobSizes = JobSizes(),
    num_window_pages: int | None = None,
) -> list[RunningJob]:
    """The jobs that have to leave before the next step: the youngest, as few as possible; the eldest always stays.

    Age counts from a job's first attempt in the run. So no job ever makes an older one leave, on no worker: two can't
    throw each other out in turns, and the eldest of all reaches its end. The youngest is, as a rule, the one that loses
    least, too: it has run for the shortest time, and long jobs begin first.
    """
    by_age = sorted(jobs, key=lambda job: job.assignment.seniority)
    leaving = list[RunningJob]()
    for most, num_taken in ((num_pages, sizes.num_pages), (num_window_pages, sizes.num_window_pages)):
        num_used = num_taken(by_age)
        while most is not None and num_used > most and len(by_age) > 1:
            leaving.append(by_age.pop())
            num_used -= num_taken(leaving[-1:])
    return leaving
