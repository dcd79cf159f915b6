"""One job on a worker: its assignment, sequence and counts of this attempt."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from swiftbatch.jobs.checkpoints.checkpoint_files import (
    AttemptRecord,
    AttemptStart,
    ResumeRecord,
    Timeline,
    TimelineRecorder,
)
from swiftbatch.metrics.counters import DRAFT_KINDS
from swiftbatch.worker.constraints.thinking import Thinking
from swiftbatch.worker.engine.known_scores import KnownScores
from swiftbatch.worker.kv.cache_room import CachedJob
from swiftbatch.worker.kv.full_cache import FullKVCache
from swiftbatch.worker.sampling.draft_tree import Verification
from swiftbatch.worker.sampling.sequence import Sequence as TokenSequence
from swiftbatch.worker.session.resume import Recovery
from swiftbatch.worker.session.work_messages import Assignment, JobOutcome, OutcomeKind

LARGEST_N = 4  # as in TokenSwift's tables


def distinct(token_ids: np.ndarray) -> dict[str, float]:
    """Return Distinct-1 to Distinct-4 of `token_ids [num_tokens]`, the shares of distinct n-grams."""
    return {f"distinct_{n}": round(share, 4) for n, share in enumerate(distinct_shares(token_ids, LARGEST_N), start=1)}


def distinct_shares(token_ids: np.ndarray, largest_n: int) -> Iterator[float]:
    """Yield Distinct-1, Distinct-2, ... up to `largest_n`."""
    kinds, numbers = np.unique(token_ids, return_inverse=True)
    num_tokens, num_kinds = len(numbers), len(kinds)
    tokens = numbers.astype(np.int64)
    num_distinct = num_kinds
    for n in range(1, largest_n + 1):
        if num_tokens < n:
            yield 0.0
            continue
        if n > 1:
            ngrams, numbers = np.unique(numbers[:-1] * num_kinds + tokens[n - 1 :], return_inverse=True)
            num_distinct = len(ngrams)
        yield num_distinct / (num_tokens - n + 1)


@dataclass
class RunningJob:
    """Job on a worker; times are `time.monotonic()`, counts are of this attempt."""

    assignment: Assignment
    sequence: TokenSequence
    cache: FullKVCache
    recovery: Recovery | None  # None in a first attempt
    start: AttemptStart  # written to the attempt's files
    has_files: bool = False  # known once its checkpoints are closed
    started: float = field(default_factory=time.monotonic)
    thinking: Thinking | None = None  # None: the model does not think
    scores: KnownScores | None = None  # of the prompt's tokens; None: not asked for
    logged: float = field(default_factory=time.monotonic)
    num_logged_tokens: int = 0
    has_advanced: bool = False  # True once this attempt has drawn a token
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_tokens_by_draft: Counter[str] = field(default_factory=Counter)
    recorder: TimelineRecorder = field(default_factory=TimelineRecorder)

    @property
    def job_id(self) -> str:
        return self.assignment.job_id

    @property
    def cached(self) -> CachedJob:
        sequence = self.sequence
        growth = self.assignment.growth(sequence.num_prompt_tokens, sequence.num_generated_tokens)
        return CachedJob(self.cache, growth)

    def outcome(self, kind: OutcomeKind, reason: str = "", error_code: str = "") -> JobOutcome:
        return JobOutcome(kind, self.job_id, self.sequence.num_generated_tokens, reason, error_code)

    @property
    def num_recovered_tokens(self) -> int:
        return self.recovery.num_tokens if self.recovery else 0

    @property
    def num_recomputed_tokens(self) -> int:
        """Return how many tokens of an earlier attempt's reports must be drawn again."""
        return max(0, self.assignment.num_reported_tokens - self.num_recovered_tokens)

    def resume_record(self) -> ResumeRecord:
        """Return the record of this attempt's start, at its first new token."""
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
        """Count one verified step, whose tokens are already in the sequence."""
        self.num_drafts += verification.num_draft_tokens > 0
        self.num_draft_tokens += verification.num_draft_tokens
        self.num_accepted_tokens += verification.num_accepted_tokens
        self.num_tokens_by_draft[verification.draft_kind] += len(verification.committed_ids)
        counts = (self.sequence.num_generated_tokens, self.num_drafts, self.num_accepted_tokens)
        self.recorder.note(time.monotonic(), time.time(), *counts)

    def is_log_due(self, seconds: float, num_tokens: int) -> bool:
        """Return whether the token log is older than `seconds`, or lacks `num_tokens` tokens or more."""
        num_new = self.sequence.num_generated_tokens - self.num_logged_tokens
        return num_new >= num_tokens or (num_new > 0 and time.monotonic() - self.logged >= seconds)

    def metrics(self, attempts: Sequence[AttemptRecord], exactness: str) -> dict[str, Any]:
        """Return the metrics of a result line; the counts of drafts are those of the last attempt."""
        rewinds = self.sequence.rewinds
        resumes = [attempt.resume for attempt in attempts if attempt.resume is not None]
        return {
            "exactness": exactness,
            "num_drafts": self.num_drafts,
            "num_draft_tokens": self.num_draft_tokens,
            "num_accepted_tokens": self.num_accepted_tokens,
            "num_tokens_by_draft": {kind: self.num_tokens_by_draft[kind] for kind in DRAFT_KINDS},
            "mean_acceptance_length": round(1 + self.num_accepted_tokens / max(1, self.num_drafts), 3),
            "ms_per_token": round(_ms_per_token([each.timeline for each in attempts if each.timeline is not None]), 3),
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
        """Return the attempts found in files, with the current attempt brought up to date."""
        number = self.assignment.attempt
        resume = next((each.resume for each in found if each.number == number), None)
        known = {**self.start.model_dump(), "number": number, "resume": resume, "timeline": self.recorder.take()}
        return [*(each for each in found if each.number != number), AttemptRecord.model_validate(known)]


def _ms_per_token(timelines: Sequence[Timeline]) -> float:
    """Return decode time over decoded tokens of all attempts, without prompts and replays; 0.0 for a single step."""
    seconds = sum(each.seconds[-1] for each in timelines)
    num_tokens = sum(each.num_tokens[-1] - each.num_tokens[0] for each in timelines)
    return 1000 * seconds / num_tokens if num_tokens else 0.0
