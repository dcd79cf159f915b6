"""What a worker's engine and the driver count, as plain numbers.

Nothing here knows Prometheus: the engine adds to its counters in its own loop, the exporter reads them when scraped.
`num_accepted_tokens` never counts the bonus token, so mean acceptance length = 1 + accepted / drafts.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

MAX_POSITIONS_COUNTED = 16  # accepted tokens are counted per draft position up to here; deeper ones in the sum only

_MINUTE, _HOUR, _DAY = 60.0, 3600.0, 86_400.0
JOB_SECONDS_BOUNDS = (1.0, 5.0, 15.0, _MINUTE, 300.0, 900.0, _HOUR, 4 * _HOUR, 12 * _HOUR, _DAY, 3 * _DAY, 7 * _DAY)
JOB_TOKENS_BOUNDS = tuple(float(2**power) for power in range(7, 18))  # 128 .. 131,072 tokens
CHECKPOINT_KINDS = ("tokens", "state")
STATES_OF_ONE_WORKER = ("last_checkpoint", "checkpoint_interval_seconds", "kv_cache_tokens")  # they have no sum
CHECKPOINT_SECONDS_BOUNDS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 30.0)


@contextmanager
def timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    """Add what the block takes to the seconds of a phase."""
    started = time.perf_counter()
    yield
    seconds[phase] += time.perf_counter() - started


@dataclass
class Histogram:
    """Observations counted by upper bound; the last count is of those above every bound."""

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)  # [num_bounds + 1]
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        """Count one observation."""
        self.counts[bisect.bisect_left(self.bounds, value)] += 1
        self.total += value


@dataclass
class EngineCounters:
    """One worker's counts since it started. Times are in seconds, sizes in bytes."""

    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0  # committed in this process; recovered ones are counted apart
    num_prefill_tokens: int = 0  # read through the target before a sequence can go on: prompts, and replayed outputs
    num_drafts: int = 0  # verifications that had at least one drafted node
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = field(default_factory=lambda: [0] * MAX_POSITIONS_COUNTED)
    num_steps: int = 0
    step_seconds: dict[str, float] = field(default_factory=lambda: {"propose": 0.0, "verify": 0.0, "commit": 0.0})
    num_resumes: dict[str, int] = field(default_factory=dict)  # by kind: kv, replay
    num_tokens_recovered: int = 0
    num_tokens_recomputed: int = 0
    num_stale_attempt_rejections: int = 0
    checkpoint_bytes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CHECKPOINT_KINDS, 0))
    checkpoint_seconds: dict[str, Histogram] = field(
        default_factory=lambda: {kind: Histogram(CHECKPOINT_SECONDS_BOUNDS) for kind in CHECKPOINT_KINDS}
    )
    last_checkpoint: float | None = None  # `time.time()`, or when the work began; None while nothing runs
    checkpoint_interval_seconds: float = 0.0  # wished for between two token logs of a job
    num_store_retries: int = 0  # reads and writes of the run's files that were tried again
    kv_cache_tokens: int = 0
    jobs_finished: dict[str, int] = field(default_factory=dict)  # by finish reason
    job_seconds: Histogram = field(default_factory=lambda: Histogram(JOB_SECONDS_BOUNDS))
    job_generation_tokens: Histogram = field(default_factory=lambda: Histogram(JOB_TOKENS_BOUNDS))

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per verification with the bonus token: 1 + accepted / drafts; 1.0 before the first draft."""
        return 1.0 + (self.num_accepted_tokens / self.num_drafts if self.num_drafts else 0.0)

    @property
    def acceptance_rate(self) -> float:
        """Accepted over drafted tokens; 0.0 before the first draft."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    def count_draft(self, num_draft_tokens: int, num_accepted_tokens: int) -> None:
        """Count one verified draft tree; an empty one (plain decoding) counts nothing."""
        if num_draft_tokens == 0:
            return
        self.num_drafts += 1
        self.num_draft_tokens += num_draft_tokens
        self.num_accepted_tokens += num_accepted_tokens
        for position in range(min(num_accepted_tokens, MAX_POSITIONS_COUNTED)):
            self.num_accepted_tokens_per_pos[position] += 1

    def count_resume(self, kind: str, num_tokens_recovered: int, num_tokens_recomputed: int) -> None:
        """Count one resume: `kv` loaded the cache, `replay` runs the recovered tokens through the target again.

        Recomputed are the tokens that were there once, in no checkpoint, and had to be drawn again.
        """
        self.num_resumes[kind] = self.num_resumes.get(kind, 0) + 1
        self.num_tokens_recovered += num_tokens_recovered
        self.num_tokens_recomputed += num_tokens_recomputed

    def count_checkpoint(self, kind: str, num_bytes: int, seconds: float) -> None:
        """Count one file written: a token log, or a part of a state."""
        self.checkpoint_bytes[kind] += num_bytes
        self.checkpoint_seconds[kind].observe(seconds)
        self.last_checkpoint = time.time()

    def note_work(self, is_running: bool) -> None:
        """Note whether there are jobs: the age of the last checkpoint counts from the first one's start."""
        self.last_checkpoint = (self.last_checkpoint or time.time()) if is_running else None

    def count_store_retry(self) -> None:
        """Count one more try of a read or write that failed."""
        self.num_store_retries += 1

    def count_finished(self, reason: str, seconds: float, num_generation_tokens: int) -> None:
        """Count one finished job by its finish reason."""
        self.jobs_finished[reason] = self.jobs_finished.get(reason, 0) + 1
        self.job_seconds.observe(seconds)
        self.job_generation_tokens.observe(num_generation_tokens)

    def add(self, other: EngineCounters) -> None:
        """Add what another worker has counted."""
        for name in {one.name for one in fields(self)}.difference(STATES_OF_ONE_WORKER):
            setattr(self, name, _sum(getattr(self, name), getattr(other, name)))


