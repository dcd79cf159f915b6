"""Which job runs next, and when a job has had its chances. Plain bookkeeping, no Ray and no files."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from jobs.job import JobRecord

FIRST_RETRY_SECONDS = 0.5
LONGEST_RETRY_SECONDS = 60.0
PROGRESS_SHARE = 0.01  # an attempt that adds less than this share of max_tokens has made no progress

STATES = ("pending", "running", "finished", "failed", "cancelled")


@dataclass
class _Entry:
    """One job that is still to do."""

    record: JobRecord
    num_generated_tokens: int = 0  # as last reported
    num_tokens_at_last_loss: int = 0  # the most it ever had when an attempt was lost
    num_strikes: int = 0  # attempts lost in a row without progress
    not_before: float = 0.0
    is_running: bool = False

    @property
    def length(self) -> int:
        return self.record.num_prompt_tokens + self.record.job.sampling.max_tokens

    @property
    def num_left(self) -> int:
        return max(0, self.record.job.sampling.max_tokens - self.num_generated_tokens)


@dataclass
class JobQueue:
    """The jobs of a run that are still to do, longest first, and counts of the others.

    A job is given up after `max_attempts` attempts in a row that were lost without progress. A long job that is
    preempted often but moves on each time is never given up; one that kills its workers at the same token is.
    A job that was lost twice so runs alone from then on, so that it can't draw its neighbours into its end.
    """

    max_attempts: int
    num_ended: dict[str, int] = field(default_factory=lambda: {"finished": 0, "failed": 0, "cancelled": 0})
    num_tokens_of_ended: int = 0
    _entries: dict[str, _Entry] = field(default_factory=dict)

    def add(self, record: JobRecord, num_generated_tokens: int = 0) -> None:
        """Add a job to do; `num_generated_tokens` are those that its token log already holds."""
        self._entries[record.job_id] = _Entry(record, num_generated_tokens, num_generated_tokens)

    def add_ended(self, state: str, num_generated_tokens: int) -> None:
        """Count a job that an earlier driver saw end."""
        self.num_ended[state] += 1
        self.num_tokens_of_ended += num_generated_tokens

    def take(self, neighbours: Collection[str], now: float) -> JobRecord | None:
        """Take the longest job that may run now beside `neighbours` (job ids), or None."""
        if any(self._is_suspect(self._entries[job_id]) for job_id in neighbours if job_id in self._entries):
            return None
        waiting = [e for e in self._entries.values() if not e.is_running and e.not_before <= now]
        fitting = [e for e in waiting if not (neighbours and self._is_suspect(e))]
        if not fitting:
            return None
        entry = max(fitting, key=lambda e: (e.length, -e.record.line_number))
        entry.is_running = True
        return entry.record

    def progress(self, job_id: str, num_generated_tokens: int) -> None:
        """Note how far a job is; enough progress clears its strikes."""
        if entry := self._entries.get(job_id):
            entry.num_generated_tokens = num_generated_tokens
            if self._has_progressed(entry):
                entry.num_strikes = 0

    def finish(self, job_id: str, num_generated_tokens: int) -> bool:
        """Note a result; False if the job had ended already."""
        return self._end(job_id, "finished", num_generated_tokens)

    def cancel(self, job_id: str) -> bool:
        """Drop a job; False if it had ended already."""
        return self._end(job_id, "cancelled")

    def give_up(self, job_id: str) -> bool:
        """Drop a job that has had its attempts; False if it had ended already."""
        return self._end(job_id, "failed")

    def lose(self, job_id: str, now: float) -> bool:
        """Put a job back whose attempt was lost. Returns False if it has no attempt left: then call `give_up`."""
        entry = self._entries[job_id]
        entry.num_strikes = 1 if self._has_progressed(entry) else entry.num_strikes + 1
        entry.num_tokens_at_last_loss = max(entry.num_tokens_at_last_loss, entry.num_generated_tokens)
        entry.not_before = now + min(LONGEST_RETRY_SECONDS, FIRST_RETRY_SECONDS * 2 ** (entry.num_strikes - 1))
        entry.is_running = False
        return entry.num_strikes < self.max_attempts

    def stop_running(self) -> None:
        """All workers are gone: what ran is pending again, without blame."""
        for entry in self._entries.values():
            entry.is_running = False

    def record(self, job_id: str) -> JobRecord | None:
        """The job, while it is still to do."""
        entry = self._entries.get(job_id)
        return entry.record if entry else None

    def num_reported_tokens(self, job_id: str) -> int:
        """The tokens that a job had when it was last heard of."""
        return self._entries[job_id].num_generated_tokens

    def unfinished(self) -> list[str]:
        """Ids of all jobs still to do."""
        return list(self._entries)

    def running(self) -> list[tuple[JobRecord, int]]:
        """Running jobs with the tokens they have."""
        return [(e.record, e.num_generated_tokens) for e in self._entries.values() if e.is_running]

    @property
    def num_generated_tokens(self) -> int:
        """Tokens of all jobs so far, the finished ones included."""
        return self.num_tokens_of_ended + sum(e.num_generated_tokens for e in self._entries.values())

    @property
    def num_tokens_left(self) -> int:
        """Tokens still to generate if every job runs to its max_tokens."""
        return sum(e.num_left for e in self._entries.values())

    def counts(self) -> dict[str, int]:
        """Number of jobs by state."""
        num_running = sum(e.is_running for e in self._entries.values())
        return {"pending": len(self._entries) - num_running, "running": num_running, **self.num_ended}

    def _is_suspect(self, entry: _Entry) -> bool:
        return entry.num_strikes >= max(1, min(2, self.max_attempts - 1))

    def _has_progressed(self, entry: _Entry) -> bool:
        needed = max(1, int(PROGRESS_SHARE * entry.record.job.sampling.max_tokens))
        return entry.num_generated_tokens >= entry.num_tokens_at_last_loss + needed

    def _end(self, job_id: str, state: str, num_generated_tokens: int | None = None) -> bool:
        entry = self._entries.pop(job_id, None)
        if entry is None:
            return False
        self.add_ended(state, entry.num_generated_tokens if num_generated_tokens is None else num_generated_tokens)
        return True