@dataclass
class DriverCounters:
    """What only the driver sees: jobs by state, what it took back from workers or gave up, and all workers' counts."""

    jobs: dict[str, int] = field(default_factory=dict)  # by state: pending, running, finished, failed, cancelled
    workers: dict[str, int] = field(default_factory=dict)  # by state: starting, ready, draining
    worker_seconds: dict[str, float] = field(
        default_factory=dict
    )  # that started workers were held, by device: cpu, gpu
    eta_seconds: float | None = None  # at most; None before anything has a speed, and when nothing runs
    num_preemptions: dict[str, int] = field(default_factory=dict)  # by reason
    num_store_retries: int = 0
    jobs_finished: dict[str, int] = field(default_factory=dict)  # without a result: failed, cancelled
    by_worker: dict[str, EngineCounters] = field(default_factory=dict)  # newest counts, lost workers' included

    def count_store_retry(self) -> None:
        """Count one more try of a read or write that failed."""
        self.num_store_retries += 1

    def count_preemption(self, reason: str) -> None:
        """Count one job that goes back to the queue with its checkpoint."""
        self.num_preemptions[reason] = self.num_preemptions.get(reason, 0) + 1

    def count_finished(self, reason: str) -> None:
        """Count one job that ended without a result."""
        self.jobs_finished[reason] = self.jobs_finished.get(reason, 0) + 1

    def take_in(self, worker_id: str, counters: EngineCounters) -> None:
        """Keep all that a worker has counted since it started. No two workers of one driver have the same id."""
        self.by_worker[worker_id] = counters

    def totals(self) -> EngineCounters:
        """The counts of all workers and the driver's own, added up; a worker that is lost takes nothing away.

        What a killed worker counted after its last report is not in there.
        """
        sums = EngineCounters(num_store_retries=self.num_store_retries, jobs_finished=dict(self.jobs_finished))
        for counters in list(self.by_worker.values()):
            sums.add(counters)
        return sums


def _sum(one: Any, other: Any) -> Any:
    """Numbers, lists of equal length, histograms of equal bounds, and dicts of these by key."""
    if isinstance(one, dict):
        return {**one, **other, **{key: _sum(one[key], other[key]) for key in one.keys() & other.keys()}}
    if isinstance(one, list):
        return [_sum(*pair) for pair in zip(one, other, strict=True)]
    if isinstance(one, Histogram):
        return Histogram(one.bounds, _sum(one.counts, other.counts), one.total + other.total)
    return one + other
